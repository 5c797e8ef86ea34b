"""Meshes: axes of size one, device order, batches that do not fit, and layouts drawn at random."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.testing.compare import assert_trees_close
from meshpar.train.build import build
from meshpar.train.step import Objective
from tests.conformance.runs import LLAMA, batch_of, model_of, recording_sgd, train


def test_c15_every_way_to_split_the_batch_has_one_gradient_norm() -> None:
    norms = [train(mesh).norms[0] for mesh in ("data=1", "data=8", "fsdp=8", "data=2 fsdp=4")]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)


def test_c60_results_do_not_depend_on_the_order_of_devices() -> None:
    plan = Plan(mesh=MeshSpec(data=2, tensor=4), precision=Policy(compute="fp32"))
    losses = []
    for devices in (jax.devices(), jax.devices()[::-1]):
        training = build(
            model_of(LLAMA),
            recording_sgd(0.3),
            plan,
            batch=8,
            seq=32,
            objective=Objective(clip_norm=None),
            devices=devices,
        )
        state = training.init()
        state, metrics = training.step(state, training.place(batch_of(0)))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("batch", [1, 6])
def test_c54_a_batch_that_does_not_divide_is_one_sentence_with_all_numbers(batch: int) -> None:
    plan = Plan(mesh=MeshSpec(data=2, fsdp=4))
    with pytest.raises(
        ValueError,
        match=rf"^batch={batch} is not divisible by data=2 x fsdp=4 x accumulate=1 = 8; "
        "use a multiple of 8, such as 8$",
    ):
        build(model_of(LLAMA), recording_sgd(0.3), plan, batch=batch, seq=32, devices=jax.devices())


def test_c41_axes_of_size_one_change_nothing() -> None:
    """Features whose axis is there with size 1: ZeRO, tensor and batch rules on one device and where another axis is
    split.
    """
    plain = train("data=1", steps=2)
    for mesh, plan in (
        ("data=1 fsdp=1 tensor=1", {"zero": 3}),
        ("fsdp=1 tensor=2", {"zero": 3}),
        ("data=2 tensor=1", {"zero": 2}),
    ):
        run = train(mesh, steps=2, **plan)
        np.testing.assert_allclose(run.losses, plain.losses, rtol=0, atol=1e-5)


def _drawn(seed: int) -> tuple[str, dict[str, object], dict[str, object]]:
    rng = np.random.default_rng(seed)

    def one(*choices: object) -> object:
        return choices[rng.integers(len(choices))]

    mesh = str(one("data=8", "fsdp=4", "data=2 fsdp=2 tensor=2", "fsdp=2 tensor=4", "data=4 tensor=2", "tensor=4"))
    plan = {
        "zero": one(0, 1, 2, 3),
        "remat": one("none", "full", "selective"),
        "unroll": one(0, 1, 2),
        "loss_chunk": one(None, 8, 12),
        "accumulate": 1 if "=8" in mesh else one(1, 2),
        "sequence_parallel": "tensor" in mesh and bool(one(True, False)),
    }
    objective = Objective(
        clip_norm=one(None, 0.5),  # type: ignore[arg-type]
        z_loss=one(0.0, 1e-2),  # type: ignore[arg-type]
        label_smoothing=one(0.0, 0.1),  # type: ignore[arg-type]
    )
    return mesh, plan, {"objective": objective, "packed": bool(one(True, False))}


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_c17_features_drawn_at_random_compose(seed: int) -> None:
    mesh, plan, features = _drawn(seed)
    run = train(mesh, steps=2, **plan, **features)
    expected = train("data=1", steps=2, **features)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=0, atol=1e-5, err_msg=f"{mesh} {plan} {features}")
    assert_trees_close(run.gradients, expected.gradients)
