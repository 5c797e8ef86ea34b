"""Budgets: what a step must not communicate, as one sentence when it does.

A layout mistake raises no error. A line such as `report.expect_none(kind="all-gather", axis="tensor")` in a test of
yours makes it one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshpar.spelling import format_bytes

if TYPE_CHECKING:
    from meshpar.collectives.collective import Collective


class BudgetBroken(AssertionError):
    """A step communicates more than it was to."""


def words(kind: str | None, axis: str | None, inside: str | None, larger_than: int) -> str:
    """What a budget is about: `all-gather over tensor inside attention`."""
    return (
        f"{kind or 'collective'}{f' over {axis}' if axis else ''}{f' inside {inside}' if inside else ''}"
        f"{f' of more than {format_bytes(larger_than)}' if larger_than > 0 else ''}"
    )


def expect_none(found: Sequence[Collective], what: str) -> None:
    """Raises BudgetBroken when something was found."""
    if found:
        raise BudgetBroken(f"no {what} was expected, and the step has {_largest(found)}")


def expect_at_most(found: Sequence[Collective], what: str, bytes: int | None, times: int | None) -> None:
    """Raises BudgetBroken when more was found than either limit allows."""
    total, count = sum(one.bytes for one in found), sum(one.times for one in found)
    if bytes is not None and total > bytes:
        raise BudgetBroken(
            f"{what} was to send at most {format_bytes(bytes)} from a device in one step, and sends "
            f"{format_bytes(total)}: {_largest(found)}"
        )
    if times is not None and count > times:
        raise BudgetBroken(
            f"{what} was to happen at most {times} times in one step, and happens {count} times: {_largest(found)}"
        )


def _largest(found: Sequence[Collective]) -> str:
    """The one that sends most, in words, and how many more there are."""
    first, *rest = sorted(found, key=lambda one: -one.bytes)
    return _in_words(first) + (f"; and {len(rest)} more" if rest else "")


def _in_words(one: Collective) -> str:
    often = {1: "once", 2: "twice"}.get(one.times, f"{one.times} times")
    return (
        f"{one.op}, {one.kind} of {one.dtype}[{','.join(map(str, one.shape))}] over {one.axis}"
        f"{f' for {one.of}' if one.of else ''} ({one.phase}, {often} a step, {format_bytes(one.sent_bytes)} from a "
        f"device each time), {one.source or 'from an unknown line'}"
    )
