"""Dropout whose mask does not depend on how the array is split.

Each row of the batch draws from its own key, by its number in the whole (micro)batch. So data ranks drop differently,
ranks that hold the same elements drop the same, also inside a `shard_map` that sees some of the rows only, and a block
that is computed again repeats its mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.layout.context import current


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x` with a share `rate` of its elements zeroed and the rest scaled up; unchanged without a key (evaluation).

    Args:
      x: `[batch, ...]`, any float dtype.
      key: a typed PRNG key, the same on all devices.
    """
    if rate == 0.0 or key is None:
        return x
    rows = _first_row(x.shape[0]) + jnp.arange(x.shape[0])
    keep = jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(key, row), 1 - rate, x.shape[1:]))(rows)
    y = jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))
    placement = current()
    if placement is not None and placement.tape is not None:
        placement.tape.record("dropout", y)
    return y


def _first_row(rows: int) -> jax.Array | int:
    """The number, in the whole batch, of the first of these rows."""
    placement = current()
    if placement is None or not placement.manual_axes:
        return 0
    rule = placement.layout.rule("batch")
    axes = tuple(axis for axis in rule.mesh_axes if axis in placement.manual_axes) if rule else ()
    return jax.lax.axis_index(axes) * rows if axes else 0
