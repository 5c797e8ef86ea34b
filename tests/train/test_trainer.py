"""The loop, on a training whose steps are a diary: what is dispatched, read and called, and when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshpar.plan import Plan
from meshpar.train import trainer
from meshpar.train.trainer import Hook, fit


class Metric:
    """A loss on a device: reading it is an entry in the diary."""

    def __init__(self, step: int, diary: list[Any]):
        self.step, self.diary = step, diary

    def __float__(self) -> float:
        self.diary.append(("read", self.step))
        return float(self.step)


class Diary:
    """A training that counts; its state is the number of steps so far."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.plan = Plan()
        device = SimpleNamespace(platform="cpu", process_index=0)
        self.mesh = SimpleNamespace(devices=SimpleNamespace(flat=[device]))

    def place(self, batch: int) -> int:
        return batch

    def step(self, state: int, batch: int) -> tuple[int, dict[str, Metric]]:
        assert batch == state  # batch k belongs to step k + 1
        self.entries.append(("dispatch", state + 1))
        return state + 1, {"loss": Metric(state + 1, self.entries)}

    def hook(self, name: str, **options: Any) -> Hook:
        return Hook(
            on_metrics=lambda step, metrics, seconds: self.entries.append((f"{name} metrics", step, metrics["loss"])),
            on_state=lambda step, state: self.entries.append((f"{name} state", step, state)),
            **options,
        )


def run(limit: int | None, monkeypatch: pytest.MonkeyPatch, *, start: int = 0, steps: int, hooks: Any = ()) -> Diary:
    diary = Diary()
    monkeypatch.setattr(trainer, "steps_in_flight", lambda devices: limit)
    batches: Iterator[Any] = itertools.count(start)
    made = [make(diary) for make in hooks]
    assert fit(diary, start, batches, start=start, steps=steps, hooks=made) == steps  # type: ignore[arg-type]
    return diary


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_steps_in_flight_are_bounded_and_no_fewer_than_allowed(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = run(limit, monkeypatch, steps=7)
    flying, most = 0, 0
    for kind, _ in diary.entries:
        flying += 1 if kind == "dispatch" else -1
        most = max(most, flying)
    assert flying == 0
    assert most == (limit or 2)


def test_metrics_are_read_one_step_behind_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(2, monkeypatch, steps=4).entries == [
        ("dispatch", 1),
        ("dispatch", 2),
        ("read", 1),
        ("dispatch", 3),
        ("read", 2),
        ("dispatch", 4),
        ("read", 3),
        ("read", 4),
    ]


def test_hooks_are_called_in_order_and_see_the_state_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = [
        lambda diary: diary.hook("first", when=lambda step: step == 2),
        lambda diary: diary.hook("second", when=lambda step: step % 2 == 0),
        lambda diary: Hook(),
    ]
    entries = run(2, monkeypatch, steps=4, hooks=hooks).entries
    assert [entry for entry in entries if entry[0] not in ("dispatch", "read")] == [
        ("first metrics", 1, 1.0),
        ("second metrics", 1, 1.0),
        ("first metrics", 2, 2.0),
        ("second metrics", 2, 2.0),
        ("first state", 2, 2),
        ("second state", 2, 2),
        ("first metrics", 3, 3.0),
        ("second metrics", 3, 3.0),
        ("first metrics", 4, 4.0),
        ("second metrics", 4, 4.0),
        ("second state", 4, 4),
    ]
    # nothing is in flight while a hook holds the state
    assert entries.index(("read", 2)) < entries.index(("first state", 2, 2)) < entries.index(("dispatch", 3))


def test_a_resumed_loop_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = [lambda diary: diary.hook("a", when=lambda step: False)]
    entries = run(1, monkeypatch, start=3, steps=5, hooks=hooks).entries
    assert [entry[1] for entry in entries if entry[0] == "a metrics"] == [4, 5]


def test_a_loop_with_nothing_left_reads_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(1, monkeypatch, start=5, steps=5).entries == []


def test_time_in_a_state_hook_counts_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])
    seconds = []

    class Slow(Diary):
        def step(self, state: int, batch: int) -> Any:
            now[0] += 1.0
            return super().step(state, batch)

    def evaluate(step: int, state: int) -> None:
        now[0] += 100.0

    hook = Hook(
        on_metrics=lambda step, metrics, took: seconds.append(took), on_state=evaluate, when=lambda step: step == 2
    )
    fit(Slow(), 0, itertools.count(), start=0, steps=4, hooks=[hook])  # type: ignore[arg-type]
    assert sum(seconds) == 4.0 and max(seconds) <= 2.0


def test_batches_that_end_too_soon_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="the batches end before step 3 of 5; give more, or run fewer steps"):
        fit(Diary(), 0, iter([0, 1]), start=0, steps=5)  # type: ignore[arg-type]
