"""`linear`: activations times a kernel over any number of input and output dims, with a backward that writes its
products in the right order.

The kernel's gradient is a product over all tokens. As JAX derives it, the gradient of the output comes first, and
XLA:CPU then transposes it in memory, token by token; with the narrower operand first the whole step of a small Llama
takes 0.6 to 0.7 of the CPU time. Tokens are contracted as separate dims, since merging dims that are split over devices
would move them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, eq=False)
class Adapted:
    """A kernel with a low-rank adapter, standing where a kernel stands: `linear` computes `x W + scale (x A) B`.

    Two thin products instead of one with `W + scale A B`: the gradient of W, as large as W, is then never made nor
    summed over devices. Source: LoRA (Hu et al. 2021), section 4.1.
    """

    kernel: jax.Array  # [*inputs, *outputs]
    a: jax.Array  # [*inputs, rank]
    b: jax.Array  # [rank, *outputs]
    scale: float

    def __getitem__(self, index: Any) -> Adapted:
        assert index is Ellipsis, "a kernel is read as a whole"  # what nnx does to a parameter's value
        return self


def linear(x: jax.Array, kernel: jax.Array | Adapted, inputs: int = 1) -> jax.Array:
    """`x` `[*tokens, *inputs]` times `kernel` `[*inputs, *outputs]`: `[*tokens, *outputs]`, in their common dtype.

    Args:
      inputs: how many dims of the kernel are contracted: its first ones, with the last ones of `x`.
    """
    if isinstance(kernel, Adapted):
        with jax.named_scope("adapter"):
            low = _product(x, kernel.a, inputs)
            added = _product(low, kernel.b, 1)
        return _product(x, kernel.kernel, inputs) + (kernel.scale * added).astype(x.dtype)
    return _product(x, kernel, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, inputs: int) -> jax.Array:
    tokens = x.ndim - inputs
    return lax.dot_general(x, kernel, ((tuple(range(tokens, x.ndim)), tuple(range(inputs))), ((), ())))


def _forward(x: jax.Array, kernel: jax.Array, inputs: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel, inputs), (x, kernel)


def _backward(inputs: int, residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    tokens = x.ndim - inputs
    over_tokens = ((tuple(range(tokens)), tuple(range(tokens))), ((), ()))
    with jax.named_scope("input"):
        dx = lax.dot_general(dy, kernel, ((tuple(range(tokens, dy.ndim)), tuple(range(inputs, kernel.ndim))), ((), ())))
    with jax.named_scope("kernel"):
        if x.size <= dy.size:
            return dx, lax.dot_general(x, dy, over_tokens)
        outputs = dy.ndim - tokens
        return dx, jnp.moveaxis(lax.dot_general(dy, x, over_tokens), range(outputs), range(-outputs, 0))


_product.defvjp(_forward, _backward)
