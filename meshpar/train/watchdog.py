"""`Watchdog`: says that a run hangs, at which step and where in the code.

A step that waits for a process that is gone, a file system that does not answer: jax shows nothing of it, so a thread
looks at the clock. It only tells; what to do is up to whoever reads it.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO

import jax

from meshpar.train.trainer import Hook


class Watchdog:
    """Watches inside a `with` block; `hook` and `touch` tell it that the run goes on."""

    def __init__(self, seconds: float, *, start: int = 0, file: TextIO | None = None):
        """Args:
        seconds: without any sign of life before it tells, once for each silence; 0: never.
        start: steps that the run has behind it.
        file: a real file (it has a descriptor) for the report; None: stderr.
        """
        self._seconds, self._finished, self._file = seconds, start, file
        self._touched = time.monotonic()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._seconds > 0:
            self.touch()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def touch(self) -> None:
        """Something happened: the silence begins anew."""
        self._touched = time.monotonic()

    def hook(self) -> Hook:
        """The hook that tells of every step."""
        return Hook(before=lambda step, state, batch: self.touch(), on_metrics=self._on_metrics)

    def _on_metrics(self, step: int, metrics: dict[str, Any], seconds: float) -> None:
        self._finished = step
        self.touch()

    def _watch(self) -> None:
        told: float | None = None
        while not self._end.wait(min(self._seconds / 4, 1.0)):
            touched = self._touched
            if time.monotonic() - touched >= self._seconds and told != touched:
                told = touched
                file = self._file or sys.__stderr__
                if file is None:
                    continue
                print(
                    f"watchdog: nothing happened for {self._seconds:g} s in process {jax.process_index()} since step "
                    f"{self._finished} finished; step {self._finished + 1} or what comes before it hangs, here:",
                    file=file,
                    flush=True,
                )
                faulthandler.dump_traceback(file, all_threads=True)
