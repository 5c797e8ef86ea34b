"""A profile of chosen steps, for TensorBoard or https://ui.perfetto.dev."""

from __future__ import annotations

import re
from pathlib import Path
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


def profile_hook(steps: range, folder: Path) -> Hook:
    """A hook that writes a trace of `steps` into `folder`, each process its own. What is in flight before them is in
    it too.
    """
    running = False

    def before(step: int, state: Any, batch: Any) -> None:
        nonlocal running
        if step in steps and not running:
            jax.profiler.start_trace(folder)
            running = True

    def on_metrics(step: int, metrics: dict[str, float], seconds: float) -> None:
        nonlocal running
        if running and step >= steps[-1]:
            jax.profiler.stop_trace()
            running = False

    return Hook(before=before, on_metrics=on_metrics)
