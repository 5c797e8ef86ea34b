"""Cases as commands, what a smaller one is, shrinking, and what the fuzz mode draws."""

from __future__ import annotations

import itertools
import shlex

import pytest

from meshpar.check.case import OFF, Case
from meshpar.check.command import main
from meshpar.check.compare import STAGES
from meshpar.check.faults import FAULTS, plant
from meshpar.check.fuzz import CHOICES, cases, fuzz, stages_for
from meshpar.check.invariance import OPTIMIZER, SGD, Checker, find_cause
from meshpar.check.shrink import shrink
from meshpar.mesh.spec import MeshSpec
from tests.check.subjects import case, checker

BASE = case("data=1")
BIG = {"sequence_parallel": "true", "accumulate": "2", "remat": "full", "objective.z_loss": "0.01", "unroll": "0"}


def test_a_case_is_a_command() -> None:
    words = shlex.split(case("data=2 tensor=2", changes={"accumulate": "2"}, masked=False, steps=3).command())
    assert words[:5] == ["python", "-m", "meshpar", "check", "micro"]
    assert words[words.index("--mesh") + 1] == "data=2 tensor=2"
    assert words[words.index("--set") + 1] == "accumulate=2"
    assert {"--no-masks", "--random-data", "--steps"} < set(words)
    assert "--against" not in words


def test_a_case_computes_in_fp32_and_keeps_its_loss_scale() -> None:
    scaled = case("data=2", changes={"precision.compute": "fp16"})
    assert scaled.recipe.plan.precision.compute == "fp32"
    assert scaled.recipe.plan.precision.scales_dynamically
    assert not scaled.reference.precision.scales
    kept = case("data=2", changes={"precision.compute": "fp16"}, precision="plan")
    assert (kept.recipe.plan.precision.compute, kept.reference.precision.compute) == ("fp16", "fp32")


def test_the_reference_has_no_feature_but_the_microbatches_that_dropout_follows() -> None:
    assert case("data=2 tensor=2", changes=BIG).reference.accumulate == 1
    assert case("data=2", changes={"accumulate": "2", "model.dropout": "0.1"}).reference.accumulate == 2


def test_smaller_cases_lack_one_thing_each_and_all_can_run() -> None:
    big = case("data=2 tensor=4", changes={k: v for k, v in BIG.items() if k != "sequence_parallel"})
    smaller = dict(big.smaller())
    assert {"data=2", "tensor=4", "accumulate=2", "remat=full", "objective.z_loss=0.01", "unroll=0", "masks"} == set(
        smaller
    )
    assert smaller["data=2"].mesh == MeshSpec(tensor=4)
    assert "remat" not in smaller["remat=full"].changes
    assert all(found.runs() for found in smaller.values())


def test_without_tensor_there_is_no_sequence_parallelism() -> None:
    found = dict(case("tensor=2", changes={"sequence_parallel": "true"}).smaller())
    assert found["tensor=2"].changes == {}


def test_shrinking_keeps_what_the_failure_needs() -> None:
    runs = []

    def fails(found: Case) -> bool:
        runs.append(found)
        return found.mesh.tensor > 1 and found.recipe.plan.accumulate > 1

    smallest, cause = shrink(case("data=2 tensor=4", changes=BIG), fails)
    assert (str(smallest.mesh), dict(smallest.changes)) == ("tensor=2", {"accumulate": "2"})
    assert cause == ["tensor=2", "accumulate=2"]
    assert len({found.command() for found in runs}) == len(runs)  # none twice


def test_shrinking_is_bounded() -> None:
    runs = []
    shrink(case("data=2 tensor=4", changes=BIG), lambda found: runs.append(found) or False, most=3)
    assert len(runs) == 3


def test_drawn_cases_follow_the_seed_and_cover_every_choice() -> None:
    first, second = ([c.command() for c in itertools.islice(cases(7, BASE, 8), 20)] for _ in range(2))
    assert first == second
    assert first != [c.command() for c in itertools.islice(cases(8, BASE, 8), 20)]
    drawn = list(itertools.islice(cases(0, BASE, 8), 400))
    for key, values in CHOICES.items():
        assert {c.changes.get(key, values[0]) for c in drawn} == set(values), key
    assert {c.mesh.product for c in drawn} == {1, 2, 4, 6, 8}
    assert set(CHOICES) <= set(OFF) | {"objective.clip_norm"}  # what is drawn can be turned off again


