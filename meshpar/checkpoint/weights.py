"""Weights alone, in one file that any tool reads: safetensors, `blocks/mlp/up/kernel` and the like by path.

Written from any mesh, read onto any: each device's block is read by itself. The file ends up whole or not there.
Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.checkpoint.reshard import named_leaves
from meshpar.interfaces import PyTree


def save_weights(
    path: Path | str, params: PyTree, *, dtype: Any = None, metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes parameters, which all must fit into the host memory of the first process.

    Called by all processes; the first one writes. With several of them one array at a time is whole on each device.

    Args:
      params: arrays on any mesh.
      dtype: to cast to; None: as they are.
      metadata: JSON values, kept in the file's header under "meshpar".
    """
    from safetensors.numpy import save_file

    path = Path(path)
    whole: dict[str, np.ndarray] = {}
    for name, leaf in named_leaves(params).items():
        leaf = leaf if dtype is None else leaf.astype(dtype)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        if jax.process_index() == 0:
            whole[name] = np.asarray(leaf)
    if jax.process_index() == 0:
        temporary = path.with_name(f"{path.name}.writing")
        save_file(whole, temporary, metadata={"meshpar": json.dumps(metadata or {})})
        temporary.rename(path)


def load_weights(path: Path | str, target: PyTree) -> PyTree:
    """Reads parameters into the shapes, dtypes and shardings of `target`.

    Args:
      target: ShapeDtypeStructs with shardings (`Training.abstract_state().params`), or arrays.

    Raises:
      ValueError: the file is missing, is no such file, lacks an array, or has it in another shape.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="numpy") as file:
            there = set(file.keys())
            leaves = {name: _read(file, there, path, name, leaf) for name, leaf in named_leaves(target).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); name a file that save_weights wrote") from None
    return jax.tree.unflatten(jax.tree.structure(target), leaves.values())


def _read(file: Any, there: set[str], path: Path, name: str, leaf: Any) -> jax.Array:
    if name not in there:
        raise ValueError(f"{path} has no {name}; use the model that it was written with")
    stored = file.get_slice(name)
    shape = tuple(stored.get_shape())
    if shape != leaf.shape:
        raise ValueError(f"{name} is {shape} in {path} and {leaf.shape} here; use the model that it was written with")
    if not shape:
        return jax.make_array_from_callback(shape, leaf.sharding, lambda _: file.get_tensor(name).astype(leaf.dtype))
    return jax.make_array_from_callback(shape, leaf.sharding, lambda block: stored[block].astype(leaf.dtype))
