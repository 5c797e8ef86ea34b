"""Data parallelism: each device holds some rows of the batch; GSPMD sums the gradients over them.

Source: Goyal et al. 2017. Cost: one all-reduce of the gradients a step, 2 (n-1)/n bytes of the gradients.
"""

from __future__ import annotations

from meshpar.layout.rules import Rule
from meshpar.parallel.compose import Fragment


def data_parallel(axes: tuple[str, ...]) -> Fragment:
    """Splits the batch over `axes`. Without this rule a ZeRO program compiles and does no data parallelism at all."""
    return Fragment(activations=(Rule(logical="batch", mesh_axes=axes, source="data parallelism"),))
