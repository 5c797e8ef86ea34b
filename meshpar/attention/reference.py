"""Attention as the formula says: softmax(q k^T * scale + mask) v, with the whole score matrix in fp32.

The meaning that every other backend is tested against, and the only one with dropout on the probabilities.
Source: Vaswani et al. 2017, section 3.2.1; grouped keys and values: Ainslie et al. 2023; softcap: Gemma 2 (2024),
section 2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.attention.masks import attention_mask, check_attention
from meshpar.layout.dropout import dropout as drop


def attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    windowed: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention.

    Args:
      q: `[batch, seq, heads, head_dim]`, any float dtype.
      k, v: `[batch, kv_seq, kv_heads, head_dim]`, the dtype of q; query head h reads kv head h // (heads / kv_heads).
      segments: int32 `[batch, seq]`, 0 for padding; masks.py says what it, `causal`, `window` and `windowed` mean.
      scale: factor on the scores before the softmax, 1/sqrt(head_dim) when None.
      softcap: scores become softcap * tanh(scores / softcap); None leaves them.
      dropout: share of the probabilities set to zero, the rest scaled up; needs `key`, a typed PRNG key.

    Returns:
      `[batch, seq, heads, head_dim]` in the dtype of q; exactly zero, with zero gradients, where a query may attend
      to nothing.

    Raises:
      ValueError: shapes or options that do not fit, or dropout without a key.
    """
    check_attention(q, k, v, segments=segments, causal=causal, window=window, softcap=softcap)
    if dropout > 0.0 and key is None:
        raise ValueError(f"dropout={dropout} needs randomness; pass key=jax.random.key(...) or dropout=0.0")
    mask = attention_mask(
        jnp.arange(q.shape[1]),
        jnp.arange(k.shape[1]),
        q_segments=segments,
        kv_segments=segments,
        causal=causal,
        window=window,
        windowed=windowed,
    )
    return attention_masked(q, k, v, mask, scale=scale, softcap=softcap, dropout=dropout, key=key)


def attention_masked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """`attention_reference` for any mask: bool `[batch or 1, q_seq, kv_seq]`, True where a query may see a key."""
    batch, q_seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, q_seq, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqngd,bknd->bngqk", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = mask[:, None, None]
    # A row without any key: max is made 0 and the sum 1, so that its probabilities are 0 and not 0/0 (also in the
    # gradient).
    highest = jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
    highest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - highest, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    if dropout > 0.0:
        weights = drop(weights, dropout, key)
    out = jnp.einsum("bngqk,bknd->bqngd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)
