"""From logical axes and shapes to PartitionSpecs: `place` for one array, `shardings` for a tree.

Rules first, then `spread`: the spread axes go to the first dim that divides by all of them, else one by one, largest
degree first, each to the first dim that divides by it. Whole dims come before split ones and large before small;
"layers" never takes part (the layer loop slices it). An array where no dim divides stays whole over that axis, and its
placement says so in a note. A rule that does not divide is an error: XLA would pad or silently replicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.interfaces import Axes, PyTree
from meshpar.layout.rules import Layout

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The spec of one array, and a note when it is not split as asked."""

    spec: PartitionSpec
    note: str = ""


def place(
    layout: Layout,
    axes: Axes,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    *,
    path: str,
    manual_axes: frozenset[str] = frozenset(),
) -> Placed:
    """Where the blocks of one array lie.

    Args:
      axes: the logical axis of each dim, None for a dim that no rule splits.
      path: what the array is called in errors.
      manual_axes: mesh axes that a surrounding `shard_map` has already split; they are left out.

    Raises:
      ValueError: axes and shape differ in length, a rule does not divide its dim, or one mesh axis would split two
        dims.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{path}: {len(axes)} logical axes {axes} for the shape {shape}; name each dim once")
    degrees = {axis: degree for axis, degree in mesh.shape.items() if degree > 1 and axis not in manual_axes}
    dims: list[tuple[str, ...]] = []
    used: dict[str, Any] = {}
    notes: list[str] = []
    for dim, logical in enumerate(axes):
        rule = None if logical is None else layout.rule(logical)
        wanted = tuple(axis for axis in rule.mesh_axes if axis in degrees) if rule else ()
        degree = math.prod(degrees[axis] for axis in wanted)
        if rule and rule.replicate_if_fewer and 0 < shape[dim] < degree and degree % shape[dim] == 0:
            notes.append(f"{logical}={shape[dim]} is fewer than {'*'.join(wanted)}={degree}: whole on each")
            wanted = ()
        elif shape[dim] % degree:
            raise ValueError(_indivisible(path, dim, str(logical), shape[dim], "*".join(wanted), degree))
        for axis in wanted:
            if axis in used:
                raise ValueError(
                    f"{path} {axes}: mesh axis {axis!r} would split two dims, by {used[axis]} and {rule}; "
                    "drop one of the rules"
                )
            used[axis] = rule
        dims.append(wanted)
    spread = tuple(axis for axis in layout.spread if axis in degrees and axis not in used)
    left = _spread(dims, axes, shape, spread, degrees)
    if left:
        sizes = [
            "/".join([f"{logical or '_'}={size}", *split])
            for logical, size, split in zip(axes, shape, dims, strict=True)
            if logical != "layers"
        ]
        by = " or ".join(dict.fromkeys(str(degrees[axis]) for axis in left))
        why = f"no dim of {' '.join(sizes)} divides by {by}" if sizes else "no dim to split"
        notes.append(f"whole over {' '.join(left)}: {why}")
    return Placed(spec=_spec(dims), note="; ".join(notes))


def shardings(layout: Layout, axes: PyTree, shapes: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """`place` over a tree: a NamedSharding for each leaf of `shapes`; `axes` is a like tree of tuples."""
    return map_leaves(
        lambda path, leaf, leaf_axes: NamedSharding(mesh, place(layout, leaf_axes, leaf.shape, mesh, path=path).spec),
        shapes,
        axes,
    )


def split_over(
    spec: PartitionSpec, *, only: frozenset[str] | None = None, without: frozenset[str] = frozenset()
) -> PartitionSpec:
    """A spec with some of its mesh axes: all `without` some, or some `only`."""
    return _spec(
        [
            tuple(axis for axis in axes if axis not in without and (only is None or axis in only))
            for axes in _axes_of(spec)
        ]
    )


def dims_over(spec: PartitionSpec, axes: frozenset[str]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The dims that a spec splits over some of `axes`, each with those."""
    split = ((dim, tuple(axis for axis in of_dim if axis in axes)) for dim, of_dim in enumerate(_axes_of(spec)))
    return tuple((dim, found) for dim, found in split if found)


def _axes_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]


def map_leaves(function: Callable[[str, Any, Axes], T], tree: PyTree, axes: PyTree) -> PyTree:
    """`function(path, leaf, axes)` for each leaf; `axes` has the structure of `tree` with a tuple at each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, leaf_axes: function(path_name(path), leaf, leaf_axes), tree, axes
    )


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as people write it: `blocks/mlp/up/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _spread(
    dims: list[tuple[str, ...]], axes: Axes, shape: tuple[int, ...], spread: tuple[str, ...], degrees: Mapping[str, int]
) -> tuple[str, ...]:
    """Adds the spread axes to `dims`: all on one dim if one divides by their product, else each where it fits.

    Returns those that fit nowhere.
    """

    def first_dim(group: tuple[str, ...]) -> int | None:
        candidates = [dim for dim, logical in enumerate(axes) if logical != "layers"]
        candidates.sort(key=lambda dim: (bool(dims[dim]), -shape[dim]))
        for dim in candidates:
            if shape[dim] and shape[dim] % math.prod(degrees[axis] for axis in (*dims[dim], *group)) == 0:
                return dim
        return None

    if spread and first_dim(spread) is not None:
        groups = [spread]
    else:
        groups = [(axis,) for axis in sorted(spread, key=lambda axis: -degrees[axis])]
    left: list[str] = []
    for group in groups:
        dim = first_dim(group)
        if dim is None:
            left.extend(group)
        else:
            dims[dim] = (*dims[dim], *group)
    return tuple(left)


def _spec(dims: list[tuple[str, ...]]) -> PartitionSpec:
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _indivisible(path: str, dim: int, logical: str, size: int, axes: str, degree: int) -> str:
    choices = [str(d) for d in range(degree, 0, -1) if size % d == 0 and d < degree]
    padded = -(-size // degree) * degree
    return (
        f"{logical}={size} is not divisible by {axes}={degree} ({path}, dim {dim}); "
        f"choose {axes} in {{{', '.join(choices)}}} or make {logical} {padded}"
    )
