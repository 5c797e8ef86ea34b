"""Real runs that go on from a checkpoint: to the bit under the same plan, and onto other ZeRO stages and precisions."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.checkpoint.manager import Checkpoints
from meshpar.checkpoint.reshard import named_leaves
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import Training, build
from meshpar.train.state import TrainState
from tests.conformance.runs import BATCH, LLAMA, SEQ, batch_of, model_of

PLANS = {
    "zero 3, fp32": Plan(mesh=MeshSpec.parse("fsdp=4 tensor=2"), zero=3, precision=Policy(compute="bf16")),
    "zero 1, copies": Plan(
        mesh=MeshSpec.parse("data=2 fsdp=2"), zero=1, precision=Policy(compute="bf16", storage="copy")
    ),
    "one device, copies": Plan(precision=Policy(compute="bf16", storage="copy")),
}


@functools.cache
def training_of(name: str) -> Training:
    plan = PLANS[name]
    return build(
        model_of(LLAMA), optax.adamw(1e-2), plan, batch=BATCH, seq=SEQ, devices=jax.devices()[: plan.mesh.product]
    )


def steps(training: Training, state: TrainState, numbers: range) -> tuple[TrainState, list[float]]:
    losses = []
    for number in numbers:
        state, metrics = training.step(state, training.place(batch_of(number)))
        losses.append(float(metrics["loss"]))
    return state, losses


def bits(state: TrainState) -> dict[str, bytes]:
    found = {}
    for path, leaf in named_leaves(state).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[path] = np.array(leaf).tobytes()
    return found


def fp32_weights(state: TrainState) -> dict[str, bytes]:
    return bits(state.params if state.master is None else state.master)


def test_a_run_that_was_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    training = training_of("zero 3, fp32")
    checkpoints = Checkpoints(tmp_path)
    state, _ = steps(training, training.init(1), range(2))
    checkpoints.save(2, state)
    through, losses = steps(training, state, range(2, 4))
    resumed, again = steps(training, checkpoints.restore(training.abstract_state()), range(2, 4))
    assert again == losses
    assert bits(resumed) == bits(through)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("zero 3, fp32", "zero 1, copies"),
        ("zero 1, copies", "zero 3, fp32"),
        ("zero 1, copies", "one device, copies"),
    ],
)
def test_another_plan_goes_on_with_the_same_fp32_weights_and_moments(written: str, read: str, tmp_path: Path) -> None:
    before = training_of(written)
    state, _ = steps(before, before.init(1), range(1))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    after = training_of(read)
    told: list[str] = []
    restored = checkpoints.restore(after.abstract_state(), log=told.append)
    assert fp32_weights(restored) == fp32_weights(state)
    assert bits(restored.opt_state) == bits(state.opt_state)
    assert (int(restored.step), bits(restored.key)) == (int(state.step), bits(state.key))
    for weight, copy in zip(
        jax.tree.leaves(restored.params if restored.master is None else restored.master),
        jax.tree.leaves(restored.params),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(weight).astype(copy.dtype), copy)
    assert "resharded" in told[0]
    _, losses = steps(after, restored, range(1, 2))  # fits the compiled step
    _, expected = steps(before, state, range(1, 2))
    np.testing.assert_allclose(losses, expected, rtol=2e-2)  # bf16 on another mesh
