"""The meaning of causal, window and segments, and the refusals."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.attention.masks import attention_mask
from meshpar.attention.reference import attention_reference


def rows(mask) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in np.asarray(mask)]


def test_a_window_counts_the_token_itself():
    places = jnp.arange(4)
    assert rows(attention_mask(places, places, window=2)[0]) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(attention_mask(places, places, window=1)[0]) == ["x...", ".x..", "..x.", "...x"]


def test_segments_separate_documents_and_0_is_padding():
    segments = jnp.array([[1, 1, 2, 0, 0]])
    mask = attention_mask(jnp.arange(5), jnp.arange(5), q_segments=segments, kv_segments=segments)
    assert rows(mask[0]) == ["x....", "xx...", "..x..", ".....", "....."]


def test_a_shard_of_the_sequence_gives_its_part_of_the_mask():
    whole = attention_mask(jnp.arange(8), jnp.arange(8), window=3)
    part = attention_mask(jnp.arange(4, 8), jnp.arange(2, 6), window=3)
    np.testing.assert_array_equal(part[0], whole[0, 4:8, 2:6])


@pytest.mark.parametrize(
    "q_shape, k_shape, options, fix",
    [
        ((1, 4, 3, 8), (1, 4, 2, 8), {}, "heads=3 is not a multiple of kv_heads=2"),
        ((1, 4, 2, 8), (1, 4, 2, 16), {}, "must agree in batch and head_dim"),
        ((1, 4, 2, 8), (1, 4, 2, 8), {"window": 0}, "a window is at least 1"),
        ((1, 4, 2, 8), (1, 4, 2, 8), {"window": 2, "causal": False}, "needs causal=True"),
        ((1, 4, 2, 8), (1, 4, 2, 8), {"softcap": 0.0}, "must be above 0"),
        ((1, 4, 2, 8), (1, 5, 2, 8), {"segments": jnp.ones((1, 4), jnp.int32)}, "segments are for self-attention"),
        ((4, 2, 8), (4, 2, 8), {}, "attention takes"),
    ],
)
def test_bad_arguments_are_refused_with_the_fix(q_shape, k_shape, options, fix):
    q, k = jnp.zeros(q_shape), jnp.zeros(k_shape)
    with pytest.raises(ValueError, match=fix):
        attention_reference(q, k, k, **options)
