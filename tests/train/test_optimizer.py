"""The presets beside AdamW: the same on every mesh, split as the plan says, and Muon's updates orthogonal."""

from __future__ import annotations

import functools
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


@functools.cache
def losses_of_sgd() -> list[float]:
    return losses(training_of("sgd", "data=1"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "lion")) for n in PRESETS])
def test_a_preset_trains_on_a_mesh_as_on_one_device(name: str) -> None:
    expected = losses(training_of(name, "data=1"))
    found = losses(training_of(name, "data=2 fsdp=2 tensor=2", zero=1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert abs(expected[-1] - losses_of_sgd()[-1]) > 1e-3  # equal, and not because nothing moves


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


def updates_of(config: OptimizerConfig, weights: Any, gradients: list[Any]) -> list[Any]:
    """What the optimizer adds to the weights in each step, the weights staying as they are."""
    tx = config.make(100, model_of(LLAMA))
    state, found = tx.init(weights), []
    with jax.numpy_dtype_promotion("standard"):
        for gradient in gradients:
            updates, state = jax.jit(tx.update)(gradient, state, weights)
            found.append(jax.tree.map(np.asarray, updates))
    return found


def drawn(*shape: int, count: int = 3) -> list[np.ndarray]:
    return [np.random.default_rng(number).normal(size=shape).astype(np.float32) for number in range(count)]


def test_lion_is_the_paper_s() -> None:
    """Chen et al. 2023, algorithm 2: the sign of an interpolation, beside decoupled decay; then the momentum."""
    config = OptimizerConfig(name="lion", lr=0.1, warmup=0, schedule="constant", b1=0.9, b2=0.99, weight_decay=0.5)
    weight, gradients = drawn(6, 4, count=1)[0], drawn(6, 4)
    found = updates_of(config, {"kernel": weight}, [{"kernel": gradient} for gradient in gradients])
    momentum = np.zeros_like(weight)
    for update, gradient in zip(found, gradients, strict=True):
        direction = np.sign(0.9 * momentum + 0.1 * gradient)
        momentum = 0.99 * momentum + 0.01 * gradient
        np.testing.assert_allclose(update["kernel"], -0.1 * (direction + 0.5 * weight), rtol=1e-5, atol=1e-7)


def test_adafactor_is_the_paper_s_without_its_own_rates() -> None:
    """Shazeer and Stern 2018, algorithm 4: row and column means of squares, decay 1 - t^-0.8, clipping at 1."""
    config = OptimizerConfig(name="adafactor", lr=0.1, warmup=0, schedule="constant", weight_decay=0.0)
    weight, gradients = drawn(130, 140, count=1)[0], [10.0**t * g for t, g in enumerate(drawn(130, 140))]
    found = updates_of(config, {"kernel": weight}, [{"kernel": gradient} for gradient in gradients])
    rows, columns, clipped = np.zeros(130), np.zeros(140), []
    for t, (update, gradient) in enumerate(zip(found, gradients, strict=True)):
        decay = 1 - (t + 1.0) ** -0.8
        squares = gradient.astype(np.float64) ** 2 + 1e-30
        rows = decay * rows + (1 - decay) * squares.mean(axis=1)
        columns = decay * columns + (1 - decay) * squares.mean(axis=0)
        expected = gradient / np.sqrt(np.outer(rows, columns) / rows.mean())
        rms = np.sqrt(np.mean(expected**2))
        clipped.append(rms > 1.01)
        np.testing.assert_allclose(update["kernel"], -0.1 * expected / max(1.0, rms), rtol=1e-4, atol=1e-6)
    assert len(set(clipped)) == 2  # both happen


def test_muon_s_momentum_looks_ahead() -> None:
    """Jordan 2024: Nesterov momentum 0.95, which the orthogonalisation of a matrix of rank one leaves visible."""
    config = OptimizerConfig(name="muon", lr=1.0, warmup=0, schedule="constant", weight_decay=0.0)
    weights = jax.tree.map(lambda shape: jnp.zeros(shape.shape), model_of(LLAMA).shapes)
    first, second = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    leaf = ("blocks", "mlp", "up", "kernel")

    def with_row(tree: Any, row: int) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x.at[0, row, 0].set(1.0) if tuple(key.key for key in path) == leaf else x, tree
        )

    found = updates_of(config, weights, [with_row(first, 0), with_row(second, 1)])[1]["blocks"]["mlp"]["up"]["kernel"]
    # momentum after two steps: 0.95 e0 + e1 (times 0.05); looking ahead: 0.95 (0.95 e0 + e1) + e1, bias corrected alike
    ratio = found[0, 0, 0] / found[0, 1, 0]
    corrected = 0.95 * (0.95 * 0.05) / (1 - 0.95**3)
    ahead = 0.95 * 0.05 / (1 - 0.95**3) + 0.05 / (1 - 0.95**2)
    assert ratio == pytest.approx(corrected / ahead, rel=1e-3)


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
