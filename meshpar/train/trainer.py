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

    `on_metrics(step, metrics, seconds)` gets host floats, in order, one step behind the devices; seconds are since the step before was read.
    `on_state(step, state)` gets the state right after its step was dispatched; the next step donates it, so it must not be kept.
    """

    on_metrics: Callable[[int, dict[str, float], float], None] | None = None
    on_state: Callable[[int, TrainState], None] | None = None


def fit(training: Training, state: TrainState, batches: Iterator[Batch], *, start: int, steps: int, hooks: Sequence[Hook] = ()) -> TrainState:
    """Runs the updates start + 1 ... steps.

    Args:
      batches: host batches of this process, beginning with the one of update start + 1.

    Returns:
      The last state.
    """
    limit = steps_in_flight(list(training.mesh.devices.flat)) or 2
    pending: collections.deque[tuple[int, Metrics]] = collections.deque()
    read_at = time.perf_counter()

    def read_oldest() -> None:
        nonlocal read_at
        step, metrics = pending.popleft()
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        for hook in hooks:
            if hook.on_metrics:
                hook.on_metrics(step, values, now - read_at)
        read_at = time.perf_counter()

    for step in range(start + 1, steps + 1):
        while len(pending) >= limit:
            read_oldest()
        state, metrics = training.step(state, training.place(next(batches)))
        pending.append((step, metrics))
        for hook in hooks:
            if hook.on_state:
                hook.on_state(step, state)
    while pending:
        read_oldest()
    return state
