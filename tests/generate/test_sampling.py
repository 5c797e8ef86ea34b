"""Which tokens are left by top-k and top-p, how often each is drawn, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.generate.sampling import Sampling, choose, keep_top

VOCAB = 6
keep = jax.jit(keep_top)
pick = jax.jit(choose)


def kept_by_hand(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The tokens of one row that may be drawn, one after another from the most likely one. No two are alike."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    weights = np.exp(logits[ranked] - logits.max())
    kept, total = set(), 0.0
    for token, probability in zip(ranked, weights / weights.sum(), strict=True):
        if kept and total >= top_p - 1e-6:
            break
        kept.add(token)
        total += float(probability)
    return kept


@given(
    st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB, unique=True),
    st.integers(1, VOCAB),
    st.sampled_from([0.01, 0.3, 0.62, 0.9, 0.99, 1.0]),
)
def test_top_k_then_top_p_keep_what_one_would_by_hand(tenths: list[int], top_k: int, top_p: float) -> None:
    logits = np.asarray(tenths, np.float32) / 10
    found = np.asarray(keep(logits[None], np.int32(top_k), np.float32(top_p)))[0]
    kept = kept_by_hand(logits, top_k, top_p)
    assert {token for token in range(VOCAB) if np.isfinite(found[token])} == kept
    for token in kept:
        assert found[token] == logits[token]


@pytest.mark.parametrize(
    "top_p, kept", [(0.5, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (0.0001, [1]), (0.97, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_token_that_reaches_the_sum(top_p: float, kept: list[int]) -> None:
    """Of probabilities 0.15, 0.5, 0.05 and 0.3: one token too few would be the mistake."""
    logits = jnp.log(jnp.asarray([[0.15, 0.5, 0.05, 0.3, 0.0, 0.0]]))
    found = keep(logits, np.int32(VOCAB), np.float32(top_p))[0]
    assert np.flatnonzero(np.isfinite(found)).tolist() == kept


def test_tokens_as_likely_as_the_last_kept_one_are_kept() -> None:
    found = keep(jnp.asarray([[0.0, 1.0, 2.0, 1.0, 0.0, 0.0]]), np.int32(2), np.float32(1))[0]
    assert np.flatnonzero(np.isfinite(found)).tolist() == [1, 2, 3]


def drawn(probabilities: list[float], sampling: Sampling, rows: int = 20_000) -> np.ndarray:
    """How often each token is drawn, as shares."""
    logits = np.broadcast_to(np.log(np.asarray(probabilities, np.float32)), (rows, len(probabilities)))
    tokens = pick(logits, np.full(rows, 3, np.int32), sampling.arrays(len(probabilities)))
    return np.bincount(tokens, minlength=len(probabilities)) / rows


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_tokens_are_drawn_as_often_as_the_temperature_says(temperature: float) -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.06, 0.03, 0.01])
    wanted = probabilities ** (1 / temperature)
    wanted /= wanted.sum()
    found = drawn(probabilities.tolist(), Sampling(temperature=temperature, seed=5))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.015)  # 4 standard deviations of a share of 0.5


def test_what_top_k_and_top_p_leave_is_drawn_in_its_old_proportions() -> None:
    probabilities = [0.3, 0.1, 0.4, 0.2]
    np.testing.assert_allclose(drawn(probabilities, Sampling(temperature=1, top_k=2)), [3 / 7, 0, 4 / 7, 0], atol=0.015)
    np.testing.assert_allclose(
        drawn(probabilities, Sampling(temperature=1, top_p=0.7)), [3 / 7, 0, 4 / 7, 0], atol=0.015
    )
    assert drawn(probabilities, Sampling(temperature=0, top_p=0.1))[2] == 1


def test_the_smallest_temperature_is_the_likeliest_token_and_no_overflow() -> None:
    assert drawn([0.3, 0.1, 0.4, 0.2], Sampling(temperature=1e-30))[2] == 1


def test_each_row_and_position_draws_from_its_own_key() -> None:
    logits, choice = jnp.zeros((3, 1000)), Sampling(temperature=1).arrays(1000)
    first, later = (np.asarray(pick(logits, jnp.asarray(at), choice)) for at in ([7, 7, 8], [9, 7, 8]))
    assert len(set(first.tolist())) == 3
    assert first[0] != later[0]
    np.testing.assert_array_equal(first[1:], later[1:])
    assert pick(logits, jnp.asarray([7, 7, 8]), Sampling(temperature=1, seed=1).arrays(1000))[0] != first[0]


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be finite"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01 must be above 0 and at most 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_a_value_out_of_range_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampling(**values)


def test_a_stop_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="the stop token 6 is outside of the model's vocab=6; use one of 0 to 5"):
        Sampling(stop=(1, 6)).check(VOCAB)
