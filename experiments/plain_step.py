"""The yardstick of `bench_step`: a decoder-only transformer's training step in plain JAX and optax, by hand.

RMSNorm, RoPE, grouped kv heads, SwiGLU, untied head; a scan over stacked layers, fp32 parameters with bf16, fp16 or
fp32 compute, fp32 softmax and naive cross-entropy over whole logits, global-norm clip and AdamW, dynamic loss scaling
for fp16, one jit that donates its state. Parameters lie over fsdp and tensor (FSDP and Megatron's columns and rows),
the batch over data and fsdp. It uses nothing of meshpar, and no trick that this package uses: what it costs is what a
user pays for writing it himself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # what the batch is split over


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model, in elements, and the compute dtype."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    seq: int
    compute: Any

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """`step(params, opt_state, tokens) -> (params, opt_state, loss)`, jitted with its first two arguments donated;
    tokens are int32 `[batch, seq + 1]`.
    """

    step: Any
    init: Callable[[Any], Any]  # parameters -> optimizer state, in its shards
    shardings: Any  # of the parameters
    opt_shardings: Any
    token_sharding: NamedSharding


def make(sizes: Sizes, degrees: dict[str, int], devices: Sequence[jax.Device], *, lr: float) -> PlainStep:
    """The step on a mesh of the given degrees of data, fsdp and tensor."""
    mesh = Mesh(np.array(devices).reshape([degrees.get(axis, 1) for axis in AXES]), AXES)
    specs = {
        "embed": P("tensor", "fsdp"),
        "head": P("fsdp", "tensor"),
        "final_norm": P(),
        "layers": {  # stacked over layers on dim 0
            "norm1": P(),
            "norm2": P(),
            "wq": P(None, "fsdp", "tensor", None),
            "wk": P(None, "fsdp", "tensor", None),
            "wv": P(None, "fsdp", "tensor", None),
            "wo": P(None, "tensor", None, "fsdp"),
            "w1": P(None, "fsdp", "tensor"),
            "w3": P(None, "fsdp", "tensor"),
            "w2": P(None, "tensor", "fsdp"),
        },
    }
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))
    scalar, tokens = NamedSharding(mesh, P()), NamedSharding(mesh, P(ROWS, None))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.1))
    opt_shardings = optax.tree_utils.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, _shapes(sizes)),
        shardings,
        transform_non_params=lambda _: scalar,
    )

    scaled = sizes.compute == jnp.float16
    if scaled:  # the scale, and finite steps in a row, beside the optimizer's state
        opt_shardings = (opt_shardings, (scalar, scalar))

    def init(params: Any) -> Any:
        return (tx.init(params), (jnp.float32(2.0**16), jnp.int32(0))) if scaled else tx.init(params)

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        if not scaled:
            loss, grads = jax.value_and_grad(lambda params: loss_of(sizes, mesh, params, tokens))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss
        opt_state, (scale, finite_steps) = opt_state
        loss, grads = jax.value_and_grad(lambda params: scale * loss_of(sizes, mesh, params, tokens))(params)
        loss, grads = loss / scale, jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, new_opt_state = tx.update(grads, opt_state, params)
        old, new = (params, opt_state), (optax.apply_updates(params, updates), new_opt_state)
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        finite_steps = jnp.where(finite, finite_steps + 1, 0)
        grows = finite_steps >= 2000
        scale = jnp.where(finite, jnp.where(grows, scale * 2.0, scale), jnp.maximum(scale / 2.0, 1.0))
        return params, (opt_state, (scale, jnp.where(grows, 0, finite_steps))), loss

    return PlainStep(
        step=jax.jit(
            step,
            donate_argnums=(0, 1),
            in_shardings=(shardings, opt_shardings, tokens),
            out_shardings=(shardings, opt_shardings, scalar),
        ),
        init=jax.jit(init, out_shardings=opt_shardings),
        shardings=shardings,
        opt_shardings=opt_shardings,
        token_sharding=tokens,
    )


def abstract_arguments(sizes: Sizes, plain: PlainStep, batch: int) -> tuple[Any, Any, Any]:
    """Shapes, dtypes and shardings of the step's arguments, to lower it without memory."""

    def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = _shapes(sizes)
    tokens = jax.ShapeDtypeStruct((batch, sizes.seq + 1), jnp.int32)
    return (
        jax.tree.map(placed, params, plain.shardings),
        jax.tree.map(placed, jax.eval_shape(plain.init, params), plain.opt_shardings),
        placed(tokens, plain.token_sharding),
    )


def parameters_of(llama: Any) -> Any:
    """The parameters of models.llama (untied, without biases) in this file's names; shapes and meaning are the same."""
    blocks = llama["blocks"]
    return {
        "embed": llama["embedding"]["table"],
        "head": llama["unembed"]["kernel"],
        "final_norm": llama["norm"]["scale"],
        "layers": {
            "norm1": blocks["attention_norm"]["scale"],
            "norm2": blocks["mlp_norm"]["scale"],
            "wq": blocks["attention"]["q"]["kernel"],
            "wk": blocks["attention"]["k"]["kernel"],
            "wv": blocks["attention"]["v"]["kernel"],
            "wo": blocks["attention"]["out"]["kernel"],
            "w1": blocks["mlp"]["gate"]["kernel"],
            "w3": blocks["mlp"]["up"]["kernel"],
            "w2": blocks["mlp"]["down"]["kernel"],
        },
    }


def loss_of(sizes: Sizes, mesh: Mesh, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of int32 tokens `[batch, seq + 1]`."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rows = NamedSharding(mesh, P(ROWS, None, None))
    x = params["embed"].astype(sizes.compute)[inputs]
    x = jax.lax.with_sharding_constraint(x, rows)
    x, _ = jax.lax.scan(lambda x, p: (_layer(sizes, rows, x, p), None), x, params["layers"])
    x = _rms(sizes, x, params["final_norm"])
    logits = (x @ params["head"].astype(sizes.compute)).astype(jnp.float32)
    logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P(ROWS, None, "tensor")))
    lse = jax.nn.logsumexp(logits, -1)
    return jnp.mean(lse - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])


def _layer(sizes: Sizes, rows: NamedSharding, x: jax.Array, p: Any) -> jax.Array:
    def use(weight: jax.Array) -> jax.Array:
        return weight.astype(sizes.compute)

    cos, sin = _rope_tables(sizes)
    h = _rms(sizes, x, p["norm1"])
    q = _rope(sizes, jnp.einsum("bsd,dhk->bshk", h, use(p["wq"])), cos, sin)
    k = _rope(sizes, jnp.einsum("bsd,dhk->bshk", h, use(p["wk"])), cos, sin)
    v = jnp.einsum("bsd,dhk->bshk", h, use(p["wv"]))
    q = q.reshape(*q.shape[:2], sizes.kv_heads, sizes.heads // sizes.kv_heads, sizes.head_dim)
    scores = jnp.einsum("bqngk,btnk->bngqt", q, k).astype(jnp.float32) / math.sqrt(sizes.head_dim)
    scores = jnp.where(jnp.tril(jnp.ones((sizes.seq, sizes.seq), bool)), scores, jnp.asarray(-1e30, scores.dtype))
    weights = jax.nn.softmax(scores, -1).astype(sizes.compute)
    o = jnp.einsum("bngqt,btnk->bqngk", weights, v).reshape(*x.shape[:2], sizes.heads, sizes.head_dim)
    x = x + jnp.einsum("bshk,hkd->bsd", o, use(p["wo"]))
    h = _rms(sizes, x, p["norm2"])
    x = x + jnp.einsum("bsf,fd->bsd", jax.nn.silu(h @ use(p["w1"])) * (h @ use(p["w3"])), use(p["w2"]))
    return jax.lax.with_sharding_constraint(x, rows)


def _rms(sizes: Sizes, x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5) * scale).astype(sizes.compute)


def _rope_tables(sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    frequencies = 1.0 / (10000 ** (np.arange(0, sizes.head_dim, 2) / sizes.head_dim))
    angles = np.arange(sizes.seq)[:, None] * frequencies[None]
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _rope(sizes: Sizes, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, -1)
    c, s = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], -1).astype(sizes.compute)


def _shapes(sizes: Sizes) -> Any:
    """Shapes of the parameters, all fp32."""
    d, heads, kv, k, ff, layers = sizes.embed, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.mlp, sizes.layers

    def stacked(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layers, *shape), jnp.float32)

    return {
        "embed": jax.ShapeDtypeStruct((sizes.vocab, d), jnp.float32),
        "head": jax.ShapeDtypeStruct((d, sizes.vocab), jnp.float32),
        "final_norm": jax.ShapeDtypeStruct((d,), jnp.float32),
        "layers": {
            "norm1": stacked(d),
            "norm2": stacked(d),
            "wq": stacked(d, heads, k),
            "wk": stacked(d, kv, k),
            "wv": stacked(d, kv, k),
            "wo": stacked(heads, k, d),
            "w1": stacked(d, ff),
            "w3": stacked(d, ff),
            "w2": stacked(ff, d),
        },
    }
