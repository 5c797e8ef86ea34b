"""`attend`: attention by whichever backend suits the placement."""

from __future__ import annotations

import jax

from meshpar.attention.blocked import attention_blocked
from meshpar.attention.reference import attention_reference
from meshpar.layout.context import current


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segments: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    placement = current()
    backend = "auto" if placement is None else placement.attention
    if dropout > 0.0 or backend == "reference":
        return attention_reference(
            q, k, v, segments=segments, causal=causal, window=window, scale=scale, softcap=softcap, dropout=dropout, key=key
        )
    return attention_blocked(q, k, v, segments=segments, causal=causal, window=window, scale=scale, softcap=softcap)
