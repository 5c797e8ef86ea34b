"""`Stop`: a run that is told to end does so between two steps, all processes before the same one.

SIGTERM (a cluster takes the machine away) and Ctrl-C ask for it; Ctrl-C after either interrupts at once. With several
processes the signal may reach only one of them, so it writes the step to stop at where all look before each step. No
process is more than the steps in flight ahead of another, because it reads the metrics of the step that many before,
and no metrics are there before all have begun it. So a step that lies so far ahead is news to nobody too late.
"""

from __future__ import annotations

import itertools
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from meshpar.mesh.distributed import joined, publish, published

_numbers = itertools.count()  # of the runs in this process: every process counts alike


class Stop:
    """Asked before each step, inside a `with` block that handles the signals."""

    def __init__(self, in_flight: int):
        """`in_flight`: how many steps may be dispatched before the metrics of the first are read."""
        self._in_flight = in_flight
        self._key = f"meshpar/stop/{next(_numbers)}"
        self._asked = False
        self._at: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # others cannot handle signals
            for which in (signal.SIGTERM, signal.SIGINT):
                self._before[which] = signal.signal(which, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def ask(self) -> None:
        """As if a signal had come."""
        self._asked = True

    def __call__(self, step: int) -> bool:
        """Whether to stop before `step`; the metrics of step - in_flight have been read."""
        if joined().processes == 1:
            return self._asked
        if self._at is None and self._asked:
            publish(self._key, str(step + self._in_flight))  # the first to do so is heard
        if self._at is None and (at := published(self._key)) is not None:
            self._at = int(at)
        return self._at is not None and step >= self._at

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
