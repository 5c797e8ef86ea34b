"""A language model whose logits are a table's rows, so that each token's loss is known in advance."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.interfaces import Batch
from meshpar.layout.constrain import constrain
from meshpar.module import stack


@dataclass(frozen=True, kw_only=True)
class StubConfig:
    """`rows[token]` are the logits of the target that follows the token."""

    rows: tuple[tuple[float, ...], ...]

    @property
    def vocab(self) -> int:
        return len(self.rows[0])

    def build(self, rngs: nnx.Rngs) -> Stub:
        return Stub(self, rngs=rngs)


class _Nothing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((1,)), axes=(None,))


class Stub(nnx.Module):
    def __init__(self, config: StubConfig, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.asarray(config.rows, jnp.float32), axes=(None, "vocab"))
        self.blocks = stack(_Nothing, 1, rngs)

    def embed(self, batch: Batch, key: jax.Array | None) -> jax.Array:
        return constrain(self.table[...][batch.tokens], "batch seq_residual embed")

    def block(
        self, block: _Nothing, x: jax.Array, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        return constrain(x, "batch seq_residual embed"), {}

    def head(self, x: jax.Array) -> jax.Array:
        return constrain(x, "batch seq vocab")
