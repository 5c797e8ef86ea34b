"""`lookup`: rows of a table by number, with a gradient that is summed in fp32.

JAX would add the gradients of all uses of a row in the table's dtype. In bf16 such a sum stops growing at 256 equal
terms, and a frequent token (a space, an end of line) occurs thousands of times in a batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


@jax.custom_vjp
def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table` `[rows, ...]` at `ids`, int `[*tokens]`: `[*tokens, ...]`, in the table's dtype.

    A table that is split over its rows is looked up as Megatron does it: XLA masks what a device does not hold and
    all-reduces the result.
    """
    return table[ids]


def _forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return lookup(table, ids), (table, ids)


def _backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, np.ndarray]:
    table, ids = residuals
    with jax.named_scope("table"):
        summed = jnp.zeros(table.shape, jnp.float32).at[ids].add(gradient.astype(jnp.float32))
        summed = summed.astype(table.dtype)
    return summed, np.zeros(ids.shape, jax.dtypes.float0)


lookup.defvjp(_forward, _backward)
