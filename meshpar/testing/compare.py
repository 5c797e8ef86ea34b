"""What "equal gradients" and "the same losses" mean, in one place.

Two ways to spread one computation add the same numbers in another order, so in fp32 they agree to rounding, not to the
bit. A leaf of gradients may differ by 1e-5 of its own largest entry, plus 1e-7 of the norm of all gradients, because
some leaves (the bias of a key projection) are zero in exact arithmetic and hold nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax
import numpy as np

from meshpar.interfaces import PyTree
from meshpar.layout.resolve import path_name

LEAF_TOLERANCE: Final = 1e-5  # of the leaf's largest entry
NORM_TOLERANCE: Final = 1e-7  # of the global norm
LOSS_TOLERANCE: Final = 1e-5  # nats


def assert_trees_close(actual: PyTree, expected: PyTree, *, names: tuple[str, str] = ("actual", "expected")) -> None:
    """Asserts that every leaf has max|actual - expected| <= 1e-5 max|expected leaf| + 1e-7 global norm of expected.

    Args:
        actual, expected: trees of arrays (of any sharding) with the same paths and shapes; compared in float64.
        names: what the message calls the two.

    Raises:
        AssertionError: the trees differ, or the comparison is empty: no leaves, or `expected` is zero everywhere. The
            message names the worst leaf, and the factor between the two when it is the same in the whole leaf.
    """
    left, right = _leaves(actual), _leaves(expected)
    if left.keys() != right.keys():
        odd = ", ".join(sorted(left.keys() ^ right.keys())[:5])
        raise AssertionError(f"{names[0]} and {names[1]} have different leaves; on one side only: {odd}")
    for path in right:
        if left[path].shape != right[path].shape:
            raise AssertionError(f"{path}: {names[0]} has shape {left[path].shape}, {names[1]} {right[path].shape}")
    norm = float(np.sqrt(sum(np.sum(leaf[np.isfinite(leaf)] ** 2) for leaf in right.values())))
    if norm == 0:
        raise AssertionError(f"{names[1]} is zero everywhere or has no leaves, so the comparison shows nothing")

    # How many times the allowed difference; what is not finite is never equal.
    excess = {path: _excess(left[path], want, norm) for path, want in right.items()}
    wrong = [path for path, times in excess.items() if times > 1]
    if wrong:
        worst = max(wrong, key=lambda path: excess[path])
        raise AssertionError(
            f"{names[0]} and {names[1]} differ in {len(wrong)} of {len(right)} leaves; worst is {worst}"
            f"{_where(left[worst], right[worst], names)}, {excess[worst]:.3g} times what is allowed"
            f"{_factor(left[worst], right[worst], names)}"
        )


def assert_losses_close(
    actual: Sequence[float], expected: Sequence[float], *, names: tuple[str, str] = ("actual", "expected")
) -> None:
    """Asserts that two runs had the same loss at every step, to 1e-5.

    Meaningful for SGD, or for AdamW with an epsilon so large that it does not amplify rounding.

    Raises:
        AssertionError: the first step where they differ, or that there is nothing to compare.
    """
    left, right = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if left.shape != right.shape or left.ndim != 1 or not left.size:
        raise AssertionError(f"{names[0]} has losses of shape {left.shape}, {names[1]} of {right.shape}")
    close = np.abs(left - right) <= LOSS_TOLERANCE
    if not close.all():
        step = int(np.argmin(close))
        raise AssertionError(
            f"the losses of {names[0]} and {names[1]} differ from step {step} of {left.size} on: "
            f"{left[step]:.8g} and {right[step]:.8g}, by {abs(left[step] - right[step]):.2g}"
        )


def _leaves(tree: PyTree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.asarray(leaf).astype(np.float64) for path, leaf in leaves}


def _excess(left: np.ndarray, right: np.ndarray, norm: float) -> float:
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return np.inf
    allowed = LEAF_TOLERANCE * np.max(np.abs(right), initial=0) + NORM_TOLERANCE * norm
    return float(np.max(np.abs(left - right), initial=0) / allowed)


def _where(left: np.ndarray, right: np.ndarray, names: tuple[str, str]) -> str:
    """The worst entry of a leaf, as the middle of a sentence."""
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = np.nan_to_num(np.abs(left - right), nan=np.inf)
    index = tuple(int(i) for i in np.unravel_index(np.argmax(difference), left.shape))
    return f"{list(index)} of {list(left.shape)}: {names[0]} {left[index]:.6g}, {names[1]} {right[index]:.6g}"


def _factor(left: np.ndarray, right: np.ndarray, names: tuple[str, str]) -> str:
    """The end of the sentence when one side is a multiple of the other, as when a mean or a reduction is lost."""
    large = np.abs(right) > 1e-3 * np.max(np.abs(right), initial=0)
    ratios = left[large] / right[large]
    if ratios.size < 2 or not np.isfinite(ratios).all() or np.ptp(ratios) > 1e-3 * np.abs(ratios).max():
        return ""
    return f"; {names[0]} is {np.median(ratios):.4g} x {names[1]} in the whole leaf"
