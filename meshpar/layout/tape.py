"""`Tape`: the named activations of one forward while it is traced, in the order of computation.

`constrain` and `dropout` write on the tape of the current placement; who entered it returns the values from the traced
function. Only values of the trace that the tape belongs to are kept: one made inside a scan, a rematerialised block or
a `shard_map` does not exist outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from meshpar.compat import same_trace


@dataclass(eq=False, kw_only=True)
class Tape:
    """What `constrain` and `dropout` have made so far."""

    beside: jax.Array  # any value of the trace that is recorded, such as its argument
    where: str = ""  # what the next values belong to, such as "block 3"
    taps: dict[str, jax.Array] = field(default_factory=dict)

    def record(self, name: str, x: jax.Array) -> None:
        """Keeps `x`; a name that is there already gets a number."""
        if not same_trace(x, self.beside):
            return
        label = f"{self.where}, {name}" if self.where else name
        number, free = 2, label
        while free in self.taps:
            free, number = f"{label} {number}", number + 1
        self.taps[free] = x
