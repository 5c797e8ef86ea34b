"""`report`: which collectives a compiled step runs, over which mesh axes, how many bytes, whose they are.

    report = training.collectives()
    report.expect_none(kind="all-gather", axis="tensor", inside="attention")
    report.expect_at_most(kind="all-reduce", axis="data", bytes=2 * size)
    rich.print(report.as_table())

The folder's page says what is counted and how. Cost of one collective over n devices, in bytes that a device sends, for
a buffer of B bytes: see `collective.py:sent`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshpar.collectives import budget
from meshpar.collectives.collective import KINDS, Collective
from meshpar.collectives.hlo import parse
from meshpar.collectives.scopes import holds, scopes_of
from meshpar.collectives.walk import Walk
from meshpar.spelling import did_you_mean

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, kw_only=True)
class Total:
    """Sums over the collectives of one kind over the same axes."""

    kind: str
    axis: str
    operations: int  # that a device starts in one step; one may hold several buffers
    buffers: int
    bytes: int  # that a device sends in one step


@dataclass(frozen=True, kw_only=True)
class Report:
    """The collectives of one compiled step, in the order of the text."""

    mesh: Mapping[str, int]
    collectives: tuple[Collective, ...]
    scopes: frozenset[str]  # every part of a name scope of the program, those without collectives too
    unknown_loops: tuple[str, ...] = ()  # loops of unknown length; what is in them is counted once

    @property
    def bytes(self) -> int:
        """What a device sends in one step."""
        return sum(collective.bytes for collective in self.collectives)

    def select(
        self,
        *,
        kind: str | None = None,
        axis: str | None = None,
        inside: str | None = None,
        larger_than: int = -1,
    ) -> list[Collective]:
        """The collectives of a kind, that cross a mesh axis, in a name scope, with a buffer of more bytes.

        Args:
          kind: one of KINDS.
          axis: a mesh axis, or several as `"data fsdp"`; a collective that crosses these and others is among them.
          inside: a part of a name scope, such as `"attention"`, or some that follow one another: `"attention/out"`.
          larger_than: bytes of the buffer.

        Raises:
          ValueError: no such kind, mesh axis or scope.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"unknown collective {kind!r}{did_you_mean(kind, KINDS)}; kinds are {', '.join(KINDS)}")
        axes = set((axis or "").replace("*", " ").replace(",", " ").split())
        for name in axes - set(self.mesh):
            raise ValueError(
                f"unknown mesh axis {name!r}{did_you_mean(name, self.mesh)}; axes are {', '.join(self.mesh)}"
            )
        parts = (inside or "").strip("/").split("/") if inside else []
        for part in parts:
            if part not in self.scopes:
                raise ValueError(
                    f"no name scope {part!r} in this program{did_you_mean(part, self.scopes)}; "
                    f"there are {', '.join(sorted(self.scopes))}"
                )
        return [
            collective
            for collective in self.collectives
            if (kind is None or collective.kind == kind)
            and axes <= set(collective.axes)
            and (not parts or any(holds(scope.split("/"), parts) for scope in collective.scopes))
            and collective.buffer_bytes > larger_than
        ]

    def totals(self) -> list[Total]:
        """Sums by kind and axes, the most bytes first."""
        found: dict[tuple[str, str], list[Collective]] = {}
        for collective in self.collectives:
            found.setdefault((collective.kind, collective.axis), []).append(collective)
        totals = [
            Total(
                kind=kind,
                axis=axis,
                operations=sum({one.op: one.times for one in some}.values()),
                buffers=sum(one.times for one in some),
                bytes=sum(one.bytes for one in some),
            )
            for (kind, axis), some in found.items()
        ]
        return sorted(totals, key=lambda total: (-total.bytes, total.kind, total.axis))

    def expect_none(
        self, *, kind: str | None = None, axis: str | None = None, inside: str | None = None, larger_than: int = -1
    ) -> None:
        """Raises `BudgetBroken`, a sentence with the operation, its bytes and its source line, when there is one.

        `select` explains the arguments and what else it raises.
        """
        found = self.select(kind=kind, axis=axis, inside=inside, larger_than=larger_than)
        budget.expect_none(found, budget.words(kind, axis, inside, larger_than))

    def expect_at_most(
        self,
        *,
        kind: str | None = None,
        axis: str | None = None,
        inside: str | None = None,
        larger_than: int = -1,
        bytes: int | None = None,
        times: int | None = None,
    ) -> None:
        """Raises `BudgetBroken` when a device sends more than `bytes`, or more than `times` buffers, in one step.

        `select` explains the other arguments and what else it raises.
        """
        if bytes is None and times is None:
            raise ValueError("expect_at_most needs a limit; give bytes= or times=, or use expect_none")
        found = self.select(kind=kind, axis=axis, inside=inside, larger_than=larger_than)
        budget.expect_at_most(found, budget.words(kind, axis, inside, larger_than), bytes, times)

    def as_table(self, *, rows: int | None = 30, title: str = "") -> Group:
        """A rich table: alike collectives in one row, the most bytes first, then totals by kind and by axis."""
        from meshpar.collectives.table import as_table

        return as_table(self, rows=rows, title=title)

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "mesh": dict(self.mesh),
            "bytes": self.bytes,
            "totals": [dataclasses.asdict(total) for total in self.totals()],
            "collectives": [dataclasses.asdict(one) | {"bytes": one.bytes} for one in self.collectives],
            "unknown_loops": list(self.unknown_loops),
        }


def report(compiled: jax.stages.Compiled | str, mesh: Mesh | AbstractMesh, parameters: Iterable[str] = ()) -> Report:
    """The collectives of a compiled program.

    Args:
      compiled: from `jit(...).lower(...).compile()`, or its `as_text()`.
      mesh: the mesh that the program was compiled for; its axes name the groups.
      parameters: paths such as `blocks/mlp/up/kernel`, to tell a parameter by the name scopes.

    Raises:
      ValueError: the text is not that of a compiled program.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    program = parse(text)
    sizes = dict(mesh.shape)
    paths = [tuple(path.split("/")) for path in parameters]
    walk = Walk(program, sizes, paths)
    found = tuple(walk.computation(program.entry, 1, None))
    names = {
        part
        for name in set(re.findall(r'op_name="([^"]*)"', text))
        for scope in scopes_of(name)
        for part in scope.split("/")
    }
    return Report(
        mesh=sizes, collectives=found, scopes=frozenset(names) - {""}, unknown_loops=tuple(dict.fromkeys(walk.unknown))
    )
