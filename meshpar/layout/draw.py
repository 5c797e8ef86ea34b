"""A picture of which device holds which block of an array: as a matplotlib figure, and as text for a terminal.

The array is drawn as a grid of its distinct blocks, one colour each, labelled with the ids of the devices that hold it:
replicas share a block. Of an array with more than two dims the two that are split most are drawn. On an AbstractMesh an
id is the device's place in row-major order of the mesh.
"""

from __future__ import annotations

import colorsys
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.interfaces import Axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 12  # of the text picture; the middle of a longer one is left out


@dataclass(frozen=True, kw_only=True)
class Side:
    """One dim: its logical axis, its size and the mesh axes that split it with their degrees; size 0 for none."""

    axis: str
    size: int
    split: tuple[tuple[str, int], ...]

    @property
    def blocks(self) -> int:
        """Into how many blocks the dim is split."""
        return math.prod(degree for _, degree in self.split)

    def __str__(self) -> str:
        """`embed=64: data=2 fsdp=4`."""
        if not self.size:
            return ""
        return f"{self.axis}={self.size}: {' '.join(f'{axis}={degree}' for axis, degree in self.split) or 'whole'}"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Who holds what: `holders[row][column]` are the sorted ids of the devices that hold a block of the drawn dims."""

    rows: Side
    columns: Side
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    caption: tuple[str, ...]  # lines in words: the mesh; the size of a block and how many hold it; what is not drawn


def blocks(shape: tuple[int, ...], axes: Axes, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Blocks:
    """The blocks of an array.

    Args:
      shape, axes: of the array, a logical axis (or None) for each dim.
      spec: as `place` returns it, every dim divisible.
      mesh: a mesh with devices, whose ids are shown, or without.
    """
    degrees = dict(mesh.shape)
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    entries += [()] * (len(shape) - len(entries))
    sides = [
        Side(axis=axis or "_", size=size, split=tuple((name, degrees[name]) for name in split if degrees[name] > 1))
        for axis, size, split in zip(axes, shape, entries, strict=True)
    ]
    order = sorted(range(len(shape)), key=lambda dim: (-sides[dim].blocks, axes[dim] == "layers", -shape[dim]))
    drawn = sorted(order[:2])
    none = Side(axis="", size=0, split=())
    rows, columns = [none] * (2 - len(drawn)) + [sides[dim] for dim in drawn]
    coordinates = dict(zip(degrees, np.unravel_index(np.arange(mesh.size), tuple(degrees.values())), strict=True))
    held: dict[tuple[int, int], list[int]] = defaultdict(list)
    at_row, at_column = _index(rows, coordinates, mesh.size), _index(columns, coordinates, mesh.size)
    for row, column, device in zip(at_row, at_column, _ids(mesh), strict=True):
        held[int(row), int(column)].append(device)
    return Blocks(
        rows=rows,
        columns=columns,
        holders=tuple(
            tuple(tuple(sorted(held[row, column])) for column in range(columns.blocks)) for row in range(rows.blocks)
        ),
        caption=_caption(sides, degrees, [str(sides[dim]) for dim in order[2:] if sides[dim].blocks > 1]),
    )


def draw_array(name: str, shape: tuple[int, ...], axes: Axes, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Figure:
    """The picture of one array; see `blocks` for the arguments. Not bound to pyplot: save it with `save_png`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    picture = blocks(shape, axes, spec, mesh)
    n_rows, n_columns = picture.rows.blocks, picture.columns.blocks
    width, height = min(max(0.8 * n_columns, 4.5), 11.0), min(max(0.55 * n_rows, 1.1), 8.0)
    left, right, top, bottom = (1.7 if picture.rows.size else 0.5), 0.5, 1.3 + 0.17 * len(picture.caption), 0.35
    total_width, total_height = left + width + right, top + height + bottom  # inches
    figure = Figure(figsize=(total_width, total_height), dpi=130)
    figure.set_facecolor("white")
    plot = figure.add_axes(
        (left / total_width, bottom / total_height, width / total_width, height / total_height), frameon=False
    )
    labels = [[compact(ids) for ids in row] for row in picture.holders]
    fits = _fit(labels, width / n_columns, height / n_rows)
    for row in range(n_rows):
        for column in range(n_columns):
            colour = _colour(row, column, n_rows, n_columns)
            line = 1.2 if max(n_rows, n_columns) <= 32 else 0.3
            plot.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=line))
            if row % fits.every_row == 0 and column % fits.every_column == 0:
                plot.text(
                    column + 0.5,
                    row + 0.5,
                    labels[row][column],
                    ha="center",
                    va="center",
                    fontsize=fits.font,
                    rotation=90 if fits.turned else 0,
                    color="#1a1a1a",
                )
    plot.set_xlim(0, n_columns)
    plot.set_ylim(n_rows, 0)
    plot.xaxis.tick_top()
    plot.xaxis.set_label_position("top")
    for ruler, side in ((plot.xaxis, picture.columns), (plot.yaxis, picture.rows)):
        places = _ticks(side)
        ruler.set_ticks(
            places, [str(place * side.size // side.blocks) for place in places], fontsize=7, color="#666666"
        )
        ruler.set_tick_params(length=2, color="#999999")
    plot.set_xlabel(str(picture.columns), fontsize=10, labelpad=6)
    label = str(picture.rows).replace(" ", "\n")
    plot.set_ylabel(label, fontsize=10, rotation=0, ha="right", va="center", labelpad=8)
    figure.text(0.2 / total_width, 1 - 0.2 / total_height, name, fontsize=13, weight="bold", va="top")
    caption = "\n".join([*picture.caption[:-1], f"{picture.caption[-1]}; the numbers are device ids"])
    figure.text(0.2 / total_width, 1 - 0.5 / total_height, caption, fontsize=8.5, va="top", color="#444444")
    return figure


def save_png(figure: Figure, path: Path | str) -> None:
    """Writes a figure as a PNG, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(str(path))


def draw_text(
    name: str, shape: tuple[int, ...], axes: Axes, spec: PartitionSpec, mesh: Mesh | AbstractMesh, *, width: int = 120
) -> str:
    """The picture of one array in box characters, `width` wide or less; of many blocks the middle ones are left out."""
    picture = blocks(shape, axes, spec, mesh)
    cell = max(5, *(len(compact(ids)) for row in picture.holders for ids in row))
    margin = len(str(picture.rows)) + 2
    rows = _shown(picture.rows.blocks, _MOST_ROWS)
    columns = _shown(picture.columns.blocks, max(3, (width - margin - 1) // (cell + 3)))
    cells = [
        ["…" if row is None or column is None else compact(picture.holders[row][column]) for column in columns]
        for row in rows
    ]

    def rule(start: str, middle: str, end: str) -> str:
        return " " * margin + start + middle.join(["─" * (cell + 2)] * len(columns)) + end

    lines = [name, *picture.caption, ""]
    if picture.columns.size:
        lines.append(" " * margin + str(picture.columns))
    lines.append(rule("┌", "┬", "┐"))
    for number, line in enumerate(cells):
        label = str(picture.rows) if number == (len(cells) - 1) // 2 else ""
        lines.append(f"{label:<{margin}}│" + "│".join(f" {text:^{cell}} " for text in line) + "│")
        lines.append(rule("├", "┼", "┤") if number < len(cells) - 1 else rule("└", "┴", "┘"))
    return "\n".join(lines) + "\n"


def compact(ids: Sequence[int]) -> str:
    """Sorted ids in few characters: `0,4`, `0-7`, `0,4..28`, `0-3,8-11`."""
    ids = list(ids)
    steps = {second - first for first, second in pairwise(ids)}
    if len(ids) >= 3 and steps == {1}:
        return f"{ids[0]}-{ids[-1]}"
    if len(ids) >= 4 and len(steps) == 1:
        return f"{ids[0]},{ids[1]}..{ids[-1]}"
    runs: list[list[int]] = []
    for device in ids:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    if len(ids) == 2:
        return f"{ids[0]},{ids[1]}"
    return text if len(runs) <= 4 else f"{ids[0]}..{ids[-1]} ({len(ids)})"


def _index(side: Side, coordinates: dict[str, Any], devices: int) -> np.ndarray:
    """Each device's block number along a side: row-major over the mesh axes that split it, outermost first."""
    index = np.zeros(devices, dtype=int)
    for axis, degree in side.split:
        index = index * degree + coordinates[axis]
    return index


def _ids(mesh: Mesh | AbstractMesh) -> list[int]:
    if isinstance(mesh, AbstractMesh):
        return list(range(mesh.size))
    return [device.id for device in mesh.devices.flat]


def _caption(sides: list[Side], degrees: dict[str, int], hidden: list[str]) -> tuple[str, ...]:
    used = {axis for side in sides for axis, _ in side.split}
    copies = {axis: degree for axis, degree in degrees.items() if degree > 1 and axis not in used}
    mesh = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1) or "of one device"
    count, held_by = math.prod(side.blocks for side in sides), math.prod(copies.values())
    block = " x ".join(str(side.size // side.blocks) for side in sides) or "one number"
    on = f"on {held_by} devices (copies over {' '.join(copies)})" if copies else "on one device"
    return (f"mesh {mesh}", f"{count} block{'s, each' if count > 1 else ''} of {block} {on}") + (
        (f"split and not drawn: {', '.join(hidden)}",) if hidden else ()
    )


def _shown(count: int, most: int) -> list[int | None]:
    """Block numbers to print; None stands for those that are left out."""
    if count <= most:
        return list(range(count))
    first = most // 2
    return [*range(first), None, *range(count - (most - 1 - first), count)]


def _ticks(side: Side) -> list[int]:
    """Block borders to mark: all, or as many as can be read."""
    if not side.size:
        return []
    step = 1
    while side.blocks // step > 16:
        step *= 2
    return list(range(0, side.blocks + 1, step))


@dataclass(frozen=True, kw_only=True)
class _Fit:
    font: float
    turned: bool
    every_row: int
    every_column: int


def _fit(labels: list[list[str]], width: float, height: float) -> _Fit:
    """How the labels fit cells of a size in inches: smaller, turned, and where nothing helps only each n-th."""
    longest = max(len(label) for row in labels for label in row)

    def font(across: float, along: float) -> float:
        return 72 * min(0.8 * across / (0.62 * longest), 0.8 * along)

    straight, upright = font(width, height), font(height, width)
    turned = upright > 1.3 * straight and straight < 7
    size = min(max(upright if turned else straight, 6.0), 13.0)
    long, thick = 0.62 * longest * size / 72 / 0.8, size / 72 / 0.8
    need_across, need_down = (thick, long) if turned else (long, thick)
    return _Fit(
        font=size, turned=turned, every_row=_power(need_down / height), every_column=_power(need_across / width)
    )


def _power(ratio: float) -> int:
    return 1 if ratio <= 1.001 else 2 ** math.ceil(math.log2(ratio))


def _colour(row: int, column: int, rows: int, columns: int) -> tuple[float, float, float]:
    """One colour a block: hue along the longer side, lightness along the other."""
    (along, length), (across, breadth) = (
        ((row, rows), (column, columns)) if rows > columns else ((column, columns), (row, rows))
    )
    hue = 0.55 + 0.85 * along / length
    lightness = 0.84 - (0.2 * across / (breadth - 1) if breadth > 1 else 0.0)
    return colorsys.hls_to_rgb(hue % 1.0, lightness, 0.6)
