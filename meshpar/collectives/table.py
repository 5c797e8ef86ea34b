"""A report as a table for people: alike collectives in one row, then totals by kind and by axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshpar.spelling import format_bytes

if TYPE_CHECKING:
    from rich.console import Group

    from meshpar.collectives.collective import Collective
    from meshpar.collectives.report import Report


def as_table(report: Report, *, rows: int | None, title: str) -> Group:
    """See `Report.as_table`; printed on 120 columns it fits."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("collective", no_wrap=True)
    table.add_column("over", no_wrap=True, style="cyan")
    table.add_column("of", overflow="fold")
    table.add_column("phase", no_wrap=True)
    table.add_column("buffer", no_wrap=True)
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    groups = alike(report)
    shown = groups if rows is None else groups[:rows]
    for same in shown:
        one = same[0]
        shape = f"{one.dtype}[{','.join(map(str, one.shape))}]"
        sent = format_bytes(sum(other.bytes for other in same))
        times = str(sum(other.times for other in same))
        table.add_row(one.kind, one.axis, one.of, one.phase, shape, times, sent, one.source)
    if rest := [one for same in groups[len(shown) :] for one in same]:
        times, sent = str(sum(one.times for one in rest)), format_bytes(sum(one.bytes for one in rest))
        table.add_row(f"{len(groups) - len(shown)} smaller", "", "", "", "", times, sent, "")
    sums = Table(box=None, pad_edge=False)
    for name, justify in (
        ("total", "left"),
        ("over", "left"),
        ("operations", "right"),
        ("buffers", "right"),
        ("sent", "right"),
        ("share", "right"),
    ):
        sums.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for total in report.totals():
        share = f"{100 * total.bytes / max(report.bytes, 1):.1f}%"
        sums.add_row(
            total.kind, total.axis, str(total.operations), str(total.buffers), format_bytes(total.bytes), share
        )
    by_axis: dict[str, int] = {}
    for one in report.collectives:
        by_axis[one.axis] = by_axis.get(one.axis, 0) + one.bytes
    axes = ", ".join(
        f"{axis} {100 * sent / max(report.bytes, 1):.1f}%"
        for axis, sent in sorted(by_axis.items(), key=lambda item: -item[1])
    )
    last = f"{format_bytes(report.bytes)} sent by each device in one step{f': {axes}' if axes else ''}"
    notes = [f"loop {name} has no known length: what is in it counts once" for name in report.unknown_loops]
    parts: list[Any] = [table, Text()] if groups else []
    return Group(*parts, sums, Text("\n".join([last, *notes])))


def alike(report: Report) -> list[list[Collective]]:
    """Collectives that differ only in the operation that holds them, the most bytes first."""
    found: dict[tuple[object, ...], list[Collective]] = {}
    for one in report.collectives:
        key = (one.kind, one.axis, one.of, one.phase, one.dtype, one.shape, one.source)
        found.setdefault(key, []).append(one)
    return sorted(found.values(), key=lambda same: -sum(one.bytes for one in same))
