"""What ratios and differences are said to mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshpar.check.compare import STAGES, Tolerance, clipped, compare_leaves, compare_loss
from meshpar.check.explain import WHERE_TO_LOOK, constant_ratio, meaning_of_difference, meaning_of_ratio

SIZES = {"data": 2, "fsdp": 1, "tensor": 4, "microbatches": 3}


@pytest.mark.parametrize(
    "ratio, what, said",
    [
        (2.0, "gradients", "2 times as much: a sum over data is made twice"),
        (0.25, "gradients", "1/4 of it: a sum over tensor is missing"),
        (3.0, "gradients", "a sum over microbatches is made twice"),
        (8.0, "gradients", "a sum over data and tensor is made twice"),
        (1 / 24, "gradients", "a sum over data and tensor and microbatches is missing"),
        (16.0, "gradients", "4² times as much"),
        (math.sqrt(3), "norm", "the square root of 3"),
        (0.5, "norm", "1/2 of it"),
        (1 / math.sqrt(2), "norm", "1 / square root of 2: the norm counts one of the 2 parts that data holds"),
        (1 / math.sqrt(2), "clipped gradients", "the norm that clips counts each of the 2 copies that data holds"),
        (2.0**16, "gradients", "2^16: the loss scale"),
        (2.0**-15, "gradients", "2^-15: the loss scale"),
        (-1.0, "gradients", "the sign is turned"),
        (0.0, "gradients", "all of it is lost"),
    ],
)
def test_a_ratio_has_a_meaning(ratio: float, what: str, said: str) -> None:
    assert said in str(meaning_of_ratio(ratio, SIZES, what=what))


@pytest.mark.parametrize("ratio", [1.3, 5.0, math.sqrt(3)])
def test_other_ratios_have_none(ratio: float) -> None:
    assert meaning_of_ratio(ratio, SIZES, what="gradients") is None


def test_axes_of_one_size_are_named_together() -> None:
    assert "over data or tensor is" in str(meaning_of_ratio(2.0, {"data": 2, "tensor": 2}, what="gradients"))


@pytest.mark.parametrize(
    "difference, said", [(math.log(4), "+ ln 4"), (-math.log(2), "- ln 2"), (math.log(8), "+ ln 8")]
)
def test_a_logarithm_in_a_loss_has_a_meaning(difference: float, said: str) -> None:
    assert said in str(meaning_of_difference(difference, SIZES))


def test_other_differences_have_none() -> None:
    assert meaning_of_difference(0.3, SIZES) is None


def test_a_ratio_is_constant_only_if_it_is_in_the_whole_leaf() -> None:
    leaf = np.linspace(-1, 1, 30)
    assert constant_ratio(3 * leaf, leaf, 1e-5) == pytest.approx(3)
    assert constant_ratio(np.where(leaf > 0, 3, 1) * leaf, leaf, 1e-5) is None
    assert constant_ratio(leaf * 0, leaf, 1e-5) == 0
    assert constant_ratio(leaf * np.nan, leaf, 1e-5) is None


def test_every_stage_says_where_to_look() -> None:
    assert set(WHERE_TO_LOOK) == set(STAGES)


FP32 = Tolerance(dtype="float32", sum_length=1024)


def test_a_tolerance_grows_with_the_root_of_the_sum_and_is_spelled() -> None:
    assert FP32.relative == pytest.approx(2 * 2**-23 * 32)
    assert str(FP32) == "7.6e-06 of a leaf's largest entry (2 epsilon of float32 x sqrt 1024 terms)"
    assert Tolerance(dtype="bfloat16", sum_length=1024).relative == pytest.approx(2 * 2**-7 * 32)


def test_a_leaf_differs_from_one_tolerance_on() -> None:
    leaf = np.ones(10, np.float64)
    for factor, wrong in ((0.9, 0), (1.1, 1)):
        changed = leaf.copy()
        changed[3] += factor * FP32.relative
        found, worst = compare_leaves("gradients", {"w": changed}, {"w": leaf}, FP32, sizes=SIZES)
        assert len(found) == wrong
        assert worst == pytest.approx(factor, rel=1e-3)


def test_what_is_not_finite_is_never_equal() -> None:
    leaf = np.ones(4)
    for value in (np.nan, np.inf):
        found, _ = compare_leaves("gradients", {"w": leaf * value}, {"w": leaf}, FP32, sizes=SIZES)
        assert len(found) == 1
    assert len(compare_loss("loss", 1, math.nan, 1.0, FP32, sizes=SIZES)[0]) == 1


def test_gradients_that_are_zero_in_exact_arithmetic_may_hold_rounding() -> None:
    noise, rest = np.full(4, 1e-9), np.ones(4)
    here, there = {"bias": noise, "w": rest}, {"bias": -noise, "w": rest}
    assert not compare_leaves("gradients", here, there, FP32, sizes=SIZES, besides=FP32.of_norm * 2)[0]
    assert compare_leaves("activations", here, there, FP32, sizes=SIZES)[0]


def test_clipping_scales_to_the_norm_and_never_up() -> None:
    leaves = {"a": np.array([3.0]), "b": np.array([4.0])}
    assert clipped(leaves, 1.0)["b"] == pytest.approx(0.8)
    assert clipped(leaves, 10.0)["b"] == 4.0
    assert clipped(leaves, None)["b"] == 4.0
