"""The benchmark of checkpoints runs and removes what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench_checkpoint import main

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_tiny_state_is_measured_and_removed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    arguments = ["--mb", "5", "--embed", "64", "--rows", "1", "--rounds", "1", "--folder", tmp_path / "disk"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.bench_checkpoint",
            *map(str, arguments),
            "--out",
            str(tmp_path / "out.json"),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row in (
        "synchronous save",
        "ordinary step",
        "save blocks the loop",
        "step right after",
        "cost of a save in all",
    ):
        assert row in done.stdout
    assert list((tmp_path / "disk").iterdir()) == []
    result = json.loads((tmp_path / "out.json").read_text())
    assert 4 << 20 < result["bytes"] < 8 << 20
    assert len(result["rounds"]) == len(result["synchronous"]) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rounds", "0"], "--rounds 0 measures nothing; use 1 or more"),
        (["--embed", "100"], "--embed 100 is no multiple of 64"),
        (["--folder", "/no/such/folder"], "No such file or directory"),
    ],
)
def test_a_bad_value_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err
