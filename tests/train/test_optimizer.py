"""The presets beside AdamW: the same on every mesh, split as the plan says, and Muon's updates orthogonal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import Training, build
from meshpar.train.optimizer import OptimizerConfig, matrices
from tests.conformance.runs import BATCH, GPT, LLAMA, SEQ, batch_of, model_of

PRESETS = ("adafactor", "lion", "muon")


def training_of(name: Any, mesh: str, **plan: Any) -> Training:
    made = Plan(mesh=MeshSpec.parse(mesh), precision=Policy(compute="fp32"), **plan)
    model = model_of(LLAMA)
    tx = OptimizerConfig(name=name, lr=1e-3, warmup=0, schedule="constant", eps=1e-4).make(10, model)
    return build(model, tx, made, batch=BATCH, seq=SEQ, devices=jax.devices()[: made.mesh.product])


def losses(training: Training) -> list[float]:
    state, found = training.init(0), []
    for number in range(4):
        state, metrics = training.step(state, training.place(batch_of(number)))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_on_a_mesh_as_on_one_device(name: str) -> None:
    expected = losses(training_of(name, "data=1"))
    found = losses(training_of(name, "data=2 fsdp=2 tensor=2", zero=1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert abs(expected[-1] - losses(training_of("sgd", "data=1"))[-1]) > 1e-3  # equal, and not because nothing moves


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_moments_are_split_as_the_optimizer_layout_says(name: str) -> None:
    training = training_of(name, "fsdp=4")
    state = training.init(0)
    kernels = [
        leaf
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.shape == state.params["blocks"]["mlp"]["up"]["kernel"].shape
    ]
    assert len(kernels) >= 2  # gate and up
    assert {leaf.addressable_shards[0].data.size * 4 for leaf in kernels} == {kernels[0].size}


def test_muon_orthogonalises_each_matrix_of_each_layer() -> None:
    """An update of the scale 0.2 * sqrt(longer side) times a matrix whose singular values lie around 1 (Jordan 2024:
    0.7 to 1.2 for the five steps of the quintic).
    """
    model = model_of(LLAMA)
    tx = OptimizerConfig(name="muon", lr=1.0, warmup=0, schedule="constant", weight_decay=0.0).make(10, model)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    weights = jax.tree.map(lambda shape: jax.random.normal(next(keys), shape.shape), model.shapes)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(tx.update)(weights, tx.init(weights), weights)
    for name, axes in (("q", 3), ("out", 3)):
        kernel = np.asarray(updates["blocks"]["attention"][name]["kernel"])
        assert kernel.ndim == axes + 1
        for layer in kernel:
            matrix = layer.reshape(LLAMA.embed, -1) if name == "q" else layer.reshape(-1, LLAMA.embed)
            values = np.linalg.svd(matrix / (0.2 * np.sqrt(max(matrix.shape))), compute_uv=False)
            assert np.quantile(values, 0.1) > 0.6  # the smallest of a square matrix may be anything
            assert values.max() < 1.3
    table = updates["embedding"]["table"]  # Adam's first update, with Nesterov's look ahead: every element alike
    assert float(jnp.abs(table).max()) == pytest.approx(float(jnp.abs(table).min()), rel=1e-3)


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_muon_takes_the_matrices_of_layers_alone(config: Any) -> None:
    found = matrices(model_of(config))
    kernels = {"q", "k", "v", "out"} & set(found["blocks"]["attention"])
    assert len(kernels) == 4
    assert found["blocks"]["attention"]["q"]["kernel"] == ((1,), (2, 3))  # of layers embed heads head_dim
    assert found["blocks"]["attention"]["out"]["kernel"] == ((3,), (1, 2))
    others = {name: leaf for name, leaf in found.items() if name != "blocks"}
    assert jax.tree.leaves(others) == []
    assert found["blocks"]["attention_norm"]["scale"] is None


def test_muon_without_a_model_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.name=muon needs the model"):
        OptimizerConfig(name="muon").make(10)
