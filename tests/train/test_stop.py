"""All processes stop before the same step, whoever was told, and however far one is ahead of the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.mesh.distributed import Cluster
from meshpar.train import stop as module
from meshpar.train.stop import Stop

STEPS = 40


def run(schedule: list[int], told: dict[int, int], in_flight: int, processes: int = 2) -> list[int]:
    """The step before which each process stops.

    `schedule` says which process takes its next turn; one that is too far ahead waits, as for metrics. `told` is the
    step at which a process gets a signal.
    """
    store: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "joined", lambda: Cluster(source="launch", processes=processes))
        patch.setattr(module, "publish", store.setdefault)
        patch.setattr(module, "published", store.get)
        patch.setattr(module, "_numbers", itertools.repeat(0))
        stops = [Stop(in_flight) for _ in range(processes)]
        begun, ended = [0] * processes, [0] * processes
        turns: Any = itertools.chain(schedule, itertools.cycle(range(processes)))
        for number in itertools.islice(turns, 2000):
            if all(ended):
                break
            step = begun[number] + 1
            # the metrics of step - in_flight are there once all have begun it
            if ended[number] or step - in_flight > min(begun):
                continue
            if told.get(number) == step:
                stops[number].ask()
            if step > STEPS or stops[number](step):
                ended[number] = step
            else:
                begun[number] = step
        assert all(ended), "a process waits for one that has stopped before it"
    return ended


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.dictionaries(st.integers(0, 2), st.integers(1, 30), min_size=1),
    st.integers(1, 4),
)
def test_all_stop_before_the_same_step(schedule: list[int], told: dict[int, int], in_flight: int) -> None:
    ended = run(schedule, told, in_flight, processes=3)
    assert len(set(ended)) == 1
    assert min(told.values()) <= ended[0] <= min(told.values()) + 2 * in_flight


def test_one_process_stops_at_once_and_nobody_stops_unasked() -> None:
    stop = Stop(2)
    assert not stop(5)
    stop.ask()
    assert stop(6)
    assert run([], {}, 2) == [STEPS + 1, STEPS + 1]