@pytest.mark.slow
def test_fuzzing_runs_so_many_cases_and_they_are_equal() -> None:
    said = []
    found = fuzz(BASE, count=1, seed=3, checker=checker(), on_case=lambda *words: said.append(words))
    assert (found.cases, found.failure, len(said)) == (1, None, 1)
    assert all(findings.worst > 0 for _, findings in said)


def test_drawn_cases_keep_what_they_were_asked_to() -> None:
    asked = case("data=1", changes={"accumulate": "2"}, precision="plan", against=MeshSpec(tensor=2), masked=False)
    drawn = list(itertools.islice(cases(0, asked, 8), 40))
    assert {(c.precision, c.against, c.masked, c.changes["accumulate"]) for c in drawn} == {
        ("plan", MeshSpec(tensor=2), False, "2")
    }


def test_every_drawn_case_compares_stages_that_there_are() -> None:
    drawn = list(itertools.islice(cases(0, BASE, 8), 40))
    assert {stages_for(c) for c in drawn} == {SGD, OPTIMIZER}
    assert {*SGD, *OPTIMIZER} < set(STAGES)


def test_fuzzing_ends_when_its_time_is_over() -> None:
    assert fuzz(BASE, count=100, seconds=0.0).cases == 0


@pytest.mark.slow
def test_fuzzing_finds_a_planted_fault_and_shrinks_it() -> None:
    with plant(FAULTS["mean of means"]):
        found = fuzz(BASE, count=40, seed=0, checker=checker())
        assert found.failure is not None
        findings = find_cause(checker(), found.failure)
    assert findings.cause in (
        ["accumulate=2", "masks"],
        ["accumulate=4", "masks"],
        ["accumulate=2", "data.packed=True"],
    )


@pytest.mark.slow
def test_thirty_random_cases_are_equal() -> None:
    failure = fuzz(BASE, count=30, seed=1, checker=checker()).failure
    assert failure is None, [str(difference) for difference in failure.differences]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["llama_mikro", "--mesh", "data=2"], "unknown recipe 'llama_mikro'; did you mean 'llama_micro'?"),
        (["llama_micro", "--mesh", "data=2 tenser=2"], "did you mean 'tensor'?"),
        (["llama_micro", "--mesh", "data=3"], "batch=16 is not divisible by data=3"),
        (["llama_micro", "--mesh", "data=2", "--set", "accumulat=2"], "did you mean 'accumulate'?"),
        (
            ["llama_micro", "--mesh", "data=2", "--against", "data=-1"],
            "--against data=-1 has a free axis; give its size",
        ),
        (["llama_micro", "--mesh", "data=2", "--steps", "0"], "--steps 0 is below 1"),
        (["llama_micro", "--mesh", "data=2", "--plant", "psum droped"], "did you mean 'psum dropped'?"),
        (["llama_micro", "--mesh", "data=16"], "16 devices asked for and 8 cpu devices are there"),
        (["llama_micro", "--fuzz", "0"], "--fuzz 0 is below 1"),
        (["llama_micro", "--fuzz", "1", "--mesh", "data=2"], "leave one of them out"),
        (["llama_micro", "--fuzz", "1", "--against", "data=16"], "--against data=16 needs 16 of 8 devices"),
        (["llama_micro", "--mesh", "data=2", "--set", "mesh.tensor=2"], "--set mesh.tensor both give the mesh"),
    ],
)
def test_a_bad_value_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_the_command_prints_a_table_and_json_and_ends_with_0_or_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    kept = Checker()  # the references, for both
    monkeypatch.setattr("meshpar.check.command.Checker", lambda say: kept)
    command = ["llama_micro", "--mesh", "data=2", "--random-data", "--set", "model.vocab=97"]
    assert main(command) == 0
    assert "computes what data=1 does" in capsys.readouterr().out
    assert main([*command, "--json", "--no-shrink", "--plant", "norm per rank"]) == 1

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["ok"] is False
    assert found["command"].endswith("--plant 'norm per rank'")
    assert found["differences"][0]["stage"] == "gradient norm"
