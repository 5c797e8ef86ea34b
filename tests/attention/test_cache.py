"""attend from a cache is the last row of attend over all keys, and refuses what it cannot continue."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.attention.attend import attend
from meshpar.attention.cache import KVCache, continuing, keeping
from meshpar.attention.reference import attention_reference

ROWS, SEQ, LENGTH, HEADS, KV_HEADS, SIZE = 3, 6, 8, 4, 2, 8
AT = jnp.array([[3], [0], [5]])  # the positions of the last tokens


def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return tuple(  # type: ignore[return-value]
        jnp.asarray(rng.normal(size=(ROWS, SEQ, heads, SIZE)), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def of(x: jax.Array) -> jax.Array:
    """The entries at `AT`."""
    return jnp.take_along_axis(x, AT[:, :, None, None], axis=1)


def cache_of(k: jax.Array, v: jax.Array) -> KVCache:
    """Two layers, of which the second holds the given keys before `AT`, and all else is large."""

    def filled(x: jax.Array) -> jax.Array:
        known = (jnp.arange(LENGTH)[None] < AT)[:, :, None, None]
        padded = jnp.pad(x, ((0, 0), (0, LENGTH - SEQ), (0, 0), (0, 0)))
        return jnp.stack([jnp.full_like(padded, 77.0), jnp.where(known, padded, 77.0)])

    return KVCache(k=filled(k), v=filled(v))


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"scale": 0.1, "softcap": 0.5}, {"window": 1}])
def test_one_query_against_the_cache_is_the_last_row_of_the_whole(options: dict[str, Any]) -> None:
    q, k, v = arrays()
    wanted = of(attention_reference(q, k, v, **options))
    with continuing([cache_of(k, v)], 1, AT) as written:
        found = attend(of(q), of(k), of(v), **options)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    (cache,) = written
    for after, before, new in ((cache.k, cache_of(k, v).k, k), (cache.v, cache_of(k, v).v, v)):
        there = (jnp.arange(LENGTH)[None] == AT)[:, :, None, None]
        np.testing.assert_array_equal(after, before.at[1].set(jnp.where(there, of(new), before[1])))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_written_bit_by_bit(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in arrays())
    with continuing([cache_of(k, v)], 1, AT) as written:
        found = attend(of(q), of(k), of(v))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, of(attention_reference(q, k, v)))
    np.testing.assert_array_equal(of(written[0].k[1]), of(k))


def test_calls_are_told_apart_by_their_order() -> None:
    q, k, v = arrays()
    with continuing([cache_of(k, v), cache_of(v, k)], jnp.int32(1), AT) as written:
        found = [attend(of(q), of(k), of(v)), attend(of(q), of(v), of(k))]
    for out, whole in zip(found, (attention_reference(q, k, v), attention_reference(q, v, k)), strict=True):
        np.testing.assert_allclose(out, of(whole), rtol=0, atol=1e-6)
    assert len(written) == 2


def test_reading_a_prompt_changes_nothing_and_keeps_what_attend_was_given() -> None:
    q, k, v = arrays()
    with keeping() as kept:
        found = attend(q, k, v, window=3)
    np.testing.assert_array_equal(found, attend(q, k, v, window=3))
    assert len(kept) == 1
    assert kept[0].k is k
    assert kept[0].v is v


@pytest.mark.parametrize(
    "options, option",
    [
        ({"causal": False}, "causal=False"),
        ({"segments": jnp.ones((ROWS, SEQ), jnp.int32)}, "segments"),
        ({"dropout": 0.1, "key": jax.random.key(0)}, "dropout"),
    ],
)
def test_options_that_a_cache_cannot_continue_are_refused(options: dict[str, Any], option: str) -> None:
    with keeping(), pytest.raises(ValueError, match=f"attend with {option} cannot go on"):
        attend(*arrays(), **options)


def test_attention_to_something_else_than_the_row_is_refused() -> None:
    q, k, v = arrays()
    with keeping(), pytest.raises(ValueError, match="1 queries and 6 keys a row"):
        attend(q[:, :1], k, v)


def test_attention_inside_a_transformation_of_the_block_is_refused() -> None:
    with keeping(), pytest.raises(ValueError, match="call attend from the block itself"):
        jax.checkpoint(attend)(*arrays())
