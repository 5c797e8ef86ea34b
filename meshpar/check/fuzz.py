"""Random cases: meshes and features that the plan supports, bounded in number and time.

Faults hide where two features meet, such as label smoothing and a vocabulary that is split: no list of examples that
somebody wrote has all pairs. Every case runs the training step and its reference; a failure is shrunk by `shrink.py`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from meshpar.check.case import Case
from meshpar.check.invariance import OPTIMIZER, SGD, Checker, Findings
from meshpar.mesh.spec import MeshSpec
from meshpar.train.recipe import describe_keys

AXES: Final = ("data", "fsdp", "tensor")

# What a case may draw for a key of the recipe; each has its default twice as often.
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "zero": ("none", "0", "1", "2", "3"),
    "sequence_parallel": ("false", "true"),
    "accumulate": ("1", "2", "4"),
    "remat": ("none", "full", "selective"),
    "loss_chunk": ("none", "8", "5"),
    "unroll": ("1", "0"),
    "attention": ("auto", "reference"),
    "precision.reduce": ("compute", "fp32"),
    "precision.loss_scale.kind": ("auto", "static"),
    "objective.z_loss": ("0", "0.01"),
    "objective.label_smoothing": ("0", "0.1"),
    "objective.clip_norm": ("none", "0.5"),
    "data.packed": ("false", "true"),
    "model.tied": ("false", "true"),
    "model.dropout": ("0", "0.1"),
    "model.window": ("none", "5"),
    "model.qk_norm": ("false", "true"),
    "model.attention_bias": ("false", "true"),
}


@dataclass(frozen=True, kw_only=True)
class Fuzzed:
    """What a series of cases found."""

    cases: int
    skipped: int  # drawn cases that the plan refuses
    failure: Findings | None
    seconds: float
    drawn: Mapping[str, int]  # how often each value was run, as "key=value"


def draw(rng: np.random.Generator, case: Case, devices: int, known: frozenset[str]) -> Case:
    """`case` with random tokens and a drawn mesh, masks and features, those in `known`, on at most so many devices; it
    may be one that the plan refuses.
    """
    product = int(rng.choice([n for n in (1, 2, 4, 6, 8, 12, 16) if n <= devices]))
    sizes = dict.fromkeys(AXES, 1)
    for factor in _prime_factors(product):
        axis = AXES[rng.integers(len(AXES))]
        sizes[axis] *= factor
    changes = {}
    for key, values in CHOICES.items():
        if key in known:
            value = values[rng.integers(len(values))] if rng.random() < 0.5 else values[0]
            if value != values[0]:
                changes[key] = value
    masked = bool(rng.random() < 0.7) and case.masked
    changes |= case.changes
    return dataclasses.replace(case, mesh=MeshSpec(**sizes), changes=changes, masked=masked, random_data=True)


def cases(seed: int, case: Case, devices: int) -> Iterator[Case]:
    """Drawn cases without end."""
    rng = np.random.default_rng(seed)
    known = frozenset(key.key for key in describe_keys(case.base))
    while True:
        yield draw(rng, case, devices, known)


def stages_for(case: Case) -> tuple[str, ...]:
    """One program a case: the step with SGD, or where clipping was drawn the step with the recipe's optimizer."""
    return OPTIMIZER if "objective.clip_norm" in case.changes else SGD


def fuzz(
    case: Case,
    *,
    count: int,
    seconds: float = math.inf,
    seed: int = 0,
    devices: int = 8,
    on_case: Callable[[int, Findings], Any] = lambda number, findings: None,
    checker: Checker | None = None,
) -> Fuzzed:
    """Checks drawn cases until `count` have run or the time is over; stops at the first failure, without shrinking it.

    Args:
      case: what all have in common: everything but mesh, tokens and the features that are drawn.
      on_case: is told the findings of each.
    """
    checker = checker or Checker()
    begun, ran, skipped, failure = time.monotonic(), 0, 0, None
    drawn: dict[str, int] = {}
    for found in cases(seed, case, devices):
        if failure or ran >= count or time.monotonic() - begun > seconds or skipped > 50 * count:
            break
        if not found.runs():
            skipped += 1
            continue
        ran += 1
        findings = checker.check(found, stages_for(found))
        on_case(ran, findings)
        for text in [f"mesh={found.mesh}", *(f"{key}={value}" for key, value in found.changes.items())]:
            drawn[text] = drawn.get(text, 0) + 1
        failure = None if findings.ok else findings
    return Fuzzed(cases=ran, skipped=skipped, failure=failure, seconds=time.monotonic() - begun, drawn=drawn)


def _prime_factors(n: int) -> list[int]:
    factors, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors
