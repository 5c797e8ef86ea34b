import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.testing.compare import assert_losses_close, assert_trees_close

GRADIENTS = {"blocks": {"q": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "bias": np.zeros(4, np.float32)}}


def changed(name: str, change: np.ndarray | float) -> dict:
    return {"blocks": GRADIENTS["blocks"] | {name: GRADIENTS["blocks"][name] + np.float32(change)}}


def test_rounding_is_equal_and_bf16_and_jax_leaves_are_read() -> None:
    assert_trees_close(changed("q", 0.9e-5), GRADIENTS)
    assert_trees_close({"x": jnp.ones(3, jnp.bfloat16)}, {"x": np.ones(3)})
    with pytest.raises(AssertionError, match="worst is blocks/q"):
        assert_trees_close(changed("q", 1.1e-5), GRADIENTS)


def test_a_leaf_that_is_zero_in_exact_arithmetic_may_hold_rounding_of_the_global_norm() -> None:
    norm = np.linalg.norm(GRADIENTS["blocks"]["q"])
    assert_trees_close(changed("bias", 0.9e-7 * norm), GRADIENTS)
    with pytest.raises(AssertionError, match="worst is blocks/bias"):
        assert_trees_close(changed("bias", 1.2e-7 * norm), GRADIENTS)


def test_the_message_names_the_worst_leaf_its_worst_entry_and_the_values() -> None:
    spike = np.zeros((3, 4), np.float32)
    spike[1, 2] = 1e-3
    with pytest.raises(
        AssertionError, match=r"ring and dense differ in 1 of 2 leaves; worst is blocks/q\[1, 2\] of"
    ) as caught:
        assert_trees_close(changed("q", spike), GRADIENTS, names=("ring", "dense"))
    assert "ring 0.0919091, dense 0.0909091" in str(caught.value)
    assert " x " not in str(caught.value)


def test_a_constant_factor_is_named() -> None:
    doubled = {"blocks": {name: 2 * leaf for name, leaf in GRADIENTS["blocks"].items()}}
    with pytest.raises(AssertionError, match="; actual is 2 x expected in the whole leaf"):
        assert_trees_close(doubled, GRADIENTS)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sides", [(0,), (1,), (0, 1)])
def test_what_is_not_finite_is_never_equal(bad: float, sides: tuple[int, ...]) -> None:
    pair = [{"x": np.ones(3), "y": np.ones(3)}, {"x": np.ones(3), "y": np.ones(3)}]
    for side in sides:
        pair[side]["y"][1] = bad
    with pytest.raises(AssertionError, match=r"worst is y\[1\]"):
        assert_trees_close(*pair)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"x": np.ones(3)}, {"y": np.ones(3)}, "on one side only: x, y"),
        ({"x": np.ones(3)}, {"x": np.ones((1, 3))}, r"x: actual has shape \(3,\), expected \(1, 3\)"),
        ({"x": np.zeros(3)}, {"x": np.zeros(3)}, "shows nothing"),
        ({}, {}, "shows nothing"),
    ],
)
def test_trees_that_cannot_be_compared_are_refused(actual: dict, expected: dict, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_trees_close(actual, expected)


def test_losses_are_compared_at_every_step() -> None:
    assert_losses_close([2.0, 1.0], [2.0, 1.0 + 0.9e-5])
    with pytest.raises(AssertionError, match=r"losses of tp and one differ from step 1 of 3 on: 1\.1 and 1, by 0\.1"):
        assert_losses_close([2.0, 1.1, 0.5], [2.0, 1.0, 0.4], names=("tp", "one"))
    for actual, expected in [([1.0], [1.0, 1.0]), ([], []), ([np.nan], [np.nan])]:
        with pytest.raises(AssertionError):
            assert_losses_close(actual, expected)
