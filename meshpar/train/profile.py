"""A profile of chosen steps, for TensorBoard or https://ui.perfetto.dev."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from meshpar.train.trainer import Hook


def parse_steps(text: str) -> range:
    """ "" to no steps, "12" to one, "12:15" to the steps 12, 13, 14 and 15.

    Raises:
      ValueError: the text is none of these.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"train.profile={text!r} names no steps; write one as 12, or several as 12:15")
    return range(first, last + 1)


class Profile:
    """Traces `steps` into a folder, each process into its own; what is in flight before them is in it too. Leaving the
    `with` block ends a trace that still runs, so that a run which stops or fails inside of it leaves one.
    """

    def __init__(self, steps: range, folder: Path):
        self._steps, self._folder, self._running = steps, folder, False

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def hook(self) -> Hook:
        """The hook that starts and ends the trace."""
        return Hook(before=self._before, on_metrics=self._on_metrics)

    def _before(self, step: int, state: Any, batch: Any) -> None:
        if step in self._steps and not self._running:
            several = jax.process_count() > 1  # on one host they would write the same file
            jax.profiler.start_trace(self._folder / f"process_{jax.process_index()}" if several else self._folder)
            self._running = True

    def _on_metrics(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        if self._running and step >= self._steps[-1]:
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
