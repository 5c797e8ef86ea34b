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
from meshpar.check.invariance import Checker, Findings
from meshpar.mesh.spec import MeshSpec
from meshpar.train.recipe import describe_keys
from meshpar.train.run import Recipe

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
# The stages of the one program that every case runs.
STAGES: Final = ("losses", "gradients", "gradient norm", "parameters after SGD", "copies")


@dataclass(frozen=True, kw_only=True)
class Fuzzed:
    """What a series of cases found."""

    cases: int
    skipped: int  # drawn cases that the plan refuses
    failures: list[Findings]
    seconds: float
    drawn: Mapping[str, int]  # how often each value was run, as "key=value"


def draw(rng: np.random.Generator, name: str, base: Recipe, devices: int, known: frozenset[str]) -> Case:
    """A case on at most so many devices, with the keys `known`; it may be one that the plan refuses."""
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
    return Case(
        name=name, base=base, mesh=MeshSpec(**sizes), changes=changes, masked=bool(rng.random() < 0.7), random_data=True
    )


def cases(seed: int, name: str, base: Recipe, devices: int) -> Iterator[Case]:
    """Drawn cases without end."""
    rng = np.random.default_rng(seed)
    known = frozenset(key.key for key in describe_keys(base))
    while True:
        yield draw(rng, name, base, devices, known)


def fuzz(
    name: str,
    base: Recipe,
    *,
    count: int,
    seconds: float = math.inf,
    seed: int = 0,
    devices: int = 8,
    changes: Mapping[str, str] = {},
    on_case: Callable[[int, Case, Findings | None], Any] = lambda number, case, findings: None,
    checker: Checker | None = None,
) -> Fuzzed:
    """Checks drawn cases until `count` have run or the time is over; stops at the first failure, without shrinking it.

    Args:
      changes: `--set` keys that every case has.
      on_case: is told each case and its findings; None where the plan refuses the case.
    """
    checker = checker or Checker()
    begun, ran, skipped, failures = time.monotonic(), 0, 0, []
    drawn: dict[str, int] = {}
    for case in cases(seed, name, base, devices):
        if ran >= count or time.monotonic() - begun > seconds or skipped > 50 * count:
            break
        case = dataclasses.replace(case, changes={**case.changes, **changes})
        if not case.runs():
            skipped += 1
            continue
        ran += 1
        findings = checker.check(case, STAGES)
        on_case(ran, case, findings)
        for text in [f"mesh={case.mesh}", *(f"{key}={value}" for key, value in case.changes.items())]:
            drawn[text] = drawn.get(text, 0) + 1
        if not findings.ok:
            failures.append(findings)
            break
    return Fuzzed(cases=ran, skipped=skipped, failures=failures, seconds=time.monotonic() - begun, drawn=drawn)


def _prime_factors(n: int) -> list[int]:
    factors, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors
