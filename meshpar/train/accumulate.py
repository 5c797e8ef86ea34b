"""Gradient accumulation: the gradient of a global batch as the sum over its microbatches, in fp32.

Each microbatch's loss is already divided by the tokens of the *whole* batch, so the sum is exact whatever the split: no
mean of means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.interfaces import Batch, PyTree

# (microbatch, index) -> (gradients, sums to add up, such as losses)
GradFunction = Callable[[Batch, Any], tuple[PyTree, PyTree]]


def split_rows(batch: Batch, microbatches: int) -> Batch:
    """`[batch, seq]` leaves as `[microbatches, batch / microbatches, seq]`: microbatch m takes the rows m, m +
    microbatches, ..., so that every device slices its own rows.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1), batch
    )


def accumulate(
    grad: GradFunction, batch: Batch, microbatches: int, constrain_grads: Callable[[PyTree], PyTree]
) -> tuple[PyTree, PyTree]:
    """Sums `grad` over microbatches.

    Args:
      batch: `[batch, seq]` leaves, split by `split_rows`.
      constrain_grads: puts the accumulator into the gradient layout.

    Returns:
      The summed gradients (fp32 when there are several microbatches) and the summed extras.
    """
    if microbatches == 1:
        gradients, sums = grad(batch, 0)
        return constrain_grads(gradients), sums
    split = split_rows(batch, microbatches)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), split)
    grad_shapes, sum_shapes = jax.eval_shape(grad, first, 0)
    zeros = (
        constrain_grads(jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), grad_shapes)),
        jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes),
    )

    def add(carry: tuple[PyTree, PyTree], scanned: tuple[Batch, jax.Array]) -> tuple[tuple[PyTree, PyTree], None]:
        gradients, sums = grad(*scanned)
        total = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), carry[0], gradients)
        return (constrain_grads(total), jax.tree.map(jnp.add, carry[1], sums)), None

    total, _ = jax.lax.scan(add, zeros, (split, jnp.arange(microbatches)))
    return total
