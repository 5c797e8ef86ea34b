"""The loop: dispatch step N, then read the metrics of an earlier one, so that devices never wait for the host.

Everything else (logs, evaluation, checkpoints) is a `Hook`.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshpar.interfaces import Batch
from meshpar.mesh.emulate import steps_in_flight
from meshpar.train.build import Training
from meshpar.train.state import TrainState
from meshpar.train.step import Metrics


@dataclass(frozen=True, kw_only=True)
class Hook:
    """What to do along the way; `step` counts finished optimizer updates.

    `on_metrics(step, metrics, seconds)` gets host floats of every step, in order, once a later step was dispatched;
    seconds are those since the metrics of the step before were read.
    `on_state(step, state)` is called for the steps that `when` picks, after the metrics of all steps up to it, while
    the devices wait; its time counts for no step. The next step donates the state, so it must not be kept.
    """

    on_metrics: Callable[[int, dict[str, float], float], None] | None = None
    on_state: Callable[[int, TrainState], object] | None = None
    when: Callable[[int], bool] = lambda step: True


def fit(
    training: Training,
    state: TrainState,
    batches: Iterator[Batch],
    *,
    start: int,
    steps: int,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Runs the updates start + 1 ... steps.

    Args:
      batches: host batches of this process, beginning with the one of update start + 1.
      hooks: called in this order.

    Returns:
      The last state.
    """
    limit = steps_in_flight(list(training.mesh.devices.flat)) or 2
    pending: collections.deque[tuple[int, Metrics]] = collections.deque()
    read_at = time.perf_counter()

    def read_until(left: int) -> None:
        nonlocal read_at
        while len(pending) > left:
            step, metrics = pending.popleft()
            values = {name: float(value) for name, value in metrics.items()}
            seconds, read_at = time.perf_counter() - read_at, time.perf_counter()
            for hook in hooks:
                if hook.on_metrics:
                    hook.on_metrics(step, values, seconds)

    for step in range(start + 1, steps + 1):
        read_until(limit - 1)
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"the batches end before update {step} of {steps}; give more, or run fewer steps")
        state, metrics = training.step(state, training.place(batch))
        pending.append((step, metrics))
        due = [hook.on_state for hook in hooks if hook.on_state and hook.when(step)]
        if due:
            read_until(0)
            for on_state in due:
                on_state(step, state)
            read_at = time.perf_counter()
    read_until(0)
    return state
