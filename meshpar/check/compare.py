"""Two observations compared: differences in the order of computation, each with its ratio and what that usually means.

An entry may differ by some roundings: machine epsilon of the compute dtype times the square root of the longest sum
that made it (rounding errors of a sum of n terms add like a random walk, Higham 2002, section 4.2), relative to the
largest entry of its leaf. Gradients may besides differ by a hundredth of that of their global norm, because some
leaves, such as the bias of a key projection, are zero in exact arithmetic and hold nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.check.explain import constant_ratio, meaning_of_difference, meaning_of_ratio
from meshpar.check.observe import Leaves, Steps, Subject, Updated

# The comparisons in the order of computation.
STAGES: Final = (
    "targets",
    "initial parameters",
    "activations",
    "loss",
    "other metrics",
    "gradients",
    "gradient norm",
    "parameters after SGD",
    "clipped gradients",
    "parameters after the optimizer",
    "optimizer state",
    "later steps",
    "evaluation",
    "copies",
    "determinism",
    "dropout",
)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How much two ways of adding the same numbers may differ."""

    dtype: str  # that is computed in
    sum_length: int  # terms of the longest sum

    @property
    def relative(self) -> float:
        """Of the largest entry of a leaf."""
        return 2.0 * float(jnp.finfo(self.dtype).eps) * math.sqrt(self.sum_length)

    @property
    def of_norm(self) -> float:
        """Of the global norm of gradients, besides."""
        return self.relative / 100

    def __str__(self) -> str:
        return (
            f"{self.relative:.1e} of a leaf's largest entry (2 epsilon of {self.dtype} x sqrt {self.sum_length} terms)"
        )


