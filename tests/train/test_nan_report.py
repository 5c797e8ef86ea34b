"""The report names the tensor that was spoilt, on one device and on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import Training, build
from meshpar.train.nan_report import NanReport, first_not_finite
from meshpar.train.step import Objective
from meshpar.train.trainer import Diverged, fit
from tests.conformance.runs import BATCH, GPT, LLAMA, SEQ, batch_of, model_of


def training_of(mesh: str, **plan: Any) -> Training:
    made = Plan(mesh=MeshSpec.parse(mesh), precision=Policy(compute="fp32"), **plan)
    return build(
        model_of(LLAMA), optax.sgd(0.1), made, batch=BATCH, seq=SEQ, devices=jax.devices()[: made.mesh.product]
    )


def report(training: Training, path: str, index: tuple[int, ...], value: float) -> str | None:
    """The report on parameters of which one number is spoilt."""
    params = jax.tree.map(np.array, jax.device_get(training.init(0).params))
    leaf = params
    for part in path.split("/"):
        leaf = leaf[part]
    leaf[index] = value
    placed = jax.device_put(params, training.shardings.params)
    return first_not_finite(training, Objective(), placed, training.place(batch_of(0)))


@pytest.mark.parametrize("mesh", ["data=1", "data=2 fsdp=2 tensor=2"])
def test_the_first_tensor_is_named(mesh: str) -> None:
    training = training_of(mesh)
    kernel = (1, 0, 0)
    assert report(training, "blocks/mlp/up/kernel", kernel, np.nan) == "parameter blocks/mlp/up/kernel, layer 1"
    # finite parameters whose product is not: norms make the input of a matrix about 1, and fp32 ends at 3e38
    assert report(training, "blocks/mlp_norm/scale", (1, 0), 3e38) in ("layer 1: norm", "layer 1: mlp_gate")
    assert report(training, "blocks/mlp_norm/scale", (0, 0), 3e38) in ("layer 0: norm", "layer 0: mlp_gate")
    assert report(training, "blocks/mlp/up/kernel", kernel, 0.0) is None


def test_a_loss_and_a_gradient_are_named_too() -> None:
    training = training_of("data=1")
    params = training.init(0).params
    batch = training.place(batch_of(0))
    assert first_not_finite(training, Objective(z_loss=1e38), params, batch) == "loss"
    # The products of a huge norm and of tiny matrices are as before; the gradients of the matrices are huge, and a
    # large z-loss makes them infinite.
    spoilt = jax.tree.map(np.array, jax.device_get(params))
    spoilt["blocks"]["mlp_norm"]["scale"][1] *= 1e30
    for name in ("gate", "up"):
        spoilt["blocks"]["mlp"][name]["kernel"][1] *= 1e-30
    placed = jax.device_put(spoilt, training.shardings.params)
    found = first_not_finite(training, Objective(z_loss=1e12), placed, batch)
    assert found == "gradient of blocks/mlp/gate/kernel, layer 1"


def test_the_hook_ends_the_run_with_the_name_and_without_it_the_run_ends_too() -> None:
    def batches() -> Any:
        return (batch_of(number) for number in range(5))

    training = build(
        model_of(LLAMA),
        optax.sgd(1e38),
        Plan(mesh=MeshSpec(data=1), precision=Policy(compute="fp32")),
        batch=BATCH,
        seq=SEQ,
        devices=jax.devices()[:1],
    )
    hook = NanReport(training, Objective()).hook()
    with pytest.raises(Diverged, match=r"step 2: the first tensor that is not finite is: .+"):
        fit(training, training.init(0), batches(), start=0, steps=5, hooks=[hook])
    with pytest.raises(Diverged, match=r"the loss of step 2 is nan, and its update spoilt the parameters"):
        fit(training, training.init(0), batches(), start=0, steps=5)


@pytest.mark.parametrize("count", [1, 2])
def test_the_report_draws_the_masks_of_the_step(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding that is spoilt under one key alone: that of the last microbatch in the step."""
    plan = Plan(mesh=MeshSpec(data=1), precision=Policy(compute="fp32"), accumulate=count)
    model = model_of(dataclasses.replace(GPT, dropout=0.2))
    training = build(model, optax.sgd(0.1), plan, batch=BATCH, seq=SEQ, devices=jax.devices()[:1])
    params, batch, key = training.init(0).params, training.place(batch_of(0)), jax.random.key(7)
    drawn = jax.random.key_data(jax.random.split(jax.random.fold_in(key, count - 1))[0])
    embed = type(model.bind(params)).embed

    def spoilt(self: Any, batch: Any, key: Any) -> Any:
        wrong = jnp.all(jax.random.key_data(key) == drawn)
        return jnp.where(wrong, jnp.nan, embed(self, batch, key))

    monkeypatch.setattr(type(model.bind(params)), "embed", spoilt)
    found = first_not_finite(training, Objective(), params, batch, key)
    assert found == ("embedding of the tokens" if count == 1 else "microbatch 1, embedding of the tokens")
