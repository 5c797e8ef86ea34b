"""Equal plans are found equal, with and without features; what is compared; what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.check.batches import batches_of, masked, random_batch, wrong_targets
from meshpar.check.compare import STAGES
from meshpar.check.faults import FAULTS, plant
from meshpar.check.invariance import check_recipe, stages_of
from meshpar.check.observe import alike, different_copies, only_row, rows_to_tell_apart
from meshpar.interfaces import Batch
from meshpar.train.lora import Lora
from tests.check.subjects import GPT, case, checker, recipe

SIX = {
    "data=8": {},
    "fsdp=4": {"accumulate": "2", "precision.reduce": "fp32"},
    "data=2 tensor=2": {"sequence_parallel": "true", "remat": "full"},
    "data=2 fsdp=2 tensor=2": {"loss_chunk": "5", "zero": "2", "precision.loss_scale.kind": "static"},
    "tensor=4": {"objective.label_smoothing": "0.1", "objective.z_loss": "0.01"},
    "fsdp=2 tensor=2": {"data.packed": "true", "model.tied": "true"},
}


SLOW = ("data=8", "tensor=4", "fsdp=2 tensor=2", "data=2 fsdp=2 tensor=2")


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in SIX])
def test_meshes_and_features_are_equal_to_the_plain_step(mesh: str) -> None:
    findings = checker().check(case(mesh, changes=SIX[mesh]))
    assert findings.ok, [str(difference) for difference in findings.differences]
    compared = {row.stage: row for row in findings.rows}
    assert set(compared) == set(STAGES) - {"dropout"}
    assert compared["activations"].compared >= 24  # 2 blocks of 12 constraint points, the embeddings and the head
    assert compared["gradients"].compared == (11 if mesh == "fsdp=2 tensor=2" else 12)
    worst = [row.worst for row in findings.rows if not np.isnan(row.worst)]
    assert 0.0 < max(worst) < 1.0  # two orders of addition are not one


def test_dropout_is_compared_and_is_as_promised() -> None:
    findings = checker().check(case("data=2 tensor=2", GPT, changes={"model.dropout": "0.1", "accumulate": "2"}))
    assert findings.ok, [str(difference) for difference in findings.differences]
    assert "dropout" in {row.stage for row in findings.rows}


@pytest.mark.slow
def test_adapters_are_compared() -> None:
    base = dataclasses.replace(recipe(), weights="drawn here", lora=Lora(rank=4))
    adapted = dataclasses.replace(case("fsdp=4 tensor=2"), base=base, changes={"sequence_parallel": "true"})
    findings = checker().check(adapted)
    assert findings.ok, [str(difference) for difference in findings.differences]
    compared = {row.stage: row.compared for row in findings.rows}
    assert (compared["initial parameters"], compared["gradients"]) == (12 + 14, 14)  # 7 kernels with two each


def test_a_fault_in_adapters_is_found() -> None:
    base = dataclasses.replace(recipe(), weights="drawn here", lora=Lora(rank=4))
    fault = FAULTS["psum doubled"]
    with plant(fault):
        planted = dataclasses.replace(case(fault.mesh), base=base, changes=fault.changes)
        found = checker().check(planted, ("gradients",))
    assert found.first is not None
    assert "lora_" in found.first.path


@pytest.mark.parametrize("compute", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_the_dtypes_of_the_plan_are_compared_on_request(compute: str) -> None:
    changes = {"precision.compute": compute, "precision.storage": "copy", "zero": "1"}
    stages = ("loss", "gradients", "gradient norm", "parameters after SGD", "parameters after the optimizer")
    findings = checker().check(case("data=4", changes=changes, precision="plan"), stages)
    assert findings.ok, [str(difference) for difference in findings.differences]
    assert findings.tolerance.relative > 1e-2  # and printed, since little can be said in half precision


def test_a_recipe_is_checked_from_python_with_an_optimizer_and_batches_of_ones_own() -> None:
    batches = [random_batch(number, 16, 16, 97, packed=False) for number in range(2)]
    findings = check_recipe(recipe(), "data=2", "tensor=2", tx=optax.sgd(0.1, momentum=0.9), batches=batches)
    assert findings.ok, [str(difference) for difference in findings.differences]
    assert "targets" not in {row.stage for row in findings.rows}  # they need not be the next token
    assert findings.to_json()["command"].startswith("python -m meshpar check")
    with pytest.raises(ValueError, match=r"^2 batches for steps=3; give one batch for each step$"):
        check_recipe(recipe(), "data=2", batches=batches, steps=3)


def noisy() -> optax.GradientTransformation:
    """SGD with a step that depends on how often it was called."""
    calls = iter(range(10**6))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        number = jax.pure_callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32))
        return jax.tree.map(lambda g: -0.1 * g * (1 + 0.1 * number), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_an_optimizer_that_depends_on_where_it_runs_is_found() -> None:
    findings = check_recipe(
        recipe(), "data=2", tx=noisy(), batches=[random_batch(0, 16, 16, 97, packed=False)], steps=1
    )
    assert {difference.stage for difference in findings.differences} == {"parameters after the optimizer"}


def test_an_optimizer_is_seen_to_move_the_weights_in_the_first_update() -> None:
    from meshpar.check.observe import observe_update

    found = case("data=2", steps=1)  # whose recipe warms up from a rate of 0
    made = checker()
    subject = made._subject(found)
    updated = observe_update(subject, found.recipe.plan, None)
    assert all(np.abs(updated.weights[path] - leaf).max() > 1e-4 for path, leaf in updated.before.items())


def test_a_step_that_is_not_deterministic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter(np.arange(1.0, 1e6, dtype=np.float32))
    real = optax.tree_utils.tree_norm

    def of_calls(tree: Any) -> jax.Array:
        factor = jax.pure_callback(lambda: next(noise), jax.ShapeDtypeStruct((), jnp.float32))
        return real(tree) * factor

    with monkeypatch.context() as patch:
        patch.setattr("meshpar.losses.cross_entropy.jnp.log", lambda x: jnp.log1p(x - 1) * of_calls(jnp.ones(())))
        findings = checker().check(case("data=2", steps=1), ("determinism",))
    assert findings.first is not None
    assert findings.first.path == "loss"


def test_a_step_that_is_skipped_is_refused() -> None:
    changes = {"precision.compute": "fp16", "precision.loss_scale.kind": "static"}
    changes |= {"precision.loss_scale.initial": "1e30", "precision.loss_scale.ceiling": "1e30"}
    with pytest.raises(ValueError, match=r"of 2 steps had gradients that are not finite.*lower precision.loss_scale"):
        checker().check(case("data=2", changes=changes, precision="plan"), ("loss",))


def test_masks_take_a_fifth_of_the_targets_and_the_last_row() -> None:
    batch = masked(random_batch(0, 64, 32, 97, packed=False), 0)
    weights = np.asarray(batch.weights)
    assert 0.75 < weights[:-1].mean() < 0.85
    assert not weights[-1].any()


def test_packed_random_rows_have_two_documents_and_right_targets() -> None:
    batch = random_batch(0, 64, 16, 97, packed=True)
    assert set(np.unique(batch.segments)) == {0, 1, 2}
    assert wrong_targets(batch) == 0
    assert not np.asarray(batch.weights)[np.asarray(batch.segments) == 0].any()


def test_wrong_targets_are_counted_where_they_count() -> None:
    batch = random_batch(0, 4, 8, 97, packed=False)
    targets = np.asarray(batch.targets).copy()
    targets[0, 3] += 1
    targets[1, 7] += 1  # nothing is known of a row's last target
    assert wrong_targets(Batch(tokens=batch.tokens, targets=targets, weights=batch.weights)) == 1
    weights = np.asarray(batch.weights).copy()
    weights[0, 3] = 0.0
    assert wrong_targets(Batch(tokens=batch.tokens, targets=targets, weights=weights)) == 0


def test_a_vocabulary_that_is_too_small_for_the_text_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"has 257 tokens and model.vocab=97; set model.vocab=257 or more"):
        batches_of(case("data=1", base=recipe(source=__file__), random_data=False))


def test_copies_that_differ_are_named() -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    parts = [
        jax.device_put(np.float32([1, value]), device) for value, device in zip((2, 3), jax.devices(), strict=False)
    ]
    leaf = jax.make_array_from_single_device_arrays((2,), whole, parts)
    assert different_copies({"a": {"b": leaf}, "c": jnp.zeros(3)}) == ["a/b"]


def test_rows_that_drop_alike_are_named() -> None:
    assert alike([(1.0, 2.0), (1.0, 2.1), (3.0, 2.0)]) == []  # alike in all numbers
    assert alike([(1.0, 2.0), (1.5, 2.0), (3.0, 2.0), (1.5 + 1e-7, 2.0)]) == [(1, 3)]  # to rounding


def test_rows_to_tell_apart_are_neighbours_and_of_all_devices() -> None:
    assert rows_to_tell_apart(2) == [0, 1]
    assert rows_to_tell_apart(64) == [0, 1, 2, 3, 8, 16, 24, 32, 40, 48, 56]
    batch = only_row(random_batch(0, 4, 8, 97, packed=False), 2)
    assert (np.asarray(batch.tokens) == np.asarray(batch.tokens)[0]).all()
    assert np.asarray(batch.weights).sum(axis=1).tolist() == [0, 0, 8, 0]


def test_a_difference_is_looked_for_with_the_stages_of_its_program() -> None:
    from meshpar.check.compare import Difference

    def of(stage: str) -> set[str]:
        return set(stages_of(Difference(stage=stage, path="", text="")))

    assert of("activations") == {"activations"}
    assert "copies" in of("gradients")
    assert "dropout" not in of("gradients")
    assert of("clipped gradients") == {"clipped gradients", "parameters after the optimizer", "optimizer state"}
    assert set().union(*map(of, STAGES)) == set(STAGES)
