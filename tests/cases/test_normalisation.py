"""Losses and gradients are sums over tokens divided by the tokens of the whole batch, however the batch is cut."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.interfaces import Batch
from meshpar.testing.compare import assert_trees_close
from meshpar.train.accumulate import accumulate
from meshpar.train.step import Objective
from tests.cases.stub import StubConfig
from tests.conformance.runs import LLAMA, batch_of, train

# With two logits (0, b), target 0 has the loss log(1 + e^b): token 0 costs 4, token 1 costs 1.
COSTS = StubConfig(rows=((0.0, math.log(math.e**4 - 1)), (0.0, math.log(math.e - 1))))


@pytest.mark.parametrize(("mesh", "accumulate"), [("data=1", 1), ("data=1", 2), ("data=2", 1)])
def test_c03_a_microbatch_with_few_targets_gets_no_more_weight(mesh: str, accumulate: int) -> None:
    """One target of loss 4 in one half, seven of loss 1 in the other: 11/8, not the mean of means 2.5."""
    tokens = np.zeros((2, 8), np.int32)
    tokens[1] = 1
    weights = np.zeros((2, 8), np.float32)
    weights[0, 3] = 1.0
    weights[1, :7] = 1.0
    batch = Batch(tokens=tokens, targets=np.zeros((2, 8), np.int32), weights=weights)
    run = train(mesh, config=COSTS, batches=[batch], accumulate=accumulate)
    assert run.losses == [pytest.approx(1.375, abs=1e-6)]
    expected = np.array([[math.exp(-4) - 1, 1 - math.exp(-4)], [7 * (math.exp(-1) - 1), 7 * (1 - math.exp(-1))]]) / 8
    np.testing.assert_allclose(run.gradients["table"], expected, rtol=1e-5)


def test_c14_a_masked_microbatch_counts_for_nothing() -> None:
    """Masking one of four microbatches is the same as leaving its rows out."""
    batch = batch_of(0)
    weights = batch.weights.copy()
    weights[1::4] = 0.0
    masked = train("data=1", batches=[dataclasses.replace(batch, weights=weights)], accumulate=4)
    rest = [row for row in range(8) if row % 4 != 1]
    without = train("data=1", batches=[jax.tree.map(lambda x: x[rest], batch)])
    assert masked.losses == [pytest.approx(without.losses[0], abs=1e-5)]
    assert_trees_close(masked.gradients, without.gradients)


def test_c14_a_batch_without_targets_changes_nothing() -> None:
    batch = batch_of(0)
    run = train("data=1", batches=[dataclasses.replace(batch, weights=np.zeros_like(batch.weights))], accumulate=4)
    assert run.losses == [0.0]
    assert run.norms == [0.0]
    assert all(not leaf.any() for leaf in jax.tree.leaves(run.gradients))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))


def test_c14_a_batch_that_leaves_rows_over_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"batch=10 is not divisible by data=1 x fsdp=1 x accumulate=4 = 4; use a multiple of 4, such as 12",
    ):
        train("data=1", batches=[batch_of(0, batch=10)], accumulate=4)


def test_c45_long_and_short_rows_weigh_by_their_tokens() -> None:
    """Rows of 11 and 101 tokens: one batch, two microbatches and two data ranks give one gradient."""
    batch = batch_of(0, batch=2, seq=104)
    weights = np.zeros((2, 104), np.float32)
    weights[0, :11], weights[1, :101] = 1.0, 1.0
    batch = dataclasses.replace(batch, weights=weights)
    config = dataclasses.replace(LLAMA, max_seq=128)
    plain = train("data=1", config=config, batches=[batch])
    for mesh, microbatches in (("data=1", 2), ("data=2", 1)):
        run = train(mesh, config=config, batches=[batch], accumulate=microbatches)
        assert run.losses == [pytest.approx(plain.losses[0], abs=1e-6)]
        assert_trees_close(run.gradients, plain.gradients)


def test_c10_no_target_is_lost_where_the_sequence_is_split() -> None:
    """Seven targets of eight positions over two devices: the sum of their losses is the unsplit one, and seven are
    counted.
    """
    weights = np.ones((2, 8), np.float32)
    weights[:, -1] = 0.0
    tokens = np.tile(np.arange(8, dtype=np.int32) % 2, (2, 1))
    batch = Batch(tokens=tokens, targets=np.zeros((2, 8), np.int32), weights=weights)
    whole = train("data=1", config=COSTS, batches=[batch])
    split = train("tensor=2", config=COSTS, batches=[batch], sequence_parallel=True)
    assert whole.losses == [pytest.approx((4 * 4 + 3 * 1) / 7, abs=1e-6)]
    assert split.losses == [pytest.approx(whole.losses[0], abs=1e-6)]
    training = split.training
    assert float(training.evaluate(split.state.params, training.place(batch))["tokens"]) == 14


def test_c27_gradients_add_up_in_fp32() -> None:
    """256 and then 256 times 1, as bf16 gradients: a bf16 sum would stay at 256."""
    microbatches = 257
    values = np.ones((microbatches, 1), np.float32)
    values[0] = 256.0
    batch = Batch(
        tokens=np.zeros((microbatches, 1), np.int32), targets=np.zeros((microbatches, 1), np.int32), weights=values
    )

    def gradient(batch: Batch, index: int) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        return {"w": batch.weights[0].astype(jnp.bfloat16)}, {}

    total, _ = accumulate(gradient, batch, microbatches, lambda tree: tree)
    assert total["w"].dtype == jnp.float32
    assert float(total["w"][0]) == 512.0


def test_c04_the_global_norm_counts_each_parameter_once() -> None:
    """A split leaf of norm 3 and a replicated one of norm 4: 5, on any mesh; 6.403 would count the replicated one
    twice.
    """
    mesh = jax.make_mesh((2, 4), ("tensor", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.device_put(jnp.asarray([3.0, 0.0]), NamedSharding(mesh, PartitionSpec("tensor")))
    replicated = jax.device_put(jnp.asarray([4.0]), NamedSharding(mesh, PartitionSpec()))
    assert float(jax.jit(optax.tree_utils.tree_norm)({"split": split, "replicated": replicated})) == pytest.approx(
        5.0, rel=1e-6
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("inside", [True, False])
def test_c13_a_psum_in_the_loss_adds_no_factor(size: int, inside: bool) -> None:
    """The gradient of a replicated parameter through shard_map and psum is the one-device gradient, taken inside or
    outside.
    """
    mesh = jax.make_mesh((size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])
    x = jnp.arange(1.0, 9.0)
    w = jnp.asarray(2.0)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.square(w * x)), "data")

    data, whole = PartitionSpec("data"), PartitionSpec()
    if inside:
        gradient = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(whole, data), out_specs=whole)(w, x)
    else:
        gradient = jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=(whole, data), out_specs=whole))(w, x)
    assert float(gradient) == pytest.approx(float(2 * w * jnp.sum(x * x)))


def test_clipping_scales_the_whole_gradient_to_the_norm() -> None:
    free = train("data=1", steps=1)
    clipped = train("data=1", steps=1, objective=Objective(clip_norm=free.norms[0] / 2))
    assert clipped.norms == [pytest.approx(free.norms[0], rel=1e-6)]
    assert_trees_close(clipped.gradients, jax.tree.map(lambda g: g / 2, free.gradients))
