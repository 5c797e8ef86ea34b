"""A run that was stopped on one mesh goes on upon others, with the losses and the data of one that was not stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from experiments.train_lm import main
from meshpar.train.metrics import JsonLines
from meshpar.train.recipe import apply_overrides, load_recipe

TINY = (
    "model.layers=2 model.embed=32 model.heads=4 model.kv_heads=2 model.mlp=64 model.vocab=257 model.max_seq=64 "
    "data.tokenizer=bytes data.seq=32 optimizer.warmup=2 train.batch=8 train.eval_every=0 train.steps=8 unroll=1 "
    "precision.compute=fp32 train.sample_tokens=0 train.export=none train.tensorboard=false"
)


def command(text: Path, folder: Path, *overrides: str) -> list[str]:
    values = [*TINY.split(), f"data.source={text}", *overrides]
    return [*(word for value in values for word in ("--set", value)), "--out", str(folder)]


def column(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {number} says {number * number}\n" for number in range(1000)))
    return file


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`, a run of 8 steps on data=8, and `stopped`, the same told to stop after 4."""
    folder = tmp_path_factory.mktemp("runs")
    write = JsonLines.write

    def write_and_signal(self: JsonLines, values: dict[str, Any]) -> None:
        write(self, values)
        if values["step"] == 3 and "loss" in values:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHPAR_CACHE", str(tmp_path_factory.mktemp("cache")))
        assert main(command(text, folder / "whole", "mesh=data=8")) == 0
        patch.setattr(JsonLines, "write", write_and_signal)
        assert main(command(text, folder / "stopped", "mesh=data=8")) == 143
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh=data=8",),
        ("mesh=fsdp=4 tensor=2", "zero=3"),
        pytest.param(("mesh=fsdp=2", "zero=2", "accumulate=2"), marks=pytest.mark.slow),
        pytest.param(("mesh=tensor=2",), marks=pytest.mark.slow),
        ("mesh=data=1",),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_stopped_run_goes_on_upon_another_mesh(
    overrides: tuple[str, ...], text: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    shutil.copytree(runs / "stopped", folder)
    done = len(column(folder, "loss"))
    assert 3 <= done < 8
    assert main(command(text, folder, *overrides)) == 0
    whole = runs / "whole"
    assert column(folder, "data") == column(whole, "data")
    if overrides == ("mesh=data=8",):
        assert column(folder, "loss") == column(whole, "loss")  # to the bit
    assert column(folder, "loss") == pytest.approx(column(whole, "loss"), rel=1e-5)
    assert column(whole, "loss")[-1] < column(whole, "loss")[done - 1] - 0.01  # equal, and not because nothing moves


@pytest.mark.parametrize("storage", ["copy", pytest.param("cast", marks=pytest.mark.slow)])
def test_fp16_goes_on_with_its_loss_scale(
    storage: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale, its streak and the number of updates are part of the state, beside skipped steps."""
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    fp16 = ("mesh=fsdp=2", "precision.compute=fp16", f"precision.storage={storage}", "precision.loss_scale.period=3")
    scaled = (*fp16, f"precision.loss_scale.initial={2**24}", "train.checkpoint_every=4", "train.keep=9")
    assert main(command(text, tmp_path / "whole", *scaled)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    assert main(command(text, tmp_path / "run", *scaled)) == 0
    for name in ("loss", "loss_scale", "skipped", "updates", "lr"):
        assert column(tmp_path / "run", name) == column(tmp_path / "whole", name)
    skipped, rates = column(tmp_path / "whole", "skipped"), column(tmp_path / "whole", "lr")
    assert 0 < sum(skipped) < 8
    # no rate was applied in a skipped step; the others follow the schedule, from its beginning
    assert [rate for rate, skip in zip(rates, skipped, strict=True) if skip] == [0.0] * int(sum(skipped))
    applied = [rate for rate, skip in zip(rates, skipped, strict=True) if not skip]
    assert applied == pytest.approx(
        apply_overrides(load_recipe("llama_tiny_stdlib"), TINY.split()).optimizer.rates(8)[: len(applied)].tolist()
    )
    assert column(tmp_path / "whole", "updates")[-1] < 8
