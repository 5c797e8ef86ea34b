"""The arrays of a checkpoint on disk, through Orbax.

Leaves are kept by path in one flat dict, so what is read need not have the tree that was written. Each process writes
the shards that it holds into a folder of its own; `merge` makes one index of them. A typed PRNG key is stored as its
key data.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ALIGNMENT = 64  # bytes, of XLA's buffers on CPU
Room = dict[str, np.ndarray]  # memory for copies of CPU arrays, kept from save to save: new pages cost more than a copy


def begin(folder: Path, arrays: Mapping[str, jax.Array], room: Room) -> list[Any]:
    """Begins to write; returns when the arrays may be donated, with futures that end when all is written and `room` is
    free again.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(_is_news)
    data = {path: jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in arrays.items()}
    plain = {path: _copied(path, leaf, room) for path, leaf in data.items()}
    return asyncio.run(_handler().async_save(_path(folder), args=ocp.args.PyTreeSave(plain))) or []


def _is_news(record: logging.LogRecord) -> bool:
    """Whether the caller does not get what is logged as an exception too: Orbax prints the whole trace of a failure."""
    return "_SignalingThread.run() raised" not in record.getMessage()


def own_files(folder: Path) -> list[Path]:
    """What this process wrote."""
    return files(folder / f"ocdbt.process_{jax.process_index()}")


def merge(folder: Path) -> None:
    """Makes the index of what all processes wrote; for one process, after all have written."""
    _handler().finalize(_path(folder))


def read(folder: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads leaves into the shards of `wanted`, cast on the host, one shard at a time.

    Args:
      wanted: arrays or ShapeDtypeStructs by path; the first device where one has no sharding.
    """
    import orbax.checkpoint as ocp

    plain = {path: _plain(leaf) for path, leaf in wanted.items()}
    arguments = {
        path: ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )
        for path, leaf in plain.items()
    }
    found = _handler().restore(
        _path(folder), args=ocp.args.PyTreeRestore(item=plain, restore_args=arguments, partial_restore=True)
    )
    return {path: _like(_owned(found.pop(path)), leaf) for path, leaf in wanted.items()}


def files(folder: Path) -> list[Path]:
    """All files under a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@functools.cache
def _handler() -> Any:
    """Orbax's reader and writer. Without compression: trained weights shrink by a tenth, for most of a save's time."""
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _path(path: Path) -> Any:
    from etils import epath  # type: ignore[import-untyped]

    return epath.Path(path)


def _plain(leaf: Any) -> jax.ShapeDtypeStruct:
    plain = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)


def _copied(path: str, array: jax.Array, room: Room) -> jax.Array:
    """The array on the host, where a donating step does not touch it. Accelerators' memory is copied by Orbax. CPU
    memory Orbax would read while it writes, so that XLA copies what it is given, within the step.
    """
    if any(device.platform != "cpu" for device in array.devices()):
        return array
    copies: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        part = str(shard.index)  # replicas have one copy
        if part not in copies:
            copies[part] = _copy_into(room, f"{path} {part}", np.asarray(shard.data))
    shards = [jax.device_put(copies[str(shard.index)], shard.device) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _copy_into(room: Room, name: str, array: np.ndarray) -> np.ndarray:
    """A copy in kept memory, which jax takes for a device's as it is."""
    if name not in room or room[name].nbytes != array.nbytes + _ALIGNMENT:
        room[name] = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room[name].ctypes.data % _ALIGNMENT
    copy = room[name][start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def _owned(array: jax.Array) -> jax.Array:
    """An array that a step can take over. On CPU one made from numpy may lie in numpy's memory, which cannot be
    donated: the first step would copy it.
    """
    on_cpu = all(device.platform == "cpu" for device in array.devices())
    return jax.device_put(array, array.sharding, may_alias=False) if on_cpu else array


def _like(array: jax.Array, leaf: Any) -> jax.Array:
    if not is_key(leaf):
        return array
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)  # which asks for an array, or a traced one
    return jax.random.wrap_key_data(array, impl=impls[0])
