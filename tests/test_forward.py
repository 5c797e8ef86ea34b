"""The forward gives each layer its own random key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from meshpar.forward import Forward
from meshpar.interfaces import Batch
from meshpar.mesh.build import build_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.module import abstract, stack
from meshpar.plan import Plan
from meshpar.precision.policy import Policy


class _Nothing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((1,)), axes=(None,))


class _Draws(nnx.Module):
    """Reports the sum and the sum of squares of one number drawn from each layer's key."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = stack(_Nothing, 3, rngs)

    def embed(self, batch: Batch, key: jax.Array) -> jax.Array:
        return batch.weights[..., None]

    def block(self, block: _Nothing, x: jax.Array, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict]:
        drawn = jax.random.uniform(key)
        return x, {"sum": drawn, "squares": drawn * drawn}

    def head(self, x: jax.Array) -> jax.Array:
        return x


@pytest.mark.parametrize("unroll", [0, 1])
def test_each_layer_draws_from_its_own_key(unroll: int) -> None:
    """Three equal numbers would have sum² = 3 squares; and written-out layers draw what scanned ones do."""
    model = abstract(lambda rngs: _Draws(rngs))
    plan = Plan(precision=Policy(compute="fp32"), unroll=unroll)
    forward = Forward(model, plan, build_mesh(MeshSpec(), jax.devices()[:1]))
    zeros = jnp.zeros((1, 1), jnp.int32)
    batch = Batch(tokens=zeros, targets=zeros, weights=jnp.ones((1, 1)))
    _, _, found = forward(model.init(jax.random.key(0)), batch, jax.random.key(1))
    _, blocks_key = jax.random.split(jax.random.key(1))
    expected = sum(float(jax.random.uniform(jax.random.fold_in(blocks_key, layer))) for layer in range(3))
    assert float(found["sum"]) == pytest.approx(expected, rel=1e-6)
    assert float(found["sum"]) ** 2 < 3 * float(found["squares"]) - 1e-3
