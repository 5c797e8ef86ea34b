"""The command line `python -m experiments.describe`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.describe import main

REPOSITORY = Path(__file__).parents[2]


def test_tables_of_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "mesh=fsdp=4 tensor=2", "--set", "precision.storage=copy"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("1.05M parameters on mesh fsdp=4 tensor=2, ZeRO 3 over fsdp, compute bf16, storage copy")
    assert [line.strip() for line in lines if line.strip() in ("params", "master", "optimizer")] == [
        "params",
        "master",
        "optimizer",
    ]
    assert "embedding/table" in out and "vocab=1024/tensor embed=128/fsdp" in out
    assert lines[-1].endswith(" on each device between steps")


def test_json_of_a_big_model_needs_no_devices_and_no_memory() -> None:
    script = (
        "import sys\nfrom experiments.describe import main\nfrom meshpar.compat import backend_started\n"
        "code = main(['--recipe', 'llama_1b', '--json'])\nassert not backend_started()\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    parts = {name: values[name]["totals"]["bytes_per_device"] for name in ("params", "master", "optimizer", "counters")}
    assert values["mesh"] == "data=4 fsdp=16"
    assert parts["params"] == 4 * values["parameters"] // 16  # every leaf of this model divides by 16
    assert values["bytes_per_device"] == sum(parts.values())


def test_a_picture_as_text_and_as_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--set", "mesh=fsdp=4 tensor=2", "--draw", "embedding/table"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "vocab=1024: tensor=2" in shown and "embed=128: fsdp=4" in shown
    assert main([*arguments, "--layout", "compute"]) == 0
    assert "0,2,4,6" in capsys.readouterr().out.replace("0,2..6", "0,2,4,6")
    png = tmp_path / "new" / "picture.png"
    assert main([*arguments, "--out", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recipe", "llama_tny"], "unknown recipe 'llama_tny'; did you mean"),
        (["--set", "mesh=fdsp=4"], "unknown mesh axis 'fdsp'; did you mean 'fsdp'?"),
        (["--set", "mesh=fsdp=-1"], "mesh fsdp=-1 has a free axis; say for how many devices with --devices"),
        (["--set", "mesh=fsdp=-1 tensor=2", "--devices", "3"], "which does not divide 3"),
        (["--set", "mesh=tensor=8"], "heads=4 is not divisible by tensor=8 (blocks/attention/"),
        (["--draw", "embeding/table"], "no parameter 'embeding/table'; did you mean 'embedding/table'?"),
        (["--out", "a.png"], "--out a.png belongs to a picture; add --draw ARRAY"),
        (["--layout", "grads"], "--layout grads belongs to a picture; add --draw ARRAY"),
        (["--draw", "embedding/table", "--json"], "--json and --draw are two different outputs; drop one"),
        (
            ["--draw", "embedding/table", "--out", "README.md/a.png"],
            "--out README.md/a.png cannot be written (",
        ),
        (["--draw", "embedding/table", "--out", "/proc/a.png"], "--out /proc/a.png cannot be written ("),
        (["--set", f"mesh=data={10**23}"], "is more than the 1048576 devices that an axis may have"),
        (["--recipe", "meshpar.mesh.build:abstract_mesh"], "needs spec; name a function that is called without"),
        (
            ["--draw", "embedding/table", "--out", "a.svg"],
            "--out a.svg is not a .png file; pictures are PNG, name it a.png",
        ),
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


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "python -m experiments.describe --recipe llama_1b" in capsys.readouterr().out
