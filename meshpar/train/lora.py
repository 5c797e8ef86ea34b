"""LoRA: beside each chosen kernel W `[in, out]` two thin ones are trained, A `[in, rank]` and B `[rank, out]`, and the
layer computes `x W + alpha/rank (x A) B`. B starts at zero, so step 0 is the model itself.

An adapted model is a `Model` like any other: it has the leaves `lora_a` and `lora_b` beside `kernel`, everything else
is frozen, and binding it puts an `Adapted` where the model's code expects a kernel. So layouts, ZeRO, checkpoints and
generation know nothing of it. A has the logical axes of W's inputs and "rank", B "rank" and those of its outputs: on
any mesh they are split as W is.
Source: LoRA (Hu et al. 2021, arXiv:2106.09685), section 4.1.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.interfaces import Axes, PyTree
from meshpar.layout.resolve import path_name
from meshpar.layout.rules import did_you_mean
from meshpar.matmul.linear import Adapted
from meshpar.module import Model
from meshpar.train.build import Training

KERNEL, A, B = "kernel", "lora_a", "lora_b"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which kernels get an adapter, and how large."""

    rank: int = 8  # 4 to 64; adapters are as large as rank (in + out)
    alpha: float = 16.0  # adapters count alpha / rank; twice the rank is usual, and lets the rank change at one lr
    # kernels of the layers: "attention/q" or "q", "attention" for all below it, or a pattern such as "mlp/*"
    targets: tuple[str, ...] = ("attention", "mlp")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be at least 1; 8 is usual")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha={self.alpha} must be above 0; twice the rank is usual")
        if not self.targets:
            raise ValueError("lora.targets is empty, so nothing would be trained; name kernels, such as q,v")

    @property
    def scale(self) -> float:
        """What the product of A and B counts."""
        return self.alpha / self.rank


def adapt(model: Model, lora: Lora) -> Model:
    """The model with adapters, which alone are trained.

    Raises:
      ValueError: a target names no kernel of the layers.
    """
    chosen = _chosen(model, lora)
    adapter = {path: kernel.adapter(lora.rank) for path, kernel in chosen.items()}
    shapes = _beside(
        model.shapes,
        {
            path: {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in of.items()}
            for path, of in adapter.items()
        },
    )
    axes = _beside(model.axes, {path: {name: axes for name, (_, axes) in of.items()} for path, of in adapter.items()})
    adapters = {f"{path.removesuffix(KERNEL)}{name}" for path in chosen for name in (A, B)}
    paths = {path_name(path) for path, _ in jax.tree.leaves_with_path(shapes)}

    def init(key: jax.Array) -> PyTree:
        # keyed by path, so that other targets change none of these
        keys = {path: jax.random.fold_in(key, zlib.crc32(path.encode())) for path in chosen}
        return _beside(model.init(key), {path: of.draw(lora.rank, keys[path]) for path, of in chosen.items()})

    return dataclasses.replace(
        model,
        shapes=shapes,
        axes=axes,
        init=init,
        _bind=lambda params: model.bind(_with_adapted(params, lora.scale)),
        _bind_block=lambda params: model.bind_block(_with_adapted(params, lora.scale)),
        frozen=frozenset(paths - adapters),
    )


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """A kernel that gets an adapter: its shape and axes in halves."""

    layers: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_axes: Axes
    output_axes: Axes

    def adapter(self, rank: int) -> dict[str, tuple[tuple[int, ...], Axes]]:
        """Shape and axes of A and of B."""
        stacked = ("layers",) * len(self.layers)
        return {
            A: ((*self.layers, *self.inputs, rank), (*stacked, *self.input_axes, "rank")),
            B: ((*self.layers, rank, *self.outputs), (*stacked, "rank", *self.output_axes)),
        }

    def draw(self, rank: int, key: jax.Array) -> dict[str, jax.Array]:
        """A uniform in ±1/sqrt(inputs), each layer from its own key; B zero."""
        shapes = {name: shape for name, (shape, _) in self.adapter(rank).items()}
        limit, layers = 1 / math.sqrt(math.prod(self.inputs)), self.layers[0]
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(layers))
        draw = jax.vmap(lambda key: jax.random.uniform(key, shapes[A][1:], jnp.float32, -limit, limit))
        return {A: draw(keys), B: jnp.zeros(shapes[B], jnp.float32)}


