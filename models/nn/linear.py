"""Matrix products and lookups by the names of their axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.matmul.linear import linear
from meshpar.matmul.lookup import lookup
from meshpar.module import named


class Linear(nnx.Module):
    """`x @ kernel (+ bias)` over any number of named input and output axes.

    Example: `Linear({"embed": 64}, {"heads": 4, "head_dim": 16}, rngs=rngs)` maps `[batch, seq, embed]` to `[batch,
      seq, heads, head_dim]`.
    """

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        rngs: nnx.Rngs,
        bias: bool = False,
        std: float | None = None,
    ):
        """`std` of the initial kernel; None is 1/sqrt(inputs)."""
        shape = (*inputs.values(), *outputs.values())
        std = 1 / math.sqrt(math.prod(inputs.values())) if std is None else std
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=(*inputs, *outputs))
        self.bias = nnx.Param(jnp.zeros(tuple(outputs.values()), jnp.float32), axes=tuple(outputs)) if bias else None
        self.inputs = len(inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The product without the bias where the caller must reduce first: see `add_bias`."""
        with named(self):
            return linear(x, self.kernel[...], self.inputs)

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Adds the bias, after a row-split product has been reduced, so that it is added once.

        In fp32, because the bias's gradient is a sum over all tokens, which bf16 cannot hold.
        """
        if self.bias is None:
            return y
        with named(self):
            return (y.astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(y.dtype)


class Embedding(nnx.Module):
    """A table of `[vocab, embed]`, split over vocab as Megatron's."""

    def __init__(self, vocab: int, embed: int, *, rngs: nnx.Rngs, std: float):
        self.table = nnx.Param(
            std * jax.random.normal(rngs.params(), (vocab, embed), jnp.float32), axes=("vocab", "embed")
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        with named(self):
            return lookup(self.table[...], tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        """The table as a tied output head: `[..., embed]` to `[..., vocab]`."""
        with named(self):
            return linear(x, self.table[...].T)
