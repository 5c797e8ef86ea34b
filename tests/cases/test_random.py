"""Dropout: differs across data ranks, agrees across tensor ranks, repeats under rematerialisation, and does not
depend on the mesh.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.attention.attend import attend
from meshpar.interfaces import Batch
from meshpar.layout.dropout import dropout
from meshpar.precision.remat import remat
from meshpar.testing.compare import assert_trees_close
from tests.conformance.runs import GPT, LLAMA, train


def test_c29_a_dropped_output_has_no_gradient_also_when_it_is_drawn_again() -> None:
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x = jax.device_put(jax.random.normal(jax.random.key(1), (8, 16)), NamedSharding(mesh, PartitionSpec("fsdp")))
    w = jax.device_put(jax.random.normal(jax.random.key(2), (16, 16)), NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    key = jax.random.key(3)

    def layer(h: jax.Array) -> jax.Array:
        return dropout(h, 0.5, key)

    found = {}
    for mode in ("none", "full"):
        layer_ = remat(layer, mode)
        found[mode] = jax.jit(jax.value_and_grad(lambda h, f=layer_: (f(h) ** 2).sum()))(x @ w)
        dropped = np.asarray(jax.jit(layer)(x @ w)) == 0
        assert 0.3 < dropped.mean() < 0.7
        np.testing.assert_array_equal(np.asarray(found[mode][1]) == 0, dropped)
    np.testing.assert_array_equal(found["none"][1], found["full"][1])


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
@pytest.mark.parametrize("kind", ["residual", "attention"])
def test_c53_parts_of_a_split_sequence_drop_differently(kind: str, axis: str) -> None:
    """One row of 64 positions on 4 devices, 16 on each: of the residual, and of the attention probabilities, which a
    value of one-hot vectors and keys of zero make visible.
    """
    seq, rate, key = 64, 0.25, jax.random.key(5)
    mesh = jax.make_mesh((4,), (axis,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def split(x: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, axis)))

    if kind == "residual":
        x = split(jnp.ones((1, seq, seq)))

        def drop(x: jax.Array) -> jax.Array:
            return dropout(x, rate, key)[0]

    else:
        x = split(jnp.eye(seq)[None, :, None])  # [batch, seq, heads, head_dim]

        def drop(x: jax.Array) -> jax.Array:
            zeros = jnp.zeros_like(x)
            out = attend(zeros, zeros, x, causal=False, dropout=rate, key=key)
            return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, PartitionSpec(None, axis)))[0, :, 0] * seq

    kept = np.asarray(jax.jit(drop)(x)) != 0
    chunks = kept.reshape(4, seq // 4, seq)
    assert len({chunk.tobytes() for chunk in chunks}) == 4
    assert len({row.tobytes() for row in kept}) == seq
    assert kept.mean() == pytest.approx(1 - rate, abs=0.03)
    gradients = {}
    for mode in ("none", "full"):
        gradients[mode] = np.asarray(jax.jit(jax.grad(lambda x, f=remat(drop, mode): (f(x) ** 2).sum() / 2))(x))
    np.testing.assert_array_equal(gradients["none"], gradients["full"])
    if kind == "residual":
        np.testing.assert_array_equal(gradients["full"][0] != 0, kept)
    else:  # sum over queries of (kept probability)^2, on the diagonal of the one-hot values
        expected = (kept / (1 - rate) ** 2).sum(axis=0)
        np.testing.assert_allclose(np.diagonal(gradients["full"][0, :, 0]), expected, rtol=1e-5)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (8, 1), (2, 4)])
def test_the_mask_is_one_array_whatever_its_split(mesh_shape: tuple[int, int]) -> None:
    """So ranks that hold different rows drop differently and ranks that hold the same rows alike."""
    count = mesh_shape[0] * mesh_shape[1]
    mesh = jax.make_mesh(
        mesh_shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:count]
    )
    ones = jax.device_put(
        jnp.ones((16, 8, 32)), NamedSharding(mesh, PartitionSpec("data", "tensor" if mesh_shape[1] > 1 else None))
    )
    mask = np.asarray(jax.jit(lambda x: dropout(x, 0.25, jax.random.key(0)))(ones))
    plain = np.asarray(dropout(jnp.ones((16, 8, 32)), 0.25, jax.random.key(0)))
    np.testing.assert_array_equal(mask, plain)
    rows = {row.tobytes() for row in mask}
    assert len(rows) == 16
    assert (mask > 0).mean() == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_training_with_dropout_equals_one_device(name: str) -> None:
    config = dataclasses.replace(GPT if name == "gpt" else LLAMA, dropout=0.2)
    one = train("data=1", config=config, steps=3)
    plain = train("data=1", config=dataclasses.replace(config, dropout=0.0), steps=3)
    assert abs(one.losses[0] - plain.losses[0]) > 1e-3
    for mesh, plan in (("data=2 tensor=2", {"sequence_parallel": True}), ("fsdp=4", {"remat": "full"})):
        many = train(mesh, config=config, steps=3, **plan)
        np.testing.assert_allclose(many.losses, one.losses, rtol=0, atol=1e-5)
        assert_trees_close(many.gradients, one.gradients)


def test_each_step_and_each_microbatch_drops_differently() -> None:
    """The same row twice, with a learning rate of 0: equal losses would be equal masks."""
    config = dataclasses.replace(GPT, dropout=0.2)
    tokens = np.arange(16, dtype=np.int32)[None]
    row = Batch(tokens=tokens, targets=tokens, weights=np.ones((1, 16), np.float32))
    both = jax.tree.map(lambda x: np.concatenate([x, x]), row)
    first, second = train("data=1", config=config, lr=0.0, batches=[row, row]).losses
    assert abs(first - second) > 1e-3
    assert abs(train("data=1", config=config, lr=0.0, batches=[both], accumulate=2).losses[0] - first) > 1e-3
