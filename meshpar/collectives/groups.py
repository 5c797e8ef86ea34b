"""Which mesh axes a collective crosses: from the groups in its text to names.

In the text of a program for one mesh a device is its position in the mesh, counted row by row. XLA writes groups of
positions in four ways; `groups_of` reads each. An axis is crossed when two members of a group differ in their
coordinate along it. Grammar: the printer of `CollectiveDeviceList` in XLA's xla/hlo/ir.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh\w*\[([^\]]*)\]"
    r"(?:, ?device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? ?\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def groups_of(attributes: str, devices: int) -> Groups:
    """The groups that communicate among themselves, each a tuple of positions; for a permute its (from, to) pairs.

    Args:
      attributes: what follows the operands of an instruction.
      devices: how many the mesh has; they are one group where the text names none.
    """
    if found := _PAIRS.search(attributes):
        return tuple(
            (int(source), int(target))
            for source, target in re.findall(r"\{(\d+),(\d+)\}", found[1])
            if source != target
        )
    if found := _MESH.search(attributes):
        return _rows(_of_mesh(*found.groups()))
    if found := _IOTA.search(attributes):
        ids = _iota(found[2], found[3])
        return _rows(ids.reshape(_numbers(found[1])))
    if (found := _LISTS.search(attributes)) and found[1]:
        groups = tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", found[1]) if group)
        # without global ids a group lists replicas, of which there is one here, and takes all partitions of each
        of_replicas = (
            groups == ((0,),) and "channel_id=" in attributes and "use_global_device_ids=true" not in attributes
        )
        return (tuple(range(devices)),) if of_replicas else groups
    return (tuple(range(devices)),)


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that some group crosses, outermost first."""
    sizes = tuple(mesh.values())
    crossed: set[int] = set()
    for group in groups:
        coordinates = np.asarray(np.unravel_index(np.asarray(group), sizes)) if group else np.zeros((len(sizes), 1))
        crossed.update(np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1)).tolist())
    return tuple(name for dim, name in enumerate(mesh) if dim in crossed)


def between_slices(slices: int, devices: int) -> Groups:
    """The groups of devices at the same place of each slice; a slice is a run of positions, as `mesh.build` lays it."""
    return _rows(np.arange(devices).reshape(slices, -1).T)


def _of_mesh(axes: str, iota: str | None, order: str | None, listed: str | None, chosen: str) -> np.ndarray:
    """Groups `[group, member]` written as axes of a mesh of XLA's own, such as `['a'=2,'b'=4] {'a'}`.

    A part of an axis is written `'b':(2)2`: of its 4 the factor 2 that follows a factor of 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values()))
    if iota is not None:
        ids = _iota(iota, order)
    elif listed is not None:
        ids = np.array(_numbers(listed))
    wanted: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        wanted.setdefault(name, []).append((int(before or 1), int(size or sizes[name])))
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        done = 1
        for before, factor in sorted(wanted.get(name, [])):
            if before > done:
                shape.append(before // done)
            inside.append(len(shape))
            shape.append(factor)
            done = before * factor
        if size > done:
            shape.append(size // done)
    outside = [dim for dim in range(len(shape)) if dim not in inside]
    members = math.prod(shape[dim] for dim in inside)
    return ids.reshape(shape).transpose(*outside, *inside).reshape(-1, members)


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = _numbers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _rows(ids: np.ndarray | Sequence[Sequence[int]]) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)
