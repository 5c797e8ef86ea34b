"""Adapters train alike on every plan, and as the chain rule says: from the gradient of `W + scale A B` of the plain
model, `dA = scale dW B^T` and `dB = scale A^T dW`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from meshpar.interfaces import PyTree
from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.testing.compare import assert_losses_close, assert_trees_close
from meshpar.train.build import Training, build
from meshpar.train.lora import Lora, adapt, merge_adapters
from meshpar.train.step import Objective
from tests.conformance.runs import BATCH, FP32, LLAMA, SEQ, batch_of, model_of, recording_sgd

LORA = Lora(rank=4, alpha=8.0)
STEPS = 5
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "data tensor": ("data=2 tensor=2", {}),
    "fsdp zero 3": ("fsdp=4", {}),
    "hsdp tensor sp accumulate": (
        "data=2 fsdp=2 tensor=2",
        {"sequence_parallel": True, "accumulate": 2, "remat": "full"},
    ),
    "zero 1 unrolled": ("data=4", {"zero": 1, "unroll": 0}),
    "zero 2 accumulate": ("fsdp=2", {"zero": 2, "accumulate": 2}),
    "reduce fp32 zero 3": ("fsdp=4", {"precision": Policy(compute="fp32", reduce="fp32")}),
}
SLOW = ("zero 1 unrolled", "zero 2 accumulate", "reduce fp32 zero 3")


@functools.cache
def adapted() -> Model:
    return adapt(model_of(LLAMA), LORA)


@functools.cache
def weights() -> PyTree:
    """Those of a model whose adapters are not at their start: with B of zero, A would have no gradient."""
    drawn = jax.device_get(adapted().init(jax.random.key(1)))
    rng = np.random.default_rng(0)

    def spread(path: Any, leaf: np.ndarray) -> np.ndarray:
        is_b = path[-1].key == "lora_b"
        return rng.normal(0, 0.2, leaf.shape).astype(np.float32) if is_b else leaf

    return jax.tree_util.tree_map_with_path(spread, drawn)


def training_of(model: Model, mesh: str, **plan: Any) -> Training:
    made = Plan(**{"mesh": MeshSpec.parse(mesh), "precision": FP32, **plan})
    devices = jax.devices()[: made.mesh.product]
    objective = Objective(clip_norm=None)
    return build(model, recording_sgd(0.3), made, batch=BATCH, seq=SEQ, objective=objective, devices=devices)


@dataclasses.dataclass(frozen=True)
class Run:
    losses: list[float]
    gradients: PyTree  # of the first step
    params: PyTree  # after the last


def run(model: Model, values: PyTree, mesh: str, steps: int = STEPS, **plan: Any) -> Run:
    training = training_of(model, mesh, **plan)
    state = training.start(jax.device_put(values, training.shardings.params))
    losses, gradients = [], None
    for number in range(steps):
        state, metrics = training.step(state, training.place(batch_of(number)))
        losses.append(float(metrics["loss"]))
        gradients = jax.device_get(state.opt_state) if gradients is None else gradients
    return Run(losses, gradients, jax.device_get(state.params))


@functools.cache
def reference() -> Run:
    return run(adapted(), weights(), "data=1")


def test_values_and_gradients_are_those_of_the_merged_model_and_the_chain_rule() -> None:
    model, values = adapted(), weights()
    base, adapters = model.untrained(values), model.trained(values)
    plain = run(model_of(LLAMA), merge_adapters(jax.device_put(base), adapters, LORA), "data=1", steps=1)
    assert_losses_close(reference().losses[:1], plain.losses)

    def chain(d_kernel: np.ndarray, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
        layers, rank = a.shape[0], LORA.rank
        flat_a, flat_b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
        d = LORA.scale * d_kernel.reshape(layers, flat_a.shape[1], flat_b.shape[2])
        d_a, d_b = d @ flat_b.swapaxes(1, 2), flat_a.swapaxes(1, 2) @ d
        return {"lora_a": d_a.reshape(a.shape), "lora_b": d_b.reshape(b.shape)}

    expected = {
        part: {
            name: chain(plain.gradients["blocks"][part][name]["kernel"], of["lora_a"], of["lora_b"])
            for name, of in adapters["blocks"][part].items()
        }
        for part in ("attention", "mlp")
    }
    assert_trees_close(reference().gradients, {"blocks": expected})


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PLANS])
def test_adapters_train_like_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    found = run(adapted(), weights(), mesh, **plan)
    assert_losses_close(found.losses, reference().losses)
    assert_trees_close(found.gradients, reference().gradients)
    frozen = adapted().untrained(found.params)
    jax.tree.map(np.testing.assert_array_equal, frozen, adapted().untrained(weights()))


def test_the_first_step_is_the_model_itself_and_later_ones_learn() -> None:
    fresh = jax.device_get(adapted().init(jax.random.key(1)))
    plain = run(model_of(LLAMA), adapted().untrained(fresh), "data=1", steps=1)
    found = run(adapted(), fresh, "data=1")
    assert found.losses[0] == pytest.approx(plain.losses[0], abs=1e-6)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), found.params, fresh)
    assert min(jax.tree.leaves(adapted().trained(moved))) > 0
