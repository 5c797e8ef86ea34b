"""Layouts as rows: each array's shape by its logical axes, the mesh axes that split it, and its bytes on one device.

A dim is written `embed=2048/data/fsdp`: its size, then the mesh axes that split it, outermost first. One kind of row,
`Leaf`, serves a table for people (`as_table`) and JSON for programs (`as_json`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.interfaces import Axes, PyTree
from meshpar.layout.resolve import map_leaves, place
from meshpar.layout.rules import Layout
from meshpar.spelling import format_bytes as format_bytes

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a tree and where its blocks lie."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    spec: PartitionSpec
    bytes: int  # of the whole array
    bytes_per_device: int
    note: str = ""  # why it is not split as asked, or empty

    @property
    def split(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each dim, outermost first."""
        entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in self.spec]
        return (*entries, *((),) * (len(self.shape) - len(entries)))

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return not any(self.split)

    @property
    def dims(self) -> str:
        """The dims in one line: `layers=24 embed=2048/fsdp mlp=5632/tensor`; "scalar" where there are none."""
        parts = [
            "/".join([f"{axis or '_'}={size}", *split])
            for axis, size, split in zip(self.axes, self.shape, self.split, strict=True)
        ]
        return " ".join(parts) or "scalar"


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over rows."""

    leaves: int
    bytes: int  # of all arrays, each counted once
    bytes_per_device: int
    whole: int  # leaves that every device holds whole
    whole_bytes: int  # of those
    noted: int  # leaves that are not split as asked


def leaf_of(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    axes: Axes,
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    note: str = "",
) -> Leaf:
    """The row of one array whose spec is known; every dim divides by the degrees that split it."""
    size = math.prod(shape) * dtype.itemsize
    leaf = Leaf(
        path=path, shape=shape, dtype=str(dtype), axes=axes, spec=spec, bytes=size, bytes_per_device=size, note=note
    )
    degree = math.prod(mesh.shape[axis] for split in leaf.split for axis in split)
    return dataclasses.replace(leaf, bytes_per_device=size // degree)


def describe(layout: Layout, axes: PyTree, shapes: PyTree, mesh: Mesh | AbstractMesh) -> list[Leaf]:
    """A row for each leaf of `shapes` (anything with `.shape` and `.dtype`) under a layout; needs no devices.

    Raises:
      ValueError: the layout does not fit a leaf; see `place`.
    """

    def row(path: str, leaf: Any, leaf_axes: Axes) -> Leaf:
        placed = place(layout, leaf_axes, leaf.shape, mesh, path=path)
        return leaf_of(path, leaf.shape, leaf.dtype, leaf_axes, placed.spec, mesh, placed.note)

    return jax.tree.leaves(map_leaves(row, shapes, axes))


def totals(rows: Iterable[Leaf]) -> Totals:
    """The sums that a table ends with."""
    rows = list(rows)
    whole = [row for row in rows if row.is_whole]
    return Totals(
        leaves=len(rows),
        bytes=sum(row.bytes for row in rows),
        bytes_per_device=sum(row.bytes_per_device for row in rows),
        whole=len(whole),
        whole_bytes=sum(row.bytes for row in whole),
        noted=sum(bool(row.note) for row in rows),
    )


def as_table(rows: Sequence[Leaf], *, title: str = "") -> Group:
    """A rich table that ends with totals and notes; printed on 120 columns it fits."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sums = totals(rows)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("array", no_wrap=True)
    table.add_column("dims/mesh axes that split them", overflow="fold")
    table.add_column("dtype", no_wrap=True)
    table.add_column("per device", justify="right", no_wrap=True)
    for row in rows:
        dims = Text(row.dims)
        dims.highlight_regex(r"/\w+", "cyan")
        path = Text(row.path + (" *" if row.note else ""), style="yellow" if row.note else "")
        table.add_row(path, dims, row.dtype, format_bytes(row.bytes_per_device))
    table.add_row("total", "", "", format_bytes(sums.bytes_per_device), style="bold")
    notes = [f"* {row.path}: {row.note}" for row in rows if row.note]
    return Group(table, Text("\n".join([_summary(sums), *notes])))


def as_json(rows: Sequence[Leaf]) -> dict[str, Any]:
    """Rows and totals as JSON values; the spec is a list of mesh axes for each dim."""
    leaves = [
        {
            "path": row.path,
            "shape": list(row.shape),
            "dtype": row.dtype,
            "axes": list(row.axes),
            "spec": [list(split) for split in row.split],
            "bytes": row.bytes,
            "bytes_per_device": row.bytes_per_device,
            "note": row.note,
        }
        for row in rows
    ]
    return {"leaves": leaves, "totals": dataclasses.asdict(totals(rows))}


def _summary(sums: Totals) -> str:
    percent = 100 * sums.whole_bytes / sums.bytes if sums.bytes else 0.0
    share = "none" if not sums.whole_bytes else f"{percent:.1f}%" if percent >= 0.1 else "less than 0.1%"
    noted = f"; {sums.noted} not split as asked (*)" if sums.noted else ""
    return (
        f"{format_bytes(sums.bytes)} in all; {sums.whole} of {sums.leaves} leaves are whole on each device, "
        f"{share} of the bytes{noted}"
    )