def _chosen(model: Model, lora: Lora) -> dict[str, _Chosen]:
    """The kernels that the targets name, by path."""
    kernels: dict[str, _Chosen] = {}
    for path, leaf in jax.tree.leaves_with_path({"blocks": model.shapes["blocks"]}):
        name, of = path_name(path), _at(model.axes, path_name(path))
        others = of[1:]
        if name.rsplit("/", 1)[-1] != KERNEL or "embed" not in (others[0], others[-1]):
            continue
        cut = 1 if others[0] == "embed" else len(others) - 1  # every kernel of a layer has embed on one side
        kernels[name] = _Chosen(
            layers=leaf.shape[:1],
            inputs=leaf.shape[1 : 1 + cut],
            outputs=leaf.shape[1 + cut :],
            input_axes=others[:cut],
            output_axes=others[cut:],
        )
    short = {path: path.removeprefix("blocks/").removesuffix(f"/{KERNEL}") for path in kernels}
    found: dict[str, _Chosen] = {}
    for target in lora.targets:
        of_target = {path: kernels[path] for path, name in short.items() if _matches(name, target)}
        if not of_target:
            known = list(short.values())
            words = dict.fromkeys([*known, *(part for name in known for part in name.split("/"))])
            hint = did_you_mean(target, words) or ";"
            raise ValueError(
                f"lora.targets has {target!r}, which is no kernel{hint} the layers have {', '.join(known)}"
            )
        found |= of_target
    return {path: found[path] for path in kernels if path in found}


def _matches(name: str, target: str) -> bool:
    return fnmatch.fnmatchcase(name, target) or name.endswith(f"/{target}") or name.startswith(f"{target}/")


def _at(tree: PyTree, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree


def _beside(tree: PyTree, more: Mapping[str, Mapping[str, Any]], path: str = "") -> PyTree:
    """A tree with leaves beside others: `more` has them by name, by the path of the leaf that is there."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        at = f"{path}{name}"
        found[name] = _beside(value, more, f"{at}/") if isinstance(value, dict) else value
        found |= more.get(at, {})
    return found


def _with_adapted(params: PyTree, scale: float) -> PyTree:
    """The tree that the model itself has, with an `Adapted` for each kernel that has an adapter."""
    if A in params:
        rest = {name: value for name, value in params.items() if name not in (A, B)}
        return {**rest, KERNEL: Adapted(kernel=params[KERNEL], a=params[A], b=params[B], scale=scale)}
    return {name: _with_adapted(value, scale) if isinstance(value, dict) else value for name, value in params.items()}


# --- a run -----------------------------------------------------------------------------------------------------------


def with_fresh_adapters(training: Training, base: PyTree, seed: int) -> PyTree:
    """What `Training.start` takes: the model's own weights, and adapters that are drawn.

    Args:
      base: as `Model.untrained` of `Training.abstract_weights` describes them.
    """
    model = training.model
    target = model.trained(training.abstract_weights())

    def draw(key: jax.Array) -> PyTree:  # XLA drops the parameters that are not returned
        return jax.tree.map(lambda leaf, of: leaf.astype(of.dtype), model.trained(model.init(key)), target)

    where = jax.tree.map(lambda leaf: leaf.sharding, target)
    return model.whole(base, jax.jit(draw, out_shardings=where)(jax.random.key(seed)))


def merge_adapters(base: PyTree, adapters: PyTree, lora: Lora) -> PyTree:
    """The base with `W + alpha/rank A B` for each adapted kernel, in the dtype and layout of W: what the model without
    adapters needs to compute the same.

    Args:
      base: the model's own parameters, on any mesh; best in fp32. It is taken over: use it no more.
      adapters: the trained part of an adapted model's.
    """
    merged = {}
    for name, value in base.items():
        inner = adapters.get(name, {}) if isinstance(adapters, Mapping) else {}
        merged[name] = merge_adapters(value, inner, lora) if isinstance(value, dict) else value
    if A in adapters:
        merged[KERNEL] = _merged(base[KERNEL], adapters[A], adapters[B], lora.scale)
    return merged


def _merged(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    inputs = a.ndim - 2
    names = iter(string.ascii_lowercase)
    layer, rank, *dims = (next(names) for _ in range(kernel.ndim + 1))
    ins, outs = "".join(dims[:inputs]), "".join(dims[inputs:])
    spelled = f"{layer}{ins}{rank},{layer}{rank}{outs}->{layer}{ins}{outs}"

    def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        product = jnp.einsum(spelled, a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
        return (kernel.astype(jnp.float32) + scale * product).astype(kernel.dtype)

    return jax.jit(add, out_shardings=kernel.sharding, donate_argnums=0)(kernel, a, b)
