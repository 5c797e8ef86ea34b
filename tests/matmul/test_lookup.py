"""`lookup` is indexing whose gradient is summed in fp32, also where the table is split over its rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.matmul.lookup import lookup
from meshpar.testing.compare import assert_trees_close


def test_a_row_that_is_used_8192_times_gets_the_whole_sum_in_bf16() -> None:
    """Indexing would give 256, where a bf16 sum of ones stops."""
    gradient = jax.grad(lambda table: lookup(table, jnp.zeros((8192,), jnp.int32)).sum())(
        jnp.ones((4, 2), jnp.bfloat16)
    )
    np.testing.assert_array_equal(gradient[0].astype(jnp.float32), 8192)
    np.testing.assert_array_equal(gradient[1:].astype(jnp.float32), 0)
    assert gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize("mesh", ["data=1", "data=2 tensor=4"])
def test_values_and_gradients_are_those_of_indexing(mesh_of: Callable[[str], Mesh], mesh: str) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(16, 3)).astype(np.float32)
    ids, weights = rng.integers(0, 16, (4, 5)), rng.normal(size=(4, 5, 3)).astype(np.float32)
    expected = jax.value_and_grad(lambda table: (table[ids] * weights).sum())(jnp.asarray(table))
    built = mesh_of(mesh)
    split = jax.device_put(table, NamedSharding(built, PartitionSpec("tensor")))
    rows = jax.device_put(ids, NamedSharding(built, PartitionSpec("data")))
    found = jax.jit(jax.value_and_grad(lambda table: (lookup(table, rows) * weights).sum()))(split)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    assert_trees_close({"table": found[1]}, {"table": expected[1]})
