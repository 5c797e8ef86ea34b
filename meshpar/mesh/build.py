"""From a MeshSpec and devices to a `jax.sharding.Mesh`, with the innermost axis on the fastest link.

All six axes are always there, of size 1 where unused, so that a layout never asks whether an axis exists. Devices are
sorted before they are placed, so the order in which they are passed changes nothing. Where devices come in slices (TPU)
or nodes (GPU) with slow links between them, the outermost axes cross those links: in row-major order of the mesh every
slice is one contiguous run. Inside a TPU slice `jax.experimental.mesh_utils` matches axes to the torus.

`jax.make_mesh` is not used: it drops devices silently when the mesh is smaller. Axis types are passed explicitly: their
default differs between jax's mesh classes and versions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar.mesh.axes import AXES
from meshpar.mesh.spec import MeshSpec

_AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def build_mesh(spec: MeshSpec, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `spec` on `devices`, by default all there are; a -1 in `spec` takes what is left.

    Args:
        spec: sizes of the axes.
        devices: the devices to use, in any order; where the mesh needs fewer, the first in sorted order.

    Returns:
        A mesh with the axes `AXES`, all of type Auto.

    Raises:
        ValueError: the sizes do not fit the devices, or cannot be laid over their slices or nodes.
    """
    pool = _sorted(jax.devices() if devices is None else devices)
    if devices is not None and not spec.has_free_axis:
        pool = pool[: spec.product]
    spec = spec.resolve(len(pool))
    return Mesh(arrange(spec, pool), AXES, axis_types=_AXIS_TYPES)


def abstract_mesh(spec: MeshSpec) -> AbstractMesh:
    """The mesh of `spec` without devices, enough to resolve layouts and to trace.

    Raises:
        ValueError: an axis of `spec` is still -1.
    """
    if spec.has_free_axis:
        raise ValueError(f"mesh {spec} has no shape while an axis is -1; resolve it for a number of devices first")
    return AbstractMesh(tuple(spec.sizes.values()), AXES, axis_types=_AXIS_TYPES)


def arrange(spec: MeshSpec, devices: Sequence[jax.Device]) -> np.ndarray:
    """`devices` as an object array of the shape of `spec`, the order of `devices` being irrelevant.

    Raises:
        ValueError: slices or nodes differ in size or cannot be filled, or a TPU slice's chips cannot form the mesh.
    """
    sizes = tuple(spec.sizes.values())
    devices = _sorted(devices)
    assert math.prod(sizes) == len(devices), (spec, len(devices))
    slices: dict[int, list[jax.Device]] = defaultdict(list)
    for device in devices:
        slices[_slice_of(device)].append(device)
    counts = sorted({len(members) for members in slices.values()})
    if len(counts) > 1:
        raise ValueError(
            f"mesh {spec} would lie on {len(slices)} {_noun(devices[0])}s of unequal size, {counts[0]} "
            f"to {counts[-1]} devices; pass the same number of devices of each"
        )
    _, inside = split_over_slices(spec, len(slices), _noun(devices[0]))
    # Slices split a prefix of the axes, so in row-major order they follow one another, whole.
    blocks = [_arrange_slice(spec, inside, members).reshape(-1) for _, members in sorted(slices.items())]
    return np.concatenate(blocks).reshape(sizes)


def split_over_slices(spec: MeshSpec, n_slices: int, noun: str = "slice") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Every axis size as (across slices, inside a slice), the slices taken from the outermost axis inwards.

    Returns:
        Two shapes over `AXES`. Their elementwise product is the mesh, the product of the first is `n_slices`, and an
        axis crosses slices only when every axis outside it lies across slices as a whole.

    Raises:
        ValueError: an axis would cross slices at uneven places.
    """
    left = n_slices
    across = []
    for name, size in spec.sizes.items():
        if left % size != 0 and size % left != 0:
            raise ValueError(
                f"mesh {spec} does not fill {n_slices} {noun}s of {spec.product // n_slices} devices evenly: from the "
                f"outermost axis inwards, {name}={size} meets {left} {noun}s; choose {name} as a divisor or a multiple "
                f"of {left}"
            )
        across.append(min(left, size))
        left //= across[-1]
    assert left == 1, (spec, n_slices)
    return tuple(across), tuple(size // outer for size, outer in zip(spec.sizes.values(), across, strict=True))


def _arrange_slice(spec: MeshSpec, shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """The devices of one slice or node in the given shape; on TPU by their place in the torus."""
    if devices[0].platform != "tpu":
        flat = np.empty(len(devices), dtype=object)
        flat[:] = devices
        return flat.reshape(shape)
    from jax.experimental import mesh_utils

    try:
        # Split a torus axis over two mesh axes only where no whole assignment exists: v5e 4x4 as data=2 tensor=8.
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"mesh {spec} cannot be laid on the {len(devices)} {devices[0].device_kind} devices of slice "
            f"{_slice_of(devices[0])}: their chips must form a full box whose sides the axes can share; pass such "
            f"devices or choose other sizes"
        ) from error


def _sorted(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices in their canonical order: slice or node, process, id.

    Raises:
        ValueError: there are none, one is given twice, or they are of several platforms.
    """
    if not devices:
        raise ValueError("a mesh was asked for with no devices; pass at least one, or None for all there are")
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise ValueError(f"a mesh was asked for on devices of {' and '.join(platforms)}; pass devices of one platform")
    ordered = sorted(devices, key=lambda device: (_slice_of(device), device.process_index, device.id))
    for first, second in pairwise(ordered):
        if first == second:
            raise ValueError(f"device {first} is given twice to one mesh; pass every device once")
    return ordered


def _slice_of(device: Any) -> int:
    """Which group of fast links a device is in: TPU slice, GPU node (process, where jax names no slice), one on CPU."""
    if device.platform == "cpu":
        return 0
    index = getattr(device, "slice_index", None)
    if index is None:
        return 0 if device.platform == "tpu" else device.process_index
    return index


def _noun(device: jax.Device) -> str:
    return "slice" if device.platform == "tpu" else "node"
