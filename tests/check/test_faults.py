"""The checker is checked: every planted fault is caught, at the stage where it happens, and its cause is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshpar.check.compare import Difference
from meshpar.check.faults import FAULTS, plant
from meshpar.check.invariance import Checker, find_cause, stages_of
from tests.check.subjects import GPT, LLAMA, case, checker, recipe

# fault -> the first stage that differs, and a part of what is said of it
CAUGHT = {
    "psum dropped": ("gradients", "blocks/"),
    "psum doubled": ("gradients", "4 times as much: a sum over fsdp is made twice"),
    "all-reduce dropped": ("activations", "block 0, attention output"),
    "local softmax": ("loss", "loss of step 1"),
    "gathered logits": ("loss", "+ ln 4: the softmax sums over the vocabulary of tensor too often"),
    "local vocabulary": ("loss", "loss of step 1"),
    "mean of means": ("gradients", "blocks/"),
    "clip before unscale": ("gradient norm", "2^16: the loss scale was not divided out"),
    "loss scale kept": ("gradients", "2^16: the loss scale was not divided out"),
    "norm per rank": ("gradient norm", "the square root of 4: the norm counts each of the 4 copies that data holds"),
    "stale weights": ("parameters after SGD", "all of it is lost"),
    "copies drift": ("copies", "params/norm/scale"),
    "shift after the split": ("targets", "targets must be shifted before a row is split"),
    "dropout reused": ("loss", "loss of step 1"),
    "one mask for all rows": ("dropout", "45 pairs of rows drop alike"),
    "sequence-parallel norm": ("gradients", "norm/scale"),
    "bias on each rank": ("activations", "block 0, mlp input"),
    "moments forgotten": ("optimizer state", "/mu/"),
    "tokens of all ranks": ("other metrics", "2 times as much: a sum over data is made twice"),
    "drawn per device": ("initial parameters", "embedding/table"),
    "mean of evaluations": ("evaluation", "1/2 of it"),
    "shards out of order": ("activations", "block 0, attention input"),
    "microbatches drop alike": ("dropout", "the first is rows 0 and 1"),
    "layers drop alike": ("activations", "the same mask as in block 0, dropout"),
}
# Their stage and their program are those of another fault, so they are caught as it is.
ALIKE = {
    *("psum dropped", "all-reduce dropped", "local softmax", "gathered logits", "loss scale kept", "dropout reused"),
    *("one mask for all rows", "bias on each rank", "norm per rank", "copies drift"),
}
CAUSES = {
    "psum doubled": ["fsdp=2", "zero=3", "precision.reduce=fp32"],
    "mean of means": ["accumulate=4", "masks"],
    "local vocabulary": ["tensor=2", "objective.label_smoothing=0.1"],
    "sequence-parallel norm": ["tensor=2", "sequence_parallel=True"],
    "stale weights": ["data=2", "zero=1"],
}


def case_of(name: str, text: Path) -> tuple[Checker, object]:
    fault = FAULTS[name]
    found = case(fault.mesh, GPT if fault.recipe == "gpt" else LLAMA, changes=fault.changes)
    if name == "shift after the split":  # which is in the code that reads the recipe's own text
        base = recipe(dataclasses.replace(LLAMA, vocab=257), source=str(text))
        return Checker(), dataclasses.replace(found, base=base, random_data=False)
    return checker(), found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {number} of a text\n" for number in range(2000)))
    return file


def test_every_fault_has_an_expectation() -> None:
    assert set(CAUGHT) == set(FAULTS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in FAULTS])
def test_a_planted_fault_is_caught_and_named(name: str, text: Path) -> None:
    stage, said = CAUGHT[name]
    checker, found = case_of(name, text)
    stages = stages_of(Difference(stage=stage, path="", text=""))
    with plant(FAULTS[name]):
        findings = checker.check(found, stages)
    assert findings.first is not None
    assert findings.first.stage == stage
    assert any(said in str(difference) for difference in findings.differences if difference.stage == stage)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "mean of means")) for name in CAUSES]
)
def test_the_cause_of_a_planted_fault_is_found(name: str, text: Path) -> None:
    checker, found = case_of(name, text)
    with plant(FAULTS[name]):
        stages = stages_of(Difference(stage=CAUGHT[name][0], path="", text=""))
        findings = find_cause(checker, checker.check(found, stages))
    assert findings.cause == CAUSES[name]
    assert findings.smallest is not None
    assert findings.there is not None


def test_a_planted_fault_is_gone_afterwards() -> None:
    fault = FAULTS["psum doubled"]
    import jax

    real = jax.lax.psum_scatter
    with plant(fault):
        assert jax.lax.psum_scatter is not real
    assert jax.lax.psum_scatter is real
