"""How messages spell things: the name that was meant, a number of bytes for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'embed'?"` when a known name is close, else the empty string."""

    def likeness(candidate: str) -> float:  # to the whole name or to its beginning: llama_tny is llama_tiny_stdlib
        beginning = candidate[: len(name)]
        return max(difflib.SequenceMatcher(a=name, b=text).ratio() for text in (candidate, beginning))

    best = max(known, key=likeness, default="")
    return f"; did you mean {best!r}?" if best and likeness(best) >= 0.6 else ""


def format_bytes(count: float) -> str:
    """A number of bytes for people, in powers of 1024: `1.50 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(max(int(count).bit_length() - 1, 0) // 10, 5)
    return f"{count / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power - 1]}"
