"""The loop: dispatch step N, then read the metrics of an earlier one, so that devices never wait for the host.

Everything else (logs, evaluation, checkpoints, profiles) is a `Hook`.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshpar.interfaces import Batch
from meshpar.mesh.emulate import steps_in_flight
from meshpar.train.build import Training
from meshpar.train.clock import STEPS, Clock
from meshpar.train.state import TrainState
from meshpar.train.step import Metrics


@dataclass(frozen=True, kw_only=True)
class Hook:
    """What to do along the way; `step` counts finished steps.

    `before(step, state, batch)` is called before a step is dispatched, with what it will donate and read.
    `on_metrics(step, metrics, seconds)` gets host floats of every step, in order, once a later step was dispatched;
    seconds are those since the metrics of the step before were read.
    `on_state(step, state)` is called for the steps that `when` picks, after the metrics of all steps up to it, while
    the devices wait; its time counts for no step. The next step donates the state, so it must not be kept.
    """

    before: Callable[[int, TrainState, Batch], object] | None = None
    on_metrics: Callable[[int, dict[str, float], float], None] | None = None
    on_state: Callable[[int, TrainState], object] | None = None
    when: Callable[[int], bool] = lambda step: True
    cause: str = "hooks"  # what the clock calls the time of on_state


class Diverged(RuntimeError):
    """Training went wrong: a loss or gradients that are not finite, once without loss scaling, too often with it."""


def fit(
    training: Training,
    state: TrainState,
    batches: Iterator[Batch],
    *,
    start: int,
    steps: int,
    hooks: Sequence[Hook] = (),
    stop: Callable[[int], bool] = lambda step: False,
    clock: Clock | None = None,
) -> TrainState:
    """Runs the steps start + 1 ... steps.

    Args:
      batches: host batches of this process, beginning with the one of step start + 1.
      hooks: called in this order.
      stop: asked before each step whether to end there.
      clock: counts the time of steps, of waiting for data and of hooks.

    Returns:
      The last state; `state.step` counts what was done, less than `steps` after a stop.

    Raises:
      Diverged: the loss or the gradients of a step are not finite, or loss scaling skipped `max_skips` in a row.
    """
    clock = clock or Clock()
    limit = in_flight(training)
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
            _check(step, values, training.plan.precision.loss_scale.max_skips)

    with clock.during(STEPS):
        for step in range(start + 1, steps + 1):
            read_until(limit - 1)
            if stop(step):
                break
            with clock.during("data"):
                batch = next(batches, None)
                if batch is None:
                    raise ValueError(f"the batches end before step {step} of {steps}; give more, or run fewer steps")
                placed = training.place(batch)
            for hook in hooks:
                if hook.before:
                    hook.before(step, state, placed)
            state, metrics = training.step(state, placed)
            pending.append((step, metrics))
            due = [hook for hook in hooks if hook.on_state and hook.when(step)]
            if due:
                read_until(0)
                for hook in due:
                    assert hook.on_state is not None
                    with clock.during(hook.cause):
                        hook.on_state(step, state)
                read_at = time.perf_counter()
        read_until(0)
    return state


def in_flight(training: Training) -> int:
    """How many steps may be dispatched before the metrics of the first are read."""
    return steps_in_flight(list(training.mesh.devices.flat)) or 2


def _check(step: int, values: dict[str, float], max_skips: int) -> None:
    """Ends a run that cannot recover, before a checkpoint is written of what is left of it."""
    if "loss_scale" in values:
        if values["skipped_in_a_row"] >= max_skips:
            raise Diverged(
                f"the gradients of {max_skips} steps in a row up to step {step} are not finite, at last with "
                f"loss scale {values['loss_scale']:g}; lower optimizer.lr, or compute in bf16"
            )
        return
    for name in ("loss", "grad_norm"):
        if not math.isfinite(values.get(name, 0.0)):
            raise Diverged(
                f"the {name} of step {step} is {values[name]}, and its update spoilt the parameters; lower "
                "optimizer.lr or warm up longer (train.nan_report=true names the first tensor that is not finite)"
            )
