"""The comparison of formats on a tiny model: its numbers are of real steps, and it draws its picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.precision import WAYS, main, training_of
from meshpar.mesh.devices import choose_devices
from meshpar.module import abstract
from meshpar.train.recipe import apply_overrides, load_recipe

TINY = [
    *("--set", "model.layers=1", "--set", "model.embed=32", "--set", "model.mlp=64", "--set", "model.vocab=257"),
    *("--set", "data.tokenizer=bytes", "--set", "data.seq=16", "--set", "train.batch=4", "--set", "optimizer.warmup=0"),
]


@pytest.mark.slow
def test_underflow_overflow_and_their_cures_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} says {number * number}\n" for number in range(300)))
    ways = ["fp16, 8M tokens", "fp16, static 2^24", "fp16, dynamic scaling"]
    out = tmp_path / "out"
    command = ["--steps", "4", "--out", str(out), "--only", *ways, *TINY, "--set", f"data.source={text}"]
    assert main(command) == 0
    results = json.loads((out / "precision.json").read_text())
    assert list(results) == ["fp32", *ways]
    underflow, overflow, scaled = (results[way] for way in ways)
    assert underflow["flushed"] > 0.5 > 0.01 > scaled["flushed"]
    assert scaled["error"] < 0.01
    assert overflow["skipped"] == 4 and not np.isfinite(overflow["error"])
    assert results["fp32"]["flushed"] == results["fp32"]["error"] == 0.0
    assert (out / "precision.png").read_bytes().startswith(b"\x89PNG")
    assert "smallest normal" in capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_a_policy_that_trains(way: str) -> None:
    recipe = apply_overrides(load_recipe("llama_tiny_stdlib"), [word for word in TINY if word != "--set"])
    model = abstract(recipe.model.build, recipe.model)
    policy = training_of(recipe, model, way, choose_devices(recipe.plan.mesh, 1)).plan.precision
    assert policy.scales == (way.startswith("fp16") and "no scaling" not in way)


def test_a_bad_number_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "1"]) == 2
    assert capsys.readouterr().err == "error: --steps 1 draws no curve; use 2 or more\n"
