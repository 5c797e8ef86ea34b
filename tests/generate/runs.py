"""Models and what they say without a cache, to hold generation against."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import meshpar as mp
from meshpar.interfaces import Batch
from meshpar.mesh.build import build_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from tests.conformance.runs import GPT, LLAMA, model_of

VOCAB = LLAMA.vocab
MISTRAL = dataclasses.replace(LLAMA, window=4)


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """A model that is none of ours: two attentions in a block, of other shapes and options, and learned positions."""

    vocab: int = VOCAB
    layers: int = 2
    embed: int = 16
    heads: int = 4
    max_seq: int = 32

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Own(self, rngs)


def weight(rngs: nnx.Rngs, std: float = 0.3, **dims: int) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), tuple(dims.values())), axes=tuple(dims))


class OwnBlock(nnx.Module):
    def __init__(self, config: OwnConfig, rngs: nnx.Rngs):
        embed, heads = config.embed, config.heads
        self.near = weight(rngs, embed=embed, heads=heads, head_dim=6)
        self.far = weight(rngs, embed=embed, heads=heads, head_dim=8)
        self.far_kv = weight(rngs, embed=embed, kv_heads=2, head_dim=8)
        self.near_out = weight(rngs, heads=heads, head_dim=6, embed=embed)
        self.far_out = weight(rngs, heads=heads, head_dim=8, embed=embed)


class Own(nnx.Module):
    def __init__(self, config: OwnConfig, rngs: nnx.Rngs):
        self.table = weight(rngs, 1.0, vocab=96, embed=config.embed)
        self.places = nnx.Param(jax.random.normal(rngs.params(), (config.max_seq, config.embed)), axes=(None, "embed"))
        self.blocks = mp.stack(lambda rngs: OwnBlock(config, rngs), config.layers, rngs)

    def embed(self, batch: Batch, key: jax.Array | None) -> jax.Array:
        where = jnp.arange(batch.tokens.shape[1])[None] if batch.positions is None else batch.positions
        x = mp.lookup(self.table[...], batch.tokens) + mp.lookup(self.places[...], where)
        return mp.constrain(x, "batch seq_residual embed")

    def block(
        self, block: OwnBlock, x: jax.Array, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        h = mp.constrain(x, "batch seq embed")
        near = mp.constrain(mp.linear(h, block.near[...]), "batch seq heads head_dim")
        near = mp.attend(near, near, near, window=3, scale=0.7)
        far = mp.constrain(mp.linear(h, block.far[...]), "batch seq heads head_dim")
        kv = mp.constrain(mp.linear(h, block.far_kv[...]), "batch seq kv_heads head_dim")
        far = mp.attend(far, kv, -kv, softcap=2.0)
        y = mp.linear(near, block.near_out[...], inputs=2) + mp.linear(far, block.far_out[...], inputs=2)
        return mp.constrain(jnp.tanh(x + y), "batch seq_residual embed"), {}

    def head(self, x: jax.Array) -> jax.Array:
        return mp.constrain(mp.linear(mp.constrain(x, "batch seq embed"), self.table[...].T), "batch seq vocab")


CONFIGS = {"llama": LLAMA, "mistral": MISTRAL, "gpt": GPT, "own": OwnConfig()}


@functools.cache
def params_of(config: Any) -> Any:
    return jax.jit(model_of(config).init)(jax.random.key(3))


@functools.cache
def _whole(config: Any) -> Any:
    model = model_of(config)

    @jax.jit
    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        lm = model.bind(params)
        batch = Batch(tokens=tokens, targets=tokens, weights=jnp.ones(tokens.shape, jnp.float32))
        x = lm.embed(batch, None)
        for layer in range(model.layers):
            block = model.bind_block(jax.tree.map(lambda w, layer=layer: w[layer], params["blocks"]))
            x, _ = lm.block(block, x, batch, None)
        return lm.head(x)[..., : config.vocab]

    return logits


def whole(config: Any, tokens: np.ndarray, params: Any = None) -> np.ndarray:
    """fp32 logits `[rows, seq, vocab]` of whole rows, by the model alone, on one device."""
    return np.asarray(_whole(config)(params_of(config) if params is None else params, tokens))


def likeliest(config: Any, prompt: list[int], new: int, params: Any = None) -> list[int]:
    """The most likely continuation, a whole forward for each token."""
    row = np.zeros((4, 16), np.int32)  # what follows a token does not change its logits: one program for all lengths
    row[0, : len(prompt)] = prompt
    end = len(prompt) + new
    for place in range(len(prompt), end):
        row[0, place] = np.argmax(whole(config, row, params)[0, place - 1])
    return row[0, :end].tolist()


def plan_on(mesh: str, **plan: Any) -> tuple[Plan, jax.sharding.Mesh]:
    """A plan in fp32, and its mesh on the first devices."""
    made = Plan(**{"mesh": MeshSpec.parse(mesh), "precision": Policy(compute="fp32"), **plan})
    return made, build_mesh(made.mesh, jax.devices()[: made.mesh.product])
