"""What a constant ratio or a constant difference between two meshes usually means.

A reduction that is missing or doubled leaves a trace in the numbers: a factor of the degree of a mesh axis in
gradients, the logarithm of a degree in a loss, its square root in a norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np


def constant_ratio(here: np.ndarray, there: np.ndarray, tolerance: float) -> float | None:
    """here / there where it is the same in the whole leaf, within some tolerances; None where it is not.

    Entries that are small in both say nothing and are left out.
    """
    here, there = here.astype(np.float64), there.astype(np.float64)
    large = np.abs(there) > 1e-2 * np.max(np.abs(there), initial=0.0)
    if not large.any() or not np.isfinite(here).all():
        return None
    ratios = here[large] / there[large]
    middle = float(np.median(ratios))
    if ratios.size < 2 or np.ptp(ratios) > max(1e-3, 1000 * tolerance) * max(abs(middle), 1e-3):
        return None
    return middle


def meaning_of_ratio(ratio: float, sizes: Mapping[str, int], *, what: str) -> str | None:
    """A sentence about a factor between gradients, parameters or norms.

    Args:
      sizes: degrees of the mesh axes, and microbatches as "accumulate"; those of 1 are ignored.
      what: "norm", "clipped gradients" or anything else.
    """
    if abs(ratio) < 1e-6:
        return "all of it is lost: a gradient is stopped, or a part is never added"
    if not math.isfinite(ratio):
        return None
    if abs(ratio + 1) < 1e-3:
        return "the sign is turned"
    for over, n in _products(sizes):
        for value, meaning in (
            (float(n), f"{n} times as much: a sum over {over} is made twice, or a mean over it became a sum"),
            (1.0 / n, f"1/{n} of it: a sum over {over} is missing, or a sum over it became a mean"),
            (float(n * n), f"{n}² times as much: summed over {over} where it was summed and scaled already"),
        ):
            if math.isclose(ratio, value, rel_tol=2e-3):
                return meaning
        if what == "norm":
            for value, meaning in (
                (math.sqrt(n), f"the square root of {n}: the norm counts each of the {n} copies that {over} holds"),
                (1 / math.sqrt(n), f"1 / square root of {n}: the norm counts one of the {n} parts that {over} holds"),
            ):
                if math.isclose(ratio, value, rel_tol=2e-2):
                    return meaning
        if what == "clipped gradients" and math.isclose(ratio, 1 / math.sqrt(n), rel_tol=2e-3):
            return f"1 / square root of {n}: the norm that clips counts each of the {n} copies that {over} holds"
    power = math.log2(abs(ratio))
    if abs(power) >= 8 and abs(power - round(power)) < 1e-3:
        return f"2^{round(power)}: the loss scale was not divided out, or divided out twice"
    return None


def meaning_of_difference(difference: float, sizes: Mapping[str, int]) -> str | None:
    """A sentence about a constant added to a loss."""
    for over, n in _products(sizes):
        if math.isclose(abs(difference), math.log(n), rel_tol=2e-3):
            sign = "+" if difference > 0 else "-"
            return (
                f"{sign} ln {n}: the softmax sums over the vocabulary of {over} "
                f"{'too often' if difference > 0 else 'in one part only'}"
            )
    return None


# Where to look, by the first stage that differs: everything before it is equal.
WHERE_TO_LOOK: Final = {
    "targets": "the data: the batches themselves are wrong, on any mesh",
    "initial parameters": "how parameters are drawn into their shards: a key or a counter that depends on the device",
    "activations": "the forward, at the activation that is named: everything before it is equal",
    "loss": "the loss itself: the activations are equal, the logits among them",
    "other metrics": "how a metric is summed or divided: the loss is equal",
    "gradients": "the backward, or how gradients are summed: activations and loss are equal",
    "gradient norm": "how the norm is counted: the gradients are equal",
    "parameters after SGD": "how parameters are updated and gathered: the gradients are equal",
    "clipped gradients": "clipping, or its order among the other things: the raw gradients are equal",
    "parameters after the optimizer": "the optimizer's state or its layout: it was given equal gradients",
    "optimizer state": "what an update leaves for the next, or its layout: the weights of the first are equal",
    "later steps": "what one step hands to the next: the first step is equal",
    "evaluation": "the evaluation: the training step is equal",
    "copies": "devices that should hold the same, and do not; all else is equal so far",
    "determinism": "something that is not a function of state and batch",
    "dropout": "the keys of dropout: everything that does not drop is equal",
}


def _products(sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What a factor may be of: a size of one name or more ("data or tensor"), then products ("data and tensor")."""
    real = {name: size for name, size in sizes.items() if size > 1}
    for n in dict.fromkeys(real.values()):
        yield " or ".join(name for name in real if real[name] == n), n
    for count in range(2, len(real) + 1):
        for names in itertools.combinations(real, count):
            yield " and ".join(names), math.prod(real[name] for name in names)