def tolerance_of(subject: Subject, dtype: str) -> Tolerance:
    """The longest sum of a step is over the tokens of the batch or over the largest dim of a weight."""
    tokens = int(np.prod(subject.batches[0].tokens.shape))
    largest = max((max(leaf.shape, default=1) for leaf in jax.tree.leaves(subject.model.shapes)), default=1)
    return Tolerance(dtype=dtype, sum_length=max(tokens, largest))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor that is not what the reference has."""

    stage: str
    path: str
    text: str  # what is wrong, without stage and path
    excess: float = math.inf  # times what is allowed
    ratio: float | None = None
    meaning: str | None = None

    def __str__(self) -> str:
        name = f"{self.stage}: {self.path}" if self.path else self.stage
        return f"{name}: {self.text}" + (f" ({self.meaning})" if self.meaning else "")


def compare_leaves(
    stage: str,
    here: Leaves,
    there: Leaves,
    tolerance: Tolerance,
    *,
    sizes: Mapping[str, int],
    besides: float = 0.0,
    before: Leaves | None = None,
) -> tuple[list[Difference], float]:
    """Differences between two trees of the same leaves, in the order of `there`, and the largest excess of any leaf.

    Args:
      sizes: degrees for `meaning_of_ratio`.
      besides: what any entry may differ by, whatever its leaf.
      before: what parameters were: then their updates are compared, beside the rounding of what they are stored in.
    """
    found: list[Difference] = []
    worst = 0.0
    for path, expected in there.items():
        actual = here.get(path)
        if actual is None or actual.shape != expected.shape:
            shape = "missing" if actual is None else f"of the shape {list(actual.shape)}"
            text = f"it is {shape}, the reference has {list(expected.shape)}"
            found.append(Difference(stage=stage, path=path, text=text))
            worst = math.inf
            continue
        compared = expected if before is None else expected.astype(np.float64) - before[path].astype(np.float64)
        allowed = tolerance.relative * _largest(compared) + besides
        if before is not None:
            allowed += 2 * max(float(jnp.finfo(leaf.dtype).eps) for leaf in (actual, expected)) * _largest(expected)
        gap = float(np.max(np.abs(actual.astype(np.float64) - expected.astype(np.float64)), initial=0.0))
        excess = 0.0 if gap == 0 else gap / allowed if allowed else math.inf
        if not np.isfinite(gap):
            excess = math.inf
        worst = max(worst, excess)
        if excess <= 1:
            continue
        base = 0.0 if before is None else before[path].astype(np.float64)
        ratio = constant_ratio(actual - base, expected - base, tolerance.relative)
        text = f"{_where(actual, expected)}, {excess:.3g} times what is allowed"
        if ratio is not None:
            text += f"; {ratio:.4g} x the reference in the whole leaf"
        meaning = None if ratio is None else meaning_of_ratio(ratio, sizes, what=stage)
        found.append(Difference(stage=stage, path=path, text=text, excess=excess, ratio=ratio, meaning=meaning))
    return found, worst


def compare_loss(
    stage: str, step: int, actual: float, expected: float, tolerance: Tolerance, *, sizes: Mapping[str, int]
) -> tuple[list[Difference], float]:
    """The losses of one step."""
    excess = _excess(actual, expected, tolerance)
    if excess <= 1:
        return [], excess
    meaning = meaning_of_difference(actual - expected, sizes)
    if meaning is None and expected:
        meaning = meaning_of_ratio(actual / expected, sizes, what="loss")
    text = f"{actual:.7g}, reference {expected:.7g}, difference {actual - expected:+.4g}"
    return [Difference(stage=stage, path=f"loss of step {step}", text=text, excess=excess, meaning=meaning)], excess


def compare_norm(
    stage: str, step: int, actual: float, expected: float, tolerance: Tolerance, *, sizes: Mapping[str, int]
) -> tuple[list[Difference], float]:
    """The gradient norms of one step."""
    return compare_number(stage, f"norm of step {step}", actual, expected, tolerance, sizes=sizes, what="norm")


def compare_number(
    stage: str,
    path: str,
    actual: float,
    expected: float,
    tolerance: Tolerance,
    *,
    sizes: Mapping[str, int],
    what: str = "number",
) -> tuple[list[Difference], float]:
    """Two numbers, such as a metric of one step."""
    excess = _excess(actual, expected, tolerance)
    if excess <= 1:
        return [], excess
    ratio = actual / expected if expected else math.inf
    meaning = meaning_of_ratio(ratio, sizes, what=what)
    text = f"{actual:.7g}, reference {expected:.7g}, {ratio:.4g} times it"
    return [Difference(stage=stage, path=path, text=text, excess=excess, ratio=ratio, meaning=meaning)], excess


def global_norm(leaves: Leaves) -> float:
    """The Euclidean norm of all entries."""
    return math.sqrt(sum(float(np.sum(leaf.astype(np.float64) ** 2)) for leaf in leaves.values()))


def clipped(gradients: Leaves, clip_norm: float | None) -> Leaves:
    """Gradients scaled down to a global norm."""
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / max(global_norm(gradients), 1e-30))
    return {path: leaf * np.asarray(factor, leaf.dtype) for path, leaf in gradients.items()}


def different_copies_found(stage: str, paths: Sequence[str]) -> list[Difference]:
    """Copies of one leaf must be equal to the bit."""
    text = "two devices hold the same part with different bits"
    return [Difference(stage=stage, path=path, text=text) for path in paths]


def not_repeatable_found(steps: Steps) -> list[Difference]:
    """A step run again must give the same bits."""
    text = "the same step from the same state gave other bits"
    return [Difference(stage="determinism", path=path, text=text) for path in steps.not_repeatable]


def repeated_masks(activations: Leaves) -> list[Difference]:
    """Two uses of dropout in one forward must not drop the same."""
    found: list[Difference] = []
    seen: dict[tuple[tuple[int, ...], bytes], str] = {}
    for name, values in activations.items():
        mask = values == 0
        if name.split(", ")[-1].startswith("dropout") and mask.any():
            first = seen.setdefault((mask.shape, mask.tobytes()), name)
            if first != name:
                found.append(Difference(stage="activations", path=name, text=f"the same mask as in {first}"))
    return found


def stale_parameters(updated: Updated) -> list[Difference]:
    """A parameter must be its master in the dtype that it is stored in."""
    stage, text = "parameters after the optimizer", "the parameter is not what its master says: stale weights"
    return [Difference(stage=stage, path=path, text=text) for path in updated.stale]


def _largest(leaf: np.ndarray) -> float:
    return float(np.max(np.abs(leaf), initial=0.0))


def _excess(actual: float, expected: float, tolerance: Tolerance) -> float:
    gap = abs(actual - expected)
    return gap / (tolerance.relative * max(1.0, abs(expected))) if math.isfinite(gap) else math.inf


def _where(actual: np.ndarray, expected: np.ndarray) -> str:
    """The worst entry of a leaf."""
    with np.errstate(invalid="ignore"):
        gap = np.nan_to_num(np.abs(actual.astype(np.float64) - expected.astype(np.float64)), nan=np.inf)
    index = tuple(int(i) for i in np.unravel_index(np.argmax(gap), actual.shape))
    return f"at {list(index)} of {list(actual.shape)} {actual[index]:.6g}, reference {expected[index]:.6g}"
