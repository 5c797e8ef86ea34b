"""Weight decay by name, fp32 masters, schedules that count updates, bf16 that does not crash."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.interfaces import Batch
from meshpar.layout.resolve import map_leaves
from meshpar.mesh.spec import MeshSpec
from meshpar.module import abstract, is_norm_or_bias
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import build
from meshpar.train.optimizer import Name, OptimizerConfig, Schedule
from meshpar.train.step import Objective
from models.gpt import GPTConfig
from tests.cases.stub import StubConfig
from tests.conformance.runs import GPT, LLAMA, batch_of, model_of, train


@pytest.mark.parametrize("name", [name for name in get_args(Name) if name != "sgd"])
def test_c09_decay_skips_norms_and_biases_though_stacking_makes_them_matrices(name: Any) -> None:
    model = model_of(GPT)
    weights = jax.tree.map(lambda w: w + 0.5, jax.jit(model.init)(jax.random.key(0)))
    tx = OptimizerConfig(name=name, lr=1.0, warmup=0, schedule="constant", weight_decay=0.1).make(1, model)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, weights), tx.init(weights), weights)
    after = optax.apply_updates(weights, updates)

    def check(path: str, old: jax.Array, axes: tuple[str | None, ...]) -> None:
        new = old if path.endswith(("/scale", "/bias")) else old * 0.9  # spelled out: not by the code under test
        found = after
        for part in path.split("/"):
            found = found[part]
        np.testing.assert_allclose(found, new, rtol=1e-6, err_msg=path)

    map_leaves(check, weights, model.axes)
    kept = {name for name in ("attention_norm", "mlp_norm") if name in weights["blocks"]}
    assert kept == {"attention_norm", "mlp_norm"}
    assert weights["blocks"]["attention_norm"]["scale"].ndim == 2


@pytest.mark.parametrize("storage", ["cast", "copy"])
def test_c51_small_updates_reach_fp32_masters_under_bf16(storage: str) -> None:
    """Weight 1, a gradient that keeps its sign, Adam with lr 1e-4, 100 steps: the master moves by about 0.01; bf16
    alone would stay at 1.
    """
    config = StubConfig(rows=((1.0, 0.0),))
    plan = Plan(mesh=MeshSpec(data=1), precision=Policy(compute="bf16", storage=storage))
    training = build(
        model_of(config),
        optax.adam(1e-4),
        plan,
        batch=1,
        seq=1,
        objective=Objective(clip_norm=None),
        devices=jax.devices()[:1],
    )
    state = training.init()
    batch = training.place(
        Batch(tokens=np.zeros((1, 1), np.int32), targets=np.ones((1, 1), np.int32), weights=np.ones((1, 1), np.float32))
    )
    for _ in range(100):
        state, _ = training.step(state, batch)
    master = state.params if state.master is None else state.master
    assert master["table"].dtype == jnp.float32
    assert float(master["table"][0, 0]) == pytest.approx(0.99, abs=5e-4)
    copy = float(state.params["table"].astype(jnp.float32)[0, 0])
    assert copy == pytest.approx(0.99, abs=4e-3)
    assert copy != 1.0


@pytest.mark.parametrize(("mesh", "accumulate"), [("data=1", 4), ("data=2", 4)])
def test_c52_the_schedule_counts_updates_not_microbatches(mesh: str, accumulate: int) -> None:
    """Accumulation 4, warmup 10 of 40: the update of step 11 is made with the peak rate."""
    optimizer = OptimizerConfig(name="sgd", lr=0.5, warmup=10)
    assert float(optimizer.learning_rate(40)(10)) == pytest.approx(0.5)
    assert float(optimizer.learning_rate(40)(9)) == pytest.approx(0.45)
    plan = Plan(mesh=MeshSpec.parse(mesh), precision=Policy(compute="fp32"), accumulate=accumulate)
    config = StubConfig(rows=((1.0, 0.0),))
    training = build(
        model_of(config),
        optimizer.make(40),
        plan,
        batch=8,
        seq=1,
        objective=Objective(clip_norm=None),
        devices=jax.devices()[: plan.mesh.product],
    )
    state = training.init()
    batch = training.place(
        Batch(tokens=np.zeros((8, 1), np.int32), targets=np.ones((8, 1), np.int32), weights=np.ones((8, 1), np.float32))
    )
    table = np.array([1.0, 0.0])
    for step in range(11):
        probability = np.exp(table) / np.exp(table).sum()
        before, table = table, table - float(optimizer.learning_rate(40)(step)) * (probability - np.array([0.0, 1.0]))
        state, _ = training.step(state, batch)
        np.testing.assert_allclose(np.asarray(state.params["table"])[0], table, rtol=1e-4, err_msg=f"update {step + 1}")
    assert not np.allclose(before, table)


def test_the_cosine_ends_where_the_run_ends() -> None:
    rate = OptimizerConfig(lr=1.0, warmup=10, final_lr=0.1).learning_rate(40)
    assert float(rate(0)) == 0.0
    assert float(rate(25)) == pytest.approx(0.55)
    assert float(rate(40)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({"schedule": "linear"}, {5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1}),
        ({"schedule": "wsd"}, {5: 0.5, 10: 1.0, 88: 1.0, 99: 0.55, 110: 0.1}),  # the last 22 of 110
        ({"schedule": "wsd", "decay": 1.0}, {10: 1.0, 60: 0.55, 110: 0.1}),  # no further back than the warm-up
        ({"schedule": "constant"}, {5: 0.5, 10: 1.0, 110: 1.0}),
        ({"schedule": "linear", "warmup": 0}, {0: 1.0, 55: 0.55, 110: 0.1}),
    ],
)
def test_a_schedule_has_the_rates_that_its_name_says(values: dict[str, Any], rates: dict[int, float]) -> None:
    schedule = OptimizerConfig(**{"lr": 1.0, "warmup": 10, "final_lr": 0.1, **values}).learning_rate(110)
    assert {step: float(schedule(step)) for step in rates} == pytest.approx(rates, rel=1e-5)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_the_rates_of_a_run_are_those_of_its_schedule(schedule: Any) -> None:
    config = OptimizerConfig(lr=1.0, warmup=10, schedule=schedule)
    rates = config.rates(40)
    assert isinstance(rates, np.ndarray)
    np.testing.assert_allclose(rates, [config.learning_rate(40)(step) for step in range(40)], rtol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"lr": 0.0},
        {"warmup": -1},
        {"decay": 0.0},
        {"decay": 1.1},
        {"final_lr": -0.1},
        {"final_lr": 1.1},
        {"b1": -0.1},
        {"b1": 1.0},
        {"b2": 1.0},
        {"b2": float("nan")},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"momentum": -0.1},
        {"momentum": 1.0},
    ],
)
def test_an_optimizer_out_of_range_is_one_sentence(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=rf"^optimizer\.{name}={value} must be .*; "):
        OptimizerConfig(**values)


@pytest.mark.parametrize(("mesh", "storage"), [("data=2 fsdp=2 tensor=2", "cast"), ("fsdp=4", "copy")])
def test_c43_bf16_on_a_mesh_reports_fp32_losses_and_norms(mesh: str, storage: str) -> None:
    """bf16 follows fp32 within its rounding (2^-8 of a loss near 4.5), and nothing crashes the CPU compiler."""
    run = train(mesh, steps=5, precision=Policy(compute="bf16", storage=storage), objective=Objective())
    exact = train("data=1", steps=5, objective=Objective())
    training = run.training
    _, metrics = training.step(run.state, training.place(batch_of(9)))
    assert {metrics["loss"].dtype, metrics["grad_norm"].dtype} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(run.losses, exact.losses, rtol=2**-7)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bf16_copies_with_fp32_masters_train_the_same_at_every_zero_stage(zero: int) -> None:
    policy = Policy(compute="bf16", storage="copy")
    one = train("data=1", steps=3, precision=policy)
    many = train("fsdp=4", steps=3, precision=policy, zero=zero)
    np.testing.assert_allclose(many.losses, one.losses, rtol=2**-8)
    for param, master in zip(jax.tree.leaves(many.state.params), jax.tree.leaves(many.state.master), strict=True):
        assert (param.dtype, master.dtype) == (jnp.bfloat16, jnp.float32)
        assert bool((param == master.astype(jnp.bfloat16)).all())


def test_gpt_and_llama_have_every_leaf_named_for_decay() -> None:
    """The rule by name finds exactly the one-dimensional leaves of an unstacked block."""
    for config in (GPT, dataclasses.replace(LLAMA, attention_bias=True, mlp_bias=True, qk_norm=True)):
        model = abstract(config.build, config)

        def check(path: str, leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> None:
            dims = [axis for axis in axes if axis != "layers"]
            assert is_norm_or_bias(path) == (len(dims) == 1 or (path.endswith("bias") and "head_dim" in dims)), path

        map_leaves(check, model.shapes, model.axes)
    assert isinstance(GPT, GPTConfig)
