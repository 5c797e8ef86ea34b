"""`Clock`: where the wall time of a run goes. Every second belongs to one cause, so that the shares add up to one.

Goodput is the share of "steps": time in which the devices trained, or could have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

STEPS = "steps"


class Clock:
    """Seconds by cause. A cause that begins within another stops the time of that one until it ends.

    For one thread: what others do meanwhile, such as writing a checkpoint, costs the run nothing and is not counted.
    """

    def __init__(self, since: float | None = None):
        """`since`, a `time.perf_counter()`, is where "start" begins; None: now."""
        self._seconds: dict[str, float] = {}
        self._causes = ["start"]
        self._at = time.perf_counter() if since is None else since

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Counts the time in the `with` block for `cause`."""
        self._count()
        self._causes.append(cause)
        try:
            yield
        finally:
            self._count()
            self._causes.pop()

    def seconds(self) -> dict[str, float]:
        """Seconds of each cause so far, in the order in which they began."""
        self._count()
        return dict(self._seconds)

    def goodput(self) -> float:
        """The share of the steps in all seconds so far."""
        seconds = self.seconds()
        return seconds.get(STEPS, 0.0) / max(sum(seconds.values()), 1e-9)

    def text(self) -> str:
        """One line: the goodput, and the seconds of the causes, the longest first."""
        seconds = self.seconds()
        longest = sorted(seconds.items(), key=lambda item: -item[1])
        causes = ", ".join(f"{cause} {spent:.1f} s" for cause, spent in longest if spent >= 0.05)
        return f"goodput {self.goodput():.1%} of {sum(seconds.values()):.1f} s: {causes}"

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._causes[-1]] = self._seconds.get(self._causes[-1], 0.0) + now - self._at
        self._at = now
