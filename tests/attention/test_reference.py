"""The reference against the formula written in float64 loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.attention.reference import attention_reference


def oracle(q, k, v, *, segments=None, causal=True, window=None, scale=None, softcap=None) -> np.ndarray:
    """Query by query in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, q_seq, heads, head_dim = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    out = np.zeros(q.shape)
    for b, h, i in np.ndindex(batch, heads, q_seq):
        seen = [
            j
            for j in range(kv_seq)
            if (not causal or j <= i)
            and (window is None or i - j < window)
            and (segments is None or (segments[b, i] == segments[b, j] and segments[b, i] != 0))
        ]
        if not seen:
            continue
        scores = k[b, seen, h // (heads // kv_heads)] @ q[b, i, h] * (head_dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, seen, h // (heads // kv_heads)] / weights.sum()
    return out


@pytest.mark.parametrize(
    "heads, kv_heads, options",
    [
        (4, 4, {}),
        (4, 2, {"causal": False, "scale": 0.3}),
        (4, 1, {"window": 3, "softcap": 1.5}),
        (4, 2, {"segments": np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]], np.int32)}),
    ],
)
def test_reference_is_the_formula(heads, kv_heads, options):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 7, heads, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 7, kv_heads, 8)), jnp.float32) for _ in range(2))
    actual = jax.jit(functools.partial(attention_reference, **options))(q, k, v)
    np.testing.assert_allclose(actual, oracle(q, k, v, **options), atol=2e-6)


def test_dropout_drops_its_share_and_keeps_the_mean():
    q = k = jnp.zeros((1, 64, 2, 8))
    v = jnp.ones((1, 64, 2, 8))
    out = jax.jit(functools.partial(attention_reference, causal=False, dropout=0.5))(q, k, v, key=jax.random.key(0))
    assert abs(float(out.mean()) - 1.0) < 0.02
    assert float(out.std()) > 0.05
    with pytest.raises(ValueError, match="pass key="):
        attention_reference(q, k, v, dropout=0.5)
