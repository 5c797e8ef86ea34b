"""The same numbers as metrics.jsonl, for TensorBoard: `tensorboard --logdir runs`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

_NO_CURVES = ("step", "data")  # the axis itself, and a checksum


class TensorBoard:
    """Writes scalars of steps; close it to flush them."""

    def __init__(self, folder: Path, *, start: int):
        """`start`: steps that the run has behind it; what an earlier one wrote of later ones is hidden."""
        from tensorboardX import SummaryWriter  # half a second

        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """One point of each curve; None and numbers that are not finite are left out."""
        for name, value in values.items():
            if name not in _NO_CURVES and value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
