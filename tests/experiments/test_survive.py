"""A run that is killed twice ends as one that was not; and the comparison can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import survive
from experiments.survive import main


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    assert main(["--kills", "2", "--steps", "200", "--seed", "3", "--out", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.count("bit-equal") == 3


def test_a_loss_that_differs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: Path, overrides: list[str], seconds: float | None) -> tuple[float, float]:
        folder.mkdir(exist_ok=True)
        lines = [{"step": step, "loss": 2.0, "data": step, "grad_norm": 1.0} for step in range(1, 21)]
        if folder.name == "killed":
            lines[6]["loss"] = 2.5
            del lines[-1]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 1.0, 2.0

    monkeypatch.setattr(survive, "run", run)
    assert main(["--kills", "1", "--steps", "20", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "loss of 20 steps: differs first at step 7" in said
    assert "data of 20 steps: differs first at step 20" in said
    assert main(["--kills", "0"]) == 2
