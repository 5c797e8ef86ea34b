"""The map between our parameters and a file's tensors, as data, and what follows from it: check, load, and the way
back.

`Entry("blocks/mlp/up/kernel", "model.layers.{layer}.mlp.up_proj.weight", "mlp embed -> embed mlp")`: on the left the
dims of their tensor, on the right those of ours. `(heads head_dim)` is one dim of theirs that is two of ours; `(0/3
heads head_dim)` is the first third of one; `{layer}` in a name is the number of the layer, whose dim ours has in
front.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshpar.hf.safetensors import DTYPES, Chunks, Index, Spec, Stored
from meshpar.interfaces import PyTree
from meshpar.layout.resolve import path_name
from meshpar.layout.rules import did_you_mean

WEIGHTS = tuple(DTYPES[name] for name in ("F32", "BF16", "F16"))  # what weights may be in
_COMPARED = 2**24  # elements of two tensors that are compared at a time

Sizes = Mapping[str, int]
OnRead = Callable[[str, int], None]  # path of a parameter, elements of it that have been filled since the last call


@dataclass(frozen=True)
class Entry:
    """A parameter, or one in each layer, and where it lies."""

    ours: str  # path of the parameter
    theirs: str  # name of the tensor; with {layer} where ours is stacked
    dims: str  # "mlp embed -> embed mlp"

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a dim of layers in front."""
        return "{layer}" in self.theirs

    def name(self, layer: int) -> str:
        """The tensor of a layer; `layer` is any number where there is one tensor."""
        return self.theirs.replace("{layer}", str(layer))

    @functools.cached_property
    def _sides(self) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
        """Their dims, each as the factors that it is made of, and the names of ours."""
        left, _, right = self.dims.partition("->")
        groups = re.findall(r"\(([^)]*)\)|(\S+)", left)
        return tuple(tuple((group or one).split()) for group, one in groups), tuple(right.split())

    def our_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each dim by name, from the shape of the parameter."""
        names = self._sides[1]
        shape = shape[1:] if self.stacked else shape
        assert len(shape) == len(names), (self, shape)
        return dict(zip(names, shape, strict=True))

    def their_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape of the tensor; `sizes` are those of the file, without padding."""
        return tuple(math.prod(_count(factor, sizes) for factor in group) for group in self._sides[0])

    def _factors(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(_count(factor, sizes) for group in self._sides[0] for factor in group)

    def view(self, tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Our dims of a whole tensor, as a view of it: reading it imports, writing to it exports."""
        return self._ordered(tensor.reshape(self._factors(sizes)), lambda factor: int(factor.partition("/")[0]))

    def read(self, tensor: Stored, sizes: Sizes, ranges: Mapping[str, tuple[int, int]]) -> np.ndarray:
        """A block of our dims, of which no more is read than lies between its first and last byte in each dim.

        Args:
          ranges: the first and the last but one place in each of our dims, inside the file's sizes.
        """
        index: list[slice] = []
        shape: list[int] = []
        inner: list[slice] = []  # of the factors of what was read
        for group in self._sides[0]:
            low, high = 0, 1
            for factor in group:
                size = _count(factor, sizes)
                start, end = _range(factor, ranges)
                if high - low == 1:  # all outer factors are at one place, so a range here is one run
                    low, high = low * size + start, low * size + end
                    shape.append(end - start)
                    inner.append(slice(None))
                else:
                    low, high = low * size, high * size
                    shape.append(size)
                    inner.append(slice(start, end))
            index.append(slice(low, high))
        return self._ordered(tensor.read(tuple(index)).reshape(shape)[tuple(inner)], lambda factor: 0)

    def _ordered(self, array: np.ndarray, at: Callable[[str], int]) -> np.ndarray:
        """An array of all factors with fixed ones taken `at` a place, in our order."""
        factors = [factor for group in self._sides[0] for factor in group]
        taken = array[tuple(at(factor) if "/" in factor else slice(None) for factor in factors)]
        named = [factor for factor in factors if "/" not in factor]
        return taken.transpose([named.index(name) for name in self._sides[1]])


def _count(factor: str, sizes: Sizes) -> int:
    return int(factor.partition("/")[2]) if "/" in factor else sizes[factor]


def _range(factor: str, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    if "/" not in factor:
        return ranges[factor]
    at = int(factor.partition("/")[0])
    return at, at + 1


@dataclass(frozen=True, kw_only=True)
class Weights:
    """All of a model: where each parameter is, and what else may be in the file."""

    entries: tuple[Entry, ...]
    sizes: Sizes = field(default_factory=dict)  # of dims that ours pads: {"vocab": 49152}
    ignored: tuple[str, ...] = ()  # patterns of tensors that hold nothing learned
    copies: Mapping[str, str] = field(default_factory=dict)  # name -> the tensor that it must equal where it is there
    prefix: str = ""  # of all names, which some files leave out
    hints: Mapping[str, str] = field(default_factory=dict)  # name -> what to say when it is missing or differs

    def named_as(self, there: Iterable[str]) -> Callable[[str], str]:
        """How the files spell our names for their tensors: with the prefix, or without."""
        if self.prefix and not any(name.startswith(self.prefix) for name in there):
            return lambda name: name.removeprefix(self.prefix)
        return lambda name: name

    def in_file(self, entry: Entry, shape: tuple[int, ...]) -> dict[str, int]:
        """The sizes of a parameter's dims in the file."""
        return {name: self.sizes.get(name, size) for name, size in entry.our_sizes(shape).items()}

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[tuple[Entry, int]]]:
        """Each tensor by name, in order, with the entries and the layer that it holds.

        Args:
          shapes: of all parameters, by path.
        """
        missing = set(shapes) ^ {entry.ours for entry in self.entries}
        assert not missing, f"parameters and map differ in {sorted(missing)}"
        layers = max((shapes[entry.ours][0] for entry in self.entries if entry.stacked), default=0)
        found: dict[str, list[tuple[Entry, int]]] = {}
        for entry in (entry for entry in self.entries if not entry.stacked):
            found.setdefault(entry.name(0), []).append((entry, 0))
        for layer in range(layers):
            for entry in (entry for entry in self.entries if entry.stacked):
                found.setdefault(entry.name(layer), []).append((entry, layer))
        return found


def shapes_of(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by path."""
    return {path_name(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(tree)}


# --- check -----------------------------------------------------------------------------------------------------------


def check(weights: Weights, tensors: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ValueError, one sentence, when the file is not the model.

    Args:
      tensors: what is there.
      shapes: of our parameters, by path.
      where: the folder or file, for errors.
    """
    spell = weights.named_as(tensors)
    wanted = {spell(name): parts for name, parts in weights.tensors(shapes).items()}
    copies = {spell(name): spell(of) for name, of in weights.copies.items()}
    lacking = [name for name in wanted if name not in tensors]
    extra = [
        name
        for name in tensors
        if name not in wanted and name not in copies and not any(re.search(known, name) for known in weights.ignored)
    ]
    if lacking:
        name = lacking[0]
        entry, _ = wanted[name][0]
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        close = did_you_mean(name, extra)
        hint = close or f"; {weights.hints.get(name, 'config.json and the weights must be of one model')}"
        expected = entry.their_shape(weights.in_file(entry, shapes[entry.ours]))
        raise ValueError(f"{where} lacks {name} {expected}{more}, which {entry.ours} is read from{hint}")
    for name, parts in wanted.items():
        tensor, (entry, _) = tensors[name], parts[0]
        expected = entry.their_shape(weights.in_file(entry, shapes[entry.ours]))
        if tensor.shape != expected:
            raise ValueError(
                f"{name} is {tensor.shape} in {tensor.file} and {expected} by config.json, for {entry.ours} "
                f"{shapes[entry.ours]}; config.json and the weights must be of one model"
            )
        if tensor.dtype not in WEIGHTS:
            raise ValueError(
                f"{name} {tensor.shape} in {tensor.file} is {tensor.dtype}; "
                "weights are read in float32, bfloat16 or float16, so convert it to one of them"
            )
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ValueError(
            f"{tensors[extra[0]].file} holds {extra[0]} {tensors[extra[0]].shape}{more}, which no parameter of this "
            "model is read from; config.json and the weights must be of one model"
        )
    for name, of in copies.items():
        if name in tensors and not _equal(tensors[name], tensors[of]):
            raise ValueError(
                f"{name} {tensors[name].shape} in {tensors[name].file} differs from {of} {tensors[of].shape}; "
                f"{weights.hints.get(name, 'the two must be equal')}"
            )


def _equal(one: Stored, other: Stored) -> bool:
    if one.shape != other.shape:
        return False
    rows = max(1, _COMPARED // max(1, math.prod(one.shape[1:])))
    pieces = ((slice(start, start + rows),) for start in range(0, one.shape[0], rows))
    return all(np.array_equal(one.read(at), other.read(at), equal_nan=True) for at in pieces)


# --- in --------------------------------------------------------------------------------------------------------------


def read_block(
    weights: Weights, entry: Entry, tensor: Stored, shape: tuple[int, ...], block: Index, dtype: Any
) -> np.ndarray:
    """A block of a parameter, or of one layer of it, in a dtype; padding is 0.

    Args:
      shape: of the whole parameter.
      block: a slice for each dim, without that of the layers.
    """
    padded, sizes = entry.our_sizes(shape), weights.in_file(entry, shape)
    bounds = {name: part.indices(size)[:2] for (name, size), part in zip(padded.items(), block, strict=True)}
    real = {name: (min(start, sizes[name]), min(end, sizes[name])) for name, (start, end) in bounds.items()}
    array = entry.read(tensor, sizes, real)
    array = array if array.dtype == dtype else array.astype(dtype)
    if real == bounds:
        return array
    out = np.zeros([end - start for start, end in bounds.values()], dtype)
    out[tuple(slice(0, end - start) for start, end in real.values())] = array
    return out


def load(weights: Weights, tensors: Mapping[str, Stored], target: PyTree, on_read: OnRead | None = None) -> PyTree:
    """Reads all parameters, tensor by tensor, each device's part of it alone.

    A process holds the shards of its devices, and on top of them one tensor. Nothing is communicated.

    Args:
      tensors: what `check` has found right.
      target: ShapeDtypeStructs; the sharding of each is a NamedSharding, or none for the first device.

    Raises:
      ValueError: another kind of sharding.
    """
    spell = weights.named_as(tensors)
    by_path = {entry.ours: entry for entry in weights.entries}
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(target):
        entry = by_path[path_name(path)]
        leaves.append(_load(weights, entry, lambda name: tensors[spell(name)], leaf, on_read))
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _load(
    weights: Weights, entry: Entry, tensor: Callable[[str], Stored], leaf: Any, on_read: OnRead | None
) -> jax.Array:
    sharding = _sharding(entry.ours, leaf)
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)

    def of_layer(layer: int, piece: tuple[int, ...], placed: Any) -> jax.Array:
        read = functools.cache(
            lambda block: read_block(weights, entry, tensor(entry.name(layer)), shape, _slices(block), dtype)
        )  # devices that hold the same block share one copy
        made = jax.make_array_from_callback(piece, placed, lambda block: read(_ends(block or (), piece)))
        if on_read is not None:
            on_read(entry.ours, math.prod(piece))
        return made

    if not entry.stacked:
        return _filled(weights, entry, tensor(entry.name(0)), leaf, sharding, on_read)
    inner = _without_layers(sharding)
    zeros, put = _fillers(sharding)
    whole = zeros(shape, dtype)
    for layer in range(shape[0]):
        # waiting, so that no second tensor is read while the first one is still there
        whole = jax.block_until_ready(put(whole, of_layer(layer, shape[1:], inner), np.int32(layer)))
    return whole


def _filled(
    weights: Weights, entry: Entry, tensor: Stored, leaf: Any, sharding: Any, on_read: OnRead | None
) -> jax.Array:
    """A parameter of one tensor, device by device: on top of its shards there is one block."""
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    blocks = {device: _ends(block, shape) for device, block in sharding.addressable_devices_indices_map(shape).items()}
    read = functools.lru_cache(maxsize=1)(lambda ends: read_block(weights, entry, tensor, shape, _slices(ends), dtype))
    shards = []
    for device in sorted(blocks, key=blocks.__getitem__):  # those with the same block one after another
        shard = jax.device_put(read(blocks[device]), device)
        if device.platform == "cpu":
            # It may lie in numpy's memory, which cannot be donated: the first step would copy it. Numpy arrays are not
            # copied when asked for, jax's are.
            shard = jax.device_put(shard, device, may_alias=False)
        shards.append(jax.block_until_ready(shard))
    if on_read is not None:
        on_read(entry.ours, math.prod(shape))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.lru_cache(maxsize=256)  # so that parameters of one shape and split share their programs
def _fillers(
    sharding: NamedSharding | SingleDeviceSharding,
) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Zeros of a shape and dtype, and a function that writes one layer into them in place."""

    def put(whole: jax.Array, piece: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(whole, piece, layer, 0)

    return (
        jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding),
        jax.jit(put, out_shardings=sharding, donate_argnums=0),
    )


def _sharding(path: str, leaf: Any) -> NamedSharding | SingleDeviceSharding:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        raise ValueError(f"{path} has a {type(sharding).__name__}; give it a NamedSharding over a mesh")
    return sharding


def _without_layers(sharding: NamedSharding | SingleDeviceSharding) -> NamedSharding | SingleDeviceSharding:
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _ends(block: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(block, shape, strict=True))


def _slices(ends: Sequence[tuple[int, int]]) -> Index:
    return tuple(slice(start, end) for start, end in ends)


# --- out -------------------------------------------------------------------------------------------------------------

# (path of a parameter, layer or None) -> the array on the host; every process calls it in the same order
Fetch = Callable[[str, int | None], np.ndarray]


def outgoing(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any], fetch: Fetch
) -> tuple[list[Spec], Chunks]:
    """The tensors of a model to be written, and the function that makes each of them when it is due.

    Args:
      shapes: of our parameters, by path.
      dtype: of all tensors.
    """
    parts = weights.tensors(shapes)

    def sizes(entry: Entry) -> dict[str, int]:
        return weights.in_file(entry, shapes[entry.ours])

    specs = [
        Spec(name=name, shape=entry.their_shape(sizes(entry)), dtype=dtype) for name, ((entry, _), *_) in parts.items()
    ]

    def chunks(spec: Spec) -> Iterator[np.ndarray]:
        tensor = np.empty(spec.shape, dtype)
        for entry, layer in parts[spec.name]:
            ours = fetch(entry.ours, layer if entry.stacked else None)
            real = tuple(slice(0, size) for size in sizes(entry).values())
            entry.view(tensor, sizes(entry))[...] = ours[real].astype(dtype, copy=False)
        yield tensor

    return specs, chunks


def fetch_from(params: PyTree) -> Fetch:
    """Fetches from arrays on any mesh, one layer at a time."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}

    def fetch(path: str, layer: int | None) -> np.ndarray:
        leaf = leaves[path]
        if getattr(leaf, "is_fully_addressable", True):
            return np.asarray(leaf if layer is None else leaf[layer])
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        if layer is None:
            return np.asarray(jax.jit(lambda x: x, out_shardings=whole)(leaf))
        return np.asarray(jax.jit(lambda x, i: x[i], out_shardings=whole)(leaf, np.int32(layer)))

    return fetch
