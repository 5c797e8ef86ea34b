"""Every second of a run belongs to one cause."""

from __future__ import annotations

import contextlib

import pytest

from meshpar.train import clock as module
from meshpar.train.clock import STEPS, Clock


def test_inner_causes_take_their_time_from_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    clock = Clock(since=7.0)  # three seconds of imports
    with clock.during(STEPS):
        now[0] += 5.0
        with clock.during("data"):
            now[0] += 1.0
        with contextlib.suppress(KeyError), clock.during("evaluation"):
            now[0] += 2.0
            raise KeyError
        now[0] += 4.0
    now[0] += 0.5
    assert clock.seconds() == {"start": 3.5, STEPS: 9.0, "data": 1.0, "evaluation": 2.0}
    assert clock.goodput() == 9.0 / 15.5
    assert clock.text() == "goodput 58.1% of 15.5 s: steps 9.0 s, start 3.5 s, evaluation 2.0 s, data 1.0 s"
