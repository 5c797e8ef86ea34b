"""The loss scale by itself: what a config refuses, and how the number moves."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.plan import Plan
from meshpar.precision.loss_scale import LossScaling, ScaleState, initial_scale, next_scale
from meshpar.precision.policy import Policy


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "dynamc"}, "loss_scale.kind='dynamc' is not one of auto, none, static, dynamic"),
        ({"initial": 0.0}, "loss_scale.initial=0.0 must lie between floor=1.0 and ceiling=16777216.0"),
        ({"initial": 2.0**25}, "loss_scale.initial=33554432.0 must lie between"),
        ({"initial": float("nan")}, "loss_scale.initial=nan must lie between"),
        ({"ceiling": float("inf")}, "ceiling=inf, all above 0"),
        ({"factor": 1.0}, "loss_scale.factor=1.0 must be above 1"),
        ({"period": 0}, "loss_scale.period=0 must be at least 1"),
        ({"max_skips": 0}, "loss_scale.max_skips=0 must be at least 1"),
    ],
)
def test_a_scaling_that_cannot_be_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        LossScaling(**values)


@pytest.mark.parametrize(
    ("compute", "kind", "scales", "dynamic"),
    [
        ("fp32", "auto", False, False),
        ("bf16", "auto", False, False),
        ("fp16", "auto", True, True),
        ("fp16", "none", False, False),
        ("fp16", "static", True, False),
        ("bf16", "static", True, False),
        ("bf16", "dynamic", True, True),
    ],
)
def test_fp16_scales_by_itself_and_others_when_asked(compute: Any, kind: Any, scales: bool, dynamic: bool) -> None:
    policy = Policy(compute=compute, loss_scale=LossScaling(kind=kind))
    assert (policy.scales, policy.scales_dynamically) == (scales, dynamic)


def test_a_plan_with_a_scaling_goes_to_json_and_back() -> None:
    plan = Plan(precision=Policy(compute="fp16", loss_scale=LossScaling(initial=1024.0, period=7)))
    values = plan.to_json()
    assert values["precision"]["loss_scale"]["initial"] == 1024.0
    assert Plan.from_json(values) == plan
    values["precision"]["loss_scale"]["perod"] = 1
    with pytest.raises(ValueError, match=r"unknown key precision\.loss_scale\.perod; did you mean 'period'\?"):
        Plan.from_json(values)


def walk(config: LossScaling, finite: list[bool], *, dynamic: bool = True) -> list[ScaleState]:
    states = [initial_scale(config)]
    for one in finite:
        states.append(next_scale(config, states[-1], jnp.asarray(one), dynamic=dynamic))
    return jax.device_get(states)


def test_the_scale_halves_at_once_and_doubles_after_a_period() -> None:
    config = LossScaling(initial=8.0, period=2, floor=4.0, ceiling=16.0)
    states = walk(config, [False, False, True, True, True, False, True, True, True, True, True, True])
    assert [float(state.scale) for state in states] == [8, 4, 4, 4, 8, 8, 4, 4, 8, 8, 16, 16, 16]
    assert [int(state.skipped_in_a_row) for state in states[:4]] == [0, 1, 2, 0]


def test_a_static_scale_counts_and_stays() -> None:
    states = walk(LossScaling(initial=8.0, period=1), [True, False, True], dynamic=False)
    assert [float(state.scale) for state in states] == [8] * 4
    assert [int(state.skipped_in_a_row) for state in states] == [0, 0, 1, 0]


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_the_scale_is_a_power_of_two_between_floor_and_ceiling(finite: list[bool], period: int) -> None:
    config = LossScaling(initial=2.0**10, floor=2.0**8, ceiling=2.0**12, period=period)
    for state in walk(config, finite):
        assert float(state.scale) in {2.0**power for power in range(8, 13)}
        assert 0 <= int(state.finite_in_a_row) < period
