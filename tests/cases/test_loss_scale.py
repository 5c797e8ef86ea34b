"""Loss scaling: unscaled before it changes and before clipping, and a skipped step leaves nothing behind.

The model is a table of logits (see stub.py). At (-100, 0) the gradient of the first logit is exactly -1 and that of the
second 1, and it stays so while SGD with rate 1 moves them; a logit of 7e4 is infinite in fp16.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from meshpar.interfaces import Batch, PyTree
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.loss_scale import LossScaling
from meshpar.precision.policy import Policy
from meshpar.testing.compare import assert_trees_close
from meshpar.train.build import Training, build
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.step import Objective
from meshpar.train.trainer import Diverged, Hook, fit
from tests.cases.stub import StubConfig
from tests.conformance.runs import model_of, train

STEEP, INFINITE = (-100.0, 0.0), (7e4, 0.0)


def training_of(
    *rows: tuple[float, ...],
    tx: optax.GradientTransformation,
    mesh: str = "data=1",
    batch: int = 1,
    clip_norm: float | None = None,
    storage: Any = "cast",
    zero: int | None = None,
    **scaling: Any,
) -> Training:
    policy = Policy(compute="fp16", storage=storage, loss_scale=LossScaling(**scaling))
    plan = Plan(mesh=MeshSpec.parse(mesh), precision=policy, zero=zero)
    return build(
        model_of(StubConfig(rows=rows)),
        tx,
        plan,
        batch=batch,
        seq=1,
        objective=Objective(clip_norm=clip_norm),
        devices=jax.devices()[: plan.mesh.product],
    )


def batch_of(*tokens: int, target: int = 0) -> Batch:
    shape = (len(tokens), 1)
    return Batch(
        tokens=np.array(tokens, np.int32).reshape(shape),
        targets=np.full(shape, target, np.int32),
        weights=np.ones(shape, np.float32),
    )


def bits(tree: PyTree) -> list[Any]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def test_c05_gradients_are_divided_by_the_scale_they_were_multiplied_with() -> None:
    training = training_of(STEEP, tx=optax.sgd(1.0), initial=4.0, period=1)
    state, values, scales = training.init(), [], []
    for _ in range(3):
        state, metrics = training.step(state, training.place(batch_of(0)))
        values.append(float(state.params["table"][0, 0]))
        scales.append(float(metrics["loss_scale"]))
    assert values == [-99.0, -98.0, -97.0]
    assert scales == [4.0, 8.0, 16.0]


@pytest.mark.parametrize("storage", ["cast", "copy", "pure"])
def test_c06_a_skipped_step_leaves_all_bits_of_the_state_and_the_data_moves_on(storage: Any) -> None:
    optimizer = OptimizerConfig(lr=0.1, warmup=4, weight_decay=0.1)
    states = {}
    for name, tokens in (("skipped", [0, 1, 0]), ("plain", [0, 0])):
        training = training_of(STEEP, INFINITE, tx=optimizer.make(10), storage=storage, initial=4.0, period=1)
        state = training.init()
        skipped, updates = [], []
        for token in tokens:
            state, metrics = training.step(state, training.place(batch_of(token)))
            skipped.append(float(metrics["skipped"]))
            updates.append(int(metrics["updates"]))
        states[name] = state
        assert skipped == [0.0, 1.0, 0.0][: len(tokens)] or name == "plain"
        assert updates == ([1, 1, 2] if name == "skipped" else [1, 2])
    one, other = states["skipped"], states["plain"]
    for part in ("params", "master", "opt_state", "updates"):
        assert bits(getattr(one, part)) == bits(getattr(other, part)), part
    assert (int(one.step), int(other.step)) == (3, 2)
    moved = np.asarray(one.params["table"][0, 0], np.float32)
    assert moved != np.float32(-100.0)  # equal, and not because nothing happens


def test_c25_clipping_sees_the_true_norm() -> None:
    true_norm = 0.5
    share = 1 - true_norm / np.sqrt(2)  # probability of the target: the gradient is (share - 1, 1 - share)
    logit = float(np.float16(np.log(share / (1 - share))))
    training = training_of((logit, 0.0), tx=optax.sgd(1.0), clip_norm=1.0, kind="static", initial=1024.0)
    before = np.array([logit, 0.0])
    state, metrics = training.step(training.init(), training.place(batch_of(0)))
    moved = np.linalg.norm(np.asarray(state.params["table"][0]) - before)
    assert float(metrics["grad_norm"]) == pytest.approx(true_norm, rel=1e-3)
    assert moved == pytest.approx(true_norm, rel=1e-3)


@pytest.mark.parametrize(
    ("mesh", "zero"), [("data=4", 0), ("fsdp=4", 2), ("fsdp=4", 3), ("tensor=4", 0), ("data=2 fsdp=2 tensor=2", 1)]
)
def test_c26_an_overflow_on_one_device_skips_on_all_and_halves_one_scale(mesh: str, zero: int) -> None:
    """2^17 times the gradients of 4 rows is too much for the logits of the target and of the largest one, which are on
    one tensor shard each, in the last row alone, which one rank of the batch holds.
    """
    rows = ((0.0, -100.0, -100.0, -100.0),) * 4
    batch = batch_of(0, 1, 2, 3)
    batch.targets[:] = [[0], [0], [0], [1]]

    def run(mesh: str, zero: int) -> Any:
        training = training_of(*rows, tx=optax.sgd(1.0, momentum=0.9), mesh=mesh, zero=zero, batch=4, initial=2.0**18)
        state = training.init()
        first = bits((state.params, state.opt_state))
        state, metrics = training.step(state, training.place(batch))
        assert float(metrics["skipped"]) == 1.0
        assert bits((state.params, state.opt_state)) == first
        assert state.scale is not None
        assert {float(shard.data) for shard in state.scale.scale.addressable_shards} == {2.0**17}
        state, metrics = training.step(state, training.place(batch))
        assert float(metrics["skipped"]) == 0.0
        assert bits((state.params, state.opt_state)) != first
        return state

    many, one = run(mesh, zero), run("data=1", 0)
    assert_trees_close(jax.device_get(many.params), jax.device_get(one.params))
    assert (int(many.step), int(many.updates), float(many.scale.scale)) == (2, 1, 2.0**17)


def test_c49_the_schedule_does_not_move_while_the_scale_is_searched() -> None:
    """2^20 falls to 2^15 in five skipped steps; the first update is made with the rate of index 0."""
    optimizer = OptimizerConfig(name="sgd", lr=1.0, warmup=10)
    training = training_of(STEEP, tx=optimizer.make(40), initial=2.0**20)
    state, values, skipped = training.init(), [-100.0], []
    for _ in range(8):
        state, metrics = training.step(state, training.place(batch_of(0)))
        values.append(float(state.params["table"][0, 0]))
        skipped.append(bool(metrics["skipped"]))
    assert skipped == [True] * 5 + [False] * 3
    assert np.diff(values) == pytest.approx([0.0] * 5 + [0.0, 0.1, 0.2], abs=1e-5)
    assert (int(state.step), int(state.updates)) == (8, 3)


def test_c50_a_bad_update_is_never_accepted_and_the_streak_ends_with_a_finite_step() -> None:
    training = training_of(STEEP, INFINITE, tx=optax.adamw(0.1), initial=4.0, max_skips=2)
    state = training.init()
    first, streaks = bits(state.params), []
    for token in (1, 1, 1, 1, 1, 0, 0):
        state, metrics = training.step(state, training.place(batch_of(token)))
        streaks.append(int(metrics["skipped_in_a_row"]))
        assert (bits(state.params) == first) == (token == 1)
    assert streaks == [1, 2, 3, 4, 5, 0, 0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params)))


def test_a_run_ends_with_a_sentence_after_so_many_skips_in_a_row() -> None:
    training = training_of(STEEP, INFINITE, tx=optax.sgd(1.0), initial=4.0, max_skips=2)
    seen: list[int] = []
    hook = Hook(on_metrics=lambda step, metrics, seconds: seen.append(step))
    batches = iter([batch_of(token) for token in (1, 0, 1, 1, 0, 0)])
    with pytest.raises(Diverged, match=r"2 steps in a row up to step 4 are not finite, at last with loss scale 1"):
        fit(training, training.init(), batches, start=0, steps=6, hooks=[hook])
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(("mesh", "plan"), [("data=1", {"accumulate": 2}), ("fsdp=4", {"loss_chunk": 8})])
def test_a_power_of_two_changes_no_bit_in_fp32(mesh: str, plan: dict[str, Any]) -> None:
    scaled = Policy(compute="fp32", loss_scale=LossScaling(kind="dynamic", initial=2.0**10, period=2))
    one, other = (train(mesh, steps=3, precision=policy, **plan) for policy in (Policy(compute="fp32"), scaled))
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert bits(one.params) == bits(other.params)
