"""Which token may attend to which: the one meaning that every attention backend has.

The token at row position i may attend to the token at row position j when all of these hold:

- causal: j <= i;
- window: i - j < window. The window counts the token itself, as in Mistral (Jiang et al. 2023, section 2) and
  transformers: window=1 sees only itself. A window bounds the past only, so it needs causal attention. Where
  `windowed`, a bool scalar, is false the window is not in force: so layers of one scan differ in it;
- segments: both tokens are of the same segment and it is not 0. Segments tell packed documents apart; 0 is padding.

Positions here are places in the row, not places in a document: inside one segment the two differ by a constant, which
no rule above notices.

A token that may attend to nothing (padding) gets the output zero and passes no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attention_mask(
    q_positions: jax.Array,
    kv_positions: jax.Array,
    *,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    windowed: jax.Array | None = None,
) -> jax.Array:
    """True where a query may attend to a key.

    Args:
      q_positions, kv_positions: int32 `[q_seq]` and `[kv_seq]`, places in the row; a shard of a sequence gives its
        own places. Where rows stand at different places, `[batch, q_seq]`.
      q_segments, kv_segments: int32 `[batch, q_seq]` and `[batch, kv_seq]`, 0 for padding; both or neither.
      causal, window, windowed: see the top of this file.

    Returns:
      bool `[batch, q_seq, kv_seq]`, with batch 1 when all rows are alike.
    """
    distance = jnp.atleast_2d(q_positions)[:, :, None] - jnp.atleast_2d(kv_positions)[:, None, :]
    allowed = distance >= 0 if causal else distance == distance
    if window is not None:
        near = distance < window
        allowed &= near if windowed is None else near | ~windowed
    if q_segments is None or kv_segments is None:
        assert q_segments is None and kv_segments is None, "segments of queries and keys come together"
        return allowed
    same = (q_segments[:, :, None] == kv_segments[:, None, :]) & (q_segments[:, :, None] != 0)
    return allowed & same


def check_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> None:
    """Raises ValueError, with the fix, for arguments that no backend can give a meaning."""
    batch, q_seq, heads, head_dim = _dims(q, "q", "[batch, seq, heads, head_dim]")
    kv_batch, kv_seq, kv_heads, kv_dim = _dims(k, "k", "[batch, kv_seq, kv_heads, head_dim]")
    if v.shape != k.shape:
        raise ValueError(f"v has the shape {v.shape} and k {k.shape}; keys and values must have one shape")
    if batch != kv_batch or head_dim != kv_dim:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and head_dim; make dims 0 and 3 equal")
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}; each kv head serves heads/kv_heads query heads, "
            "so choose a divisor"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one dtype")
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"window={window} with causal={causal}; a window is at least 1 (the token itself) and bounds the past, so "
            "it needs causal=True"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} must be above 0; use None for uncapped scores")
    if segments is not None and (segments.shape != (batch, q_seq) or q_seq != kv_seq):
        raise ValueError(
            f"segments {segments.shape} must be [batch, seq] of both q {q.shape} and k {k.shape}; segments are for "
            "self-attention over whole rows"
        )


def _dims(x: jax.Array, name: str, meaning: str) -> tuple[int, int, int, int]:
    if x.ndim != 4:
        raise ValueError(f"{name} has the shape {x.shape}; attention takes {meaning}")
    return x.shape[0], x.shape[1], x.shape[2], x.shape[3]
