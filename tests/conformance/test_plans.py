"""Every plan trains like one device: 20 losses, the gradient norms and each raw gradient leaf, in fp32 with SGD."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from meshpar.precision.policy import Policy
from meshpar.testing.compare import assert_losses_close, assert_trees_close
from meshpar.train.step import Objective
from tests.conformance.runs import GEMMA, GPT, LLAMA, Run, batch_of, train

REDUCE = Policy(compute="fp32", reduce="fp32")

# name -> (mesh, fields of the plan)
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data=8", {}),
    "data zero 1": ("data=8", {"zero": 1}),
    "data zero 3": ("data=8", {"zero": 3}),
    "fsdp zero 1": ("fsdp=8", {"zero": 1}),
    "fsdp zero 2": ("fsdp=8", {"zero": 2}),
    "fsdp zero 3": ("fsdp=8", {"zero": 3}),
    "hsdp": ("data=2 fsdp=4", {}),
    "zero 3 over data and fsdp": ("data=2 fsdp=4", {"zero": 3, "zero_axes": ("data", "fsdp")}),
    "zero 1 over data and fsdp": ("data=2 fsdp=4", {"zero": 1}),
    "data tensor": ("data=2 tensor=4", {}),
    "data tensor sp": ("data=2 tensor=4", {"sequence_parallel": True}),
    "data tensor zero 2": ("data=2 tensor=4", {"zero": 2}),
    "fsdp tensor": ("fsdp=2 tensor=4", {}),
    "fsdp tensor sp remat": ("fsdp=2 tensor=4", {"sequence_parallel": True, "remat": "full"}),
    "data fsdp tensor": ("data=2 fsdp=2 tensor=2", {}),
    "data fsdp tensor sp accumulate": ("data=2 fsdp=2 tensor=2", {"sequence_parallel": True, "accumulate": 2}),
    "accumulate": ("data=1", {"accumulate": 4}),
    "accumulate zero 3": ("fsdp=2", {"accumulate": 4}),
    "accumulate zero 2": ("fsdp=2", {"accumulate": 4, "zero": 2}),
    "accumulate data": ("data=4", {"accumulate": 2}),
    "accumulate zero 1 tensor": ("data=2 tensor=2", {"accumulate": 2, "zero": 1}),
    "accumulate hsdp": ("data=2 fsdp=2 tensor=2", {"accumulate": 2}),
    "accumulate own rules": (
        "data=2 fsdp=2",
        {"accumulate": 2, "zero": 0, "rules": (("batch", ("data",)), ("mlp", ("fsdp",)))},
    ),
    "reduce fp32 data": ("data=8", {"precision": REDUCE}),
    "reduce fp32 zero 1": ("data=8", {"precision": REDUCE, "zero": 1}),
    "reduce fp32 zero 2 accumulate": ("fsdp=4", {"precision": REDUCE, "zero": 2, "accumulate": 2}),
    "reduce fp32 zero 3": ("fsdp=8", {"precision": REDUCE}),
    "reduce fp32 hsdp accumulate": ("data=2 fsdp=2", {"precision": REDUCE, "accumulate": 2, "loss_chunk": 8}),
    "reduce fp32 zero 3 over data and fsdp": (
        "data=2 fsdp=4",
        {"precision": REDUCE, "zero": 3, "zero_axes": ("data", "fsdp")},
    ),
    "reduce fp32 hsdp tensor sp": ("data=2 fsdp=2 tensor=2", {"precision": REDUCE, "sequence_parallel": True}),
    "unrolled": ("data=1", {"unroll": 0}),
    "unrolled zero 1 tensor": ("fsdp=2 tensor=2", {"unroll": 0, "zero": 1}),
    "remat full": ("data=1", {"remat": "full"}),
    "remat selective": ("data=1", {"remat": "selective"}),
    "remat selective unrolled fsdp": ("fsdp=2", {"remat": "selective", "unroll": 0}),
    "loss in pieces": ("data=2 tensor=2", {"loss_chunk": 8}),
    "loss in pieces sp": ("data=2 tensor=2", {"loss_chunk": 8, "sequence_parallel": True}),
    # A tensor-like split of the MLP over fsdp, whose rows then are not split: two rules of the built-in plan replaced.
    "own rules": ("data=2 fsdp=2", {"zero": 0, "rules": (("batch", ("data",)), ("mlp", ("fsdp",)))}),
    "own rule keeps vocab whole": ("data=2 tensor=2", {"rules": (("vocab", ()),)}),
}


@functools.cache
def reference(packed: bool = False, config: Any = LLAMA, objective: Objective = Objective(clip_norm=None)) -> Run:
    """One device, one microbatch, the layer loop, nothing rematerialised."""
    return train("data=1", packed=packed, config=config, objective=objective)


def assert_same_training(run: Run, expected: Run) -> None:
    assert_losses_close(run.losses, expected.losses)
    np.testing.assert_allclose(run.norms, expected.norms, rtol=1e-5)
    assert_trees_close(run.gradients, expected.gradients)


@pytest.mark.parametrize("name", PLANS)
def test_plan_trains_like_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    assert_same_training(train(mesh, **plan), reference())


@pytest.mark.parametrize("name", ["data", "fsdp zero 3", "data tensor sp", "accumulate"])
def test_packed_rows_train_like_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    assert_same_training(train(mesh, packed=True, **plan), reference(packed=True))


@pytest.mark.parametrize("name", ["fsdp zero 3", "data tensor sp", "data fsdp tensor sp accumulate"])
def test_gpt_trains_like_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    assert_same_training(train(mesh, config=GPT, **plan), reference(config=GPT))


@pytest.mark.parametrize(
    "name",
    [
        "data tensor sp",
        "unrolled zero 1 tensor",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("fsdp zero 3", "accumulate", "remat selective unrolled fsdp")
        ),
    ],
)
def test_gemma_trains_like_one_device(name: str) -> None:
    mesh, plan = PLANS[name]
    assert_same_training(train(mesh, config=GEMMA, **plan), reference(config=GEMMA))


@pytest.mark.parametrize("name", ["data zero 1", "fsdp zero 3", "data tensor", "data fsdp tensor sp accumulate"])
def test_clipped_and_smoothed_training_equals_one_device(name: str) -> None:
    """Clipping at half the norm, z-loss and label smoothing: losses, norms before clipping, and the clipped
    gradients.
    """
    objective = Objective(clip_norm=0.5, z_loss=1e-2, label_smoothing=0.1)
    mesh, plan = PLANS[name]
    expected = reference(objective=objective)
    assert expected.norms[0] > 1.0
    assert_same_training(train(mesh, objective=objective, **plan), expected)


def test_the_reference_learns() -> None:
    """So that equal losses are not equal because nothing happens."""
    losses = train("data=1", batches=[batch_of(0)] * 20).losses
    assert losses[-1] < losses[0] - 1.0
