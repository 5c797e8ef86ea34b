"""Budgets: what a step must not communicate, and the sentence when it does."""

from __future__ import annotations

import re

import pytest

from meshpar.collectives.budget import BudgetBroken
from tests.collectives.programs import report_of


def test_a_gather_that_was_not_to_be_is_named_with_its_bytes_and_its_line() -> None:
    found = report_of("fsdp=8")
    with pytest.raises(BudgetBroken) as broken:
        found.expect_none(kind="all-gather", axis="fsdp")
    assert re.fullmatch(
        r"no all-gather over fsdp was expected, and the step has all-gather\S*, all-gather of f32\[\S+\] over fsdp "
        r"for blocks/mlp/(up|gate|down)/kernel \(\w+, twice a step, 7\.00 KiB from a device each time\), "
        r"meshpar/forward\.py:\d+; and \d+ more",
        str(broken.value),
    ), str(broken.value)
    assert isinstance(broken.value, AssertionError)


def test_budgets_that_hold_say_nothing() -> None:
    found = report_of("data=2 tensor=2")
    found.expect_none(kind="all-gather", axis="tensor", inside="attention")
    found.expect_none(axis="fsdp")
    found.expect_none(kind="all-reduce", axis="tensor", larger_than=2**20)
    found.expect_none(axis="data tensor")  # nothing crosses both
    sums = {total.axis: total for total in found.totals()}
    found.expect_at_most(kind="all-reduce", axis="data", bytes=sums["data"].bytes, times=sums["data"].buffers)
    with pytest.raises(BudgetBroken):
        found.expect_none(kind="all-reduce", axis="tensor", inside="attention")
    with pytest.raises(
        BudgetBroken, match=r"all-reduce over data was to send at most .* in one step, and sends .*KiB: "
    ):
        found.expect_at_most(kind="all-reduce", axis="data", bytes=sums["data"].bytes - 1)
    with pytest.raises(
        BudgetBroken, match=r"all-reduce over data was to happen at most 26 times in one step, and happens"
    ):
        found.expect_at_most(kind="all-reduce", axis="data", times=sums["data"].buffers - 1)


def test_gradients_send_no_more_than_twice_their_bytes() -> None:
    from tests.collectives.programs import CONFIG
    from tests.collectives.test_report import sizes

    gradients = 4 * sum(sizes(CONFIG).values())
    report_of("data=8").expect_at_most(kind="all-reduce", axis="data", bytes=2 * gradients)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "allgather"}, "unknown collective 'allgather'; did you mean 'all-gather'?"),
        ({"axis": "tensr"}, "unknown mesh axis 'tensr'; did you mean 'tensor'?"),
        ({"axis": "data fdsp"}, "unknown mesh axis 'fdsp'; did you mean 'fsdp'?"),
        ({"inside": "atention"}, "no name scope 'atention' in this program; did you mean 'attention'?"),
        ({"inside": "attention/ot"}, "no name scope 'ot' in this program"),
    ],
)
def test_a_budget_that_could_never_fail_is_refused(arguments: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        report_of("data=2 tensor=2").expect_none(**arguments)


def test_a_limit_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="expect_at_most needs a limit; give bytes= or times="):
        report_of("data=2 tensor=2").expect_at_most(kind="all-reduce")
