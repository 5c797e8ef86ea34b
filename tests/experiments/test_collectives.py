"""The command line `python -m experiments.collectives`."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from experiments.collectives import main

SMALL = [
    *("--set", "model.layers=1", "--set", "unroll=1", "--set", "train.batch=4", "--set", "data.seq=32"),
    *("--set", "mesh=data=2 tensor=2"),
]


def test_a_table_with_totals_and_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rows", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"llama_tiny_stdlib on mesh data=2 tensor=2 of cpu devices, batch 4 x 32, compute bf16; ", lines[0])
    assert lines[0].endswith("MiB on each while it runs")
    rows = lines[3:7]
    assert all(re.search(r"all-reduce .*\.py:\d+ *$", row) for row in rows) and "smaller" in lines[7]
    assert re.match(r"[\d.]+ [KM]iB sent by each device in one step: data [\d.]+%, tensor [\d.]+%", lines[-1])
    assert main([*SMALL, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["recipe"] == "llama_tiny_stdlib" and values["mesh"]["tensor"] == 2
    assert values["bytes"] == sum(total["bytes"] for total in values["totals"]) > 0
    assert values["bytes_while_running"] > 2**20
    assert {one["axes"][0] for one in values["collectives"]} == {"data", "tensor"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recipe", "llama_tny"], "unknown recipe 'llama_tny'; did you mean"),
        (["--set", "mesh=tensr=4"], "unknown mesh axis 'tensr'; did you mean 'tensor'?"),
        (["--set", "mesh=tensor=8"], "heads=4 is not divisible by tensor=8"),
        (["--topology", "v5x:4x4"], "unknown machine 'v5x'; did you mean 'v5"),
        (
            ["--topology", "v5e:4x4", "--devices", "4"],
            "--topology v5e:4x4 says how many devices there are; drop --devices",
        ),
        (["--rows", "0"], "--rows 0 shows nothing"),
    ],
)
def test_a_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and sentence in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install -e ".[tpu]"')
def test_a_step_is_compiled_for_a_tpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "mesh=data=2 tensor=4", "--topology", "v5e:2x4", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["device"] == "TPU v5 lite"
    assert {"bf16"} == {one["dtype"] for one in values["collectives"] if one["buffer_bytes"] > 2**17}
    assert main(["--set", "mesh=data=2 tensor=2", "--topology", "v5e:2x4"]) == 2
    assert "mesh data=2 tensor=2 is 4 devices and v5e:2x4 has 8" in capsys.readouterr().err
