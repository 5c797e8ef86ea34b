"""The command line `python -m experiments.train_lm`: what it refuses, and what a run leaves behind."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors import safe_open

from experiments.results import perplexity
from experiments.train_lm import main
from meshpar.checkpoint.manager import Checkpoints
from meshpar.mesh.distributed import Cluster
from meshpar.train.metrics import JsonLines
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.run_folder import lock

REPOSITORY = Path(__file__).parents[2]
TINY = {
    "model.layers": 2,
    "model.embed": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.mlp": 64,
    "model.vocab": 300,
    "model.max_seq": 64,
    "data.tokenizer": "bytes",
    "data.seq": 32,
    "optimizer.schedule": "constant",
    "optimizer.warmup": 2,
    "train.batch": 8,
    "train.steps": 6,
    "train.eval_every": 2,
    "train.eval_batches": 2,
    "train.sample_tokens": 4,
    "mesh": "data=2 tensor=2",
    "precision.compute": "fp32",
    "unroll": 1,
}


def arguments(text: Path | str, **changes: Any) -> list[str]:
    """The command line of a tiny run on the text of a file; keys of changes have "__" for "."."""
    values = TINY | {"data.source": text} | {key.replace("__", "."): value for key, value in changes.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {number} says {number * number}\n" for number in range(1000)))
    return file


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokens of these tests stay out of the user's cache, and the 8 devices are there: the script would emulate as many
    as its mesh has.
    """
    assert jax.device_count() == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHPAR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# --- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A run of 6 updates that nothing interrupted, with a checkpoint after 3."""

    folder: Path
    printed: str


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    printed = []
    with pytest.MonkeyPatch.context() as patch:  # capsys ends with each test
        patch.setattr("rich.console.Console.print", lambda self, line="", **_: printed.append(str(line)))
        assert main([*arguments(text), "--out", str(folder)]) == 0
    return Finished(folder=folder, printed="\n".join(printed))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics_of(folder) if "loss" in line}


def test_a_run_folder_holds_the_resolved_config(finished: Finished) -> None:
    config = json.loads((finished.folder / "config.json").read_text())
    assert config["recipe"]["model"]["embed"] == 32
    assert config["recipe"]["plan"]["mesh"] == "data=2 tensor=2"
    assert config["recipe"]["train"]["steps"] == 6
    assert {axis: size for axis, size in config["mesh"].items() if size > 1} == {"data": 2, "tensor": 2}
    assert len(config["devices"]) == 4
    assert config["rows_per_device_and_microbatch"] == 4
    assert config["versions"]["jax"] == jax.__version__
    assert config["parameters"] > 0


def test_every_step_and_every_validation_is_a_line_of_json(finished: Finished) -> None:
    lines = metrics_of(finished.folder)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    # warm-up over 2 updates from 0, then the peak of the recipe
    assert [line["lr"] for line in steps] == pytest.approx([0.0, 1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3])
    assert all(line["tokens"] == 8 * 32 and line["seconds"] > 0 and line["grad_norm"] > 0 for line in steps)
    assert all(line["mfu"] is None for line in steps)  # the peak of a CPU is not known
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_run_ends_with_summary_picture_and_sampled_text(finished: Finished) -> None:
    summary = json.loads((finished.folder / "summary.json").read_text())
    last = [line["validation_loss"] for line in metrics_of(finished.folder) if "validation_loss" in line][-1]
    assert summary["steps"] == 6 and summary["validation_loss"] == last
    assert 0 < summary["bigram_loss"] < summary["unigram_loss"]
    assert (finished.folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (finished.folder / "samples.txt").read_text().count("----") == 1
    assert (finished.folder / "tokenizer.json").exists()
    for told in ("first step after", "MFU n/a", f"validation loss {last:.4f}", "bigram", str(finished.folder)):
        assert told in finished.printed


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(text: Path, tmp_path: Path, finished: Finished) -> None:
    folder = tmp_path / "stopped"
    assert main([*arguments(text, train__steps=4, train__checkpoint_every=3), "--out", str(folder)]) == 0
    # as if it had been killed in the middle of update 5: one more line and a half, and no checkpoint after 3
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.0}\n{"step": 6, "lo')
    (folder / "checkpoints" / "4").rename(tmp_path / "gone")
    assert main([*arguments(text), "--out", str(folder)]) == 0
    assert [line["step"] for line in metrics_of(folder) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert losses_of(folder) == losses_of(finished.folder)


def test_a_run_that_was_killed_before_its_results_is_finished(text: Path, tmp_path: Path, finished: Finished) -> None:
    folder = tmp_path / "killed"
    shutil.copytree(finished.folder, folder)
    for name in ("summary.json", "losses.png", "samples.txt"):
        (folder / name).unlink()
    assert main([*arguments(text), "--out", str(folder)]) == 0
    for name in ("losses.png", "samples.txt"):
        assert (folder / name).exists()
    one, other = (json.loads((run / "summary.json").read_text()) for run in (folder, finished.folder))
    for name in ("steps", "validation_loss", "bigram_loss"):
        assert one[name] == other[name]
    assert [line["step"] for line in metrics_of(folder) if "validation_loss" in line] == [2, 4, 6]  # the last one once
    assert losses_of(folder) == losses_of(finished.folder)


def test_another_number_of_steps_tells_the_jump_of_the_learning_rate(
    text: Path, tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    monkeypatch.setattr("rich.console.Console.print", lambda self, line="", **_: printed.append(str(line)))
    shutil.copytree(finished.folder, tmp_path / "run")
    longer = arguments(
        text, train__steps=10, optimizer__schedule="cosine", mesh="fsdp=2", accumulate=2, precision__storage="copy"
    )
    assert main([*longer, "--out", str(tmp_path / "run")]) == 0
    # the rate was constant; the cosine over 10 updates is half-way from the peak to a tenth of it
    told = "train.steps was 6 and is 10: the learning rate goes on at 0.00165 instead of 0.003"
    assert printed.count(told) == 1
    assert any(line.startswith("restoring step 6, written on data=2 tensor=2, onto fsdp=2") for line in printed)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 10


def test_a_diverged_run_ends_with_a_sentence_and_valid_json_and_logging_asks_no_device(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    schedule_of = OptimizerConfig.learning_rate

    def traced_only(self: OptimizerConfig, steps: int) -> Any:
        def rate(count: Any) -> Any:
            assert isinstance(count, jax.core.Tracer), "a learning rate was computed by itself"
            return schedule_of(self, steps)(count)

        return rate

    monkeypatch.setattr(OptimizerConfig, "learning_rate", traced_only)
    wild = arguments(text, optimizer__lr=1e30, train__checkpoint_every=1, train__keep=9)
    assert main([*wild, "--out", str(tmp_path / "run")]) == 1

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = [line for text in lines if "loss" in (line := json.loads(text, parse_constant=refuse))][-1]
    assert None in (last["loss"], last["grad_norm"])
    wrong = last["step"]
    printed = capsys.readouterr().err
    assert re.search(rf"error: the (loss|grad_norm) of step {wrong} is (inf|nan), and its update spoilt", printed)
    # what was saved is from before
    assert max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == wrong - 1


def test_a_run_names_the_first_tensor_that_is_not_finite_on_request(text: Path, tmp_path: Path, capsys: Capsys) -> None:
    wild = arguments(text, optimizer__lr=1e30, train__nan_report=True)
    assert main([*wild, "--out", str(tmp_path / "run")]) == 1
    assert "the first tensor that is not finite is: " in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(
    text: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: JsonLines, values: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", full)
    assert main([*arguments(text), "--out", str(tmp_path / "run")]) == 1
    told = f"error: the disk of {tmp_path / 'run'} is full; make room and give the same command again"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(
    number: signal.Signals, text: Path, tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = JsonLines.write

    def write_and_signal(self: JsonLines, values: dict[str, Any]) -> None:
        write(self, values)
        if values["step"] == 3 and "loss" in values:
            os.kill(os.getpid(), number)

    command = [*arguments(text, train__checkpoint_every=0), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", write_and_signal)
        assert main(command) == 143
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(saved) == 1 and 3 <= saved[0] < 6
    assert not (tmp_path / "run" / "summary.json").exists()
    assert main(command) == 0
    assert losses_of(tmp_path / "run") == losses_of(finished.folder)
    data = [[line["data"] for line in metrics_of(run) if "loss" in line] for run in (tmp_path / "run", finished.folder)]
    assert data[0] == data[1] and len(set(data[0])) == 6


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_before_training_is_one_sentence(
    processes: int, text: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.train_lm.prepare", interrupted)
    monkeypatch.setattr("meshpar.mesh.distributed.joined", lambda: Cluster(source="flags", processes=processes))
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    assert main(arguments(text)) == 130
    assert ended == [130] * (processes > 1)  # several do not wait for one another
    assert capsys.readouterr().err == ("interrupted outside of training; the same command, with its --out, goes on\n")


def test_the_best_checkpoint_stays_and_curves_of_lost_steps_are_hidden(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    purged = []
    monkeypatch.setattr(
        "tensorboardX.SummaryWriter.__init__", lambda self, folder, *, purge_step: purged.append(purge_step)
    )
    monkeypatch.setattr("tensorboardX.SummaryWriter.add_scalar", lambda *_: None)
    monkeypatch.setattr("tensorboardX.SummaryWriter.close", lambda *_: None)
    growing = {"optimizer__lr": 0.3, "train__checkpoint_every": 2, "train__eval_every": 2}  # which soon makes it worse
    plain = {"train__sample_tokens": 0, "train__export": "none"}
    command = arguments(text, train__keep=1, train__keep_best=1, **growing, **plain)
    assert main([*command, "--out", str(tmp_path)]) == 0
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    measured = {line["step"]: line["validation_loss"] for line in metrics_of(tmp_path) if "validation_loss" in line}
    best = min(measured, key=lambda step: measured[step])
    assert best == 4
    assert checkpoints.steps() == [best, 6]
    assert checkpoints.manifest(best).metric == measured[best]
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    (tmp_path / "summary.json").unlink()
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert purged == [1, best + 1]


def test_a_checkpoint_that_does_not_fit_is_one_sentence(
    text: Path, tmp_path: Path, finished: Finished, capsys: Capsys
) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"mlp": 64', '"mlp": 96'))
    assert main([*arguments(text, train__steps=8, model__mlp=96), "--out", str(tmp_path / "run")]) == 2
    assert "is (2, 64, 32) in the checkpoint of step 6 and (2, 96, 32) here" in capsys.readouterr().err


def test_weights_curves_profile_and_goodput_are_left_behind(text: Path, tmp_path: Path) -> None:
    command = arguments(text, train__steps=3, train__profile="2:3", train__export="bf16", train__sample_tokens=0)
    assert main([*command, "--out", str(tmp_path)]) == 0
    with safe_open(tmp_path / "weights.safetensors", framework="flax") as weights:
        table = weights.get_tensor("embedding/table")
        assert "embedding/table" in weights.keys() and table.dtype == jax.numpy.bfloat16  # noqa: SIM118
        assert json.loads(weights.metadata()["meshpar"])["recipe"]["model"]["embed"] == 32
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["goodput"] < 1
    assert {"seconds_start", "seconds_compilation", "seconds_steps", "seconds_data"} <= set(summary)


@pytest.mark.parametrize(("loss", "shown"), [(1.0, "2.7"), (1e4, "inf"), (math.inf, "inf"), (math.nan, "nan")])
def test_the_perplexity_of_any_loss_can_be_shown(loss: float, shown: str) -> None:
    assert f"{perplexity(loss):.1f}" == shown


# --- what is refused -------------------------------------------------------------------------------------------------

Capsys = pytest.CaptureFixture[str]


def refused(command: list[str], capsys: Capsys) -> str:
    """The one sentence on stderr of a command line that ends with exit code 2."""
    capsys.readouterr()
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.endswith("\n") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip("\n")


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"mesh": "data=-1 fsdp=-1"}, "leaves data and fsdp open, but only one may be -1"),
    ({"mesh": "data=2 tensr=2"}, "unknown mesh axis 'tensr'; did you mean 'tensor'?"),
    ({"mesh": "data=16", "train__batch": 16}, "16 devices asked for and 8 cpu devices are there"),
    ({"mesh": f"data={10**23}"}, f"mesh axis data={10**23} is more than the 1048576 devices that an axis may have"),
    ({"mesh": "data=16"}, "batch=8 is not divisible by data=16 x fsdp=1 x accumulate=1 = 16"),
    ({"mesh": "stage=2"}, "no stage parallelism in this version"),
    ({"mesh": "expert=2"}, "no expert parallelism in this version"),
    ({"mesh": "data=two"}, "mesh axis data=two is not an integer"),
    ({"train__step": 3}, "unknown key 'train.step'; did you mean 'train.steps'?"),
    ({"train__steps": "many"}, "train.steps=many should be an integer"),
    ({"train__steps": 0}, "train.steps=0 must be at least 1"),
    ({"train__steps": "1e30"}, "must be at most 2147483647"),
    ({"train__batch": "1e30"}, "must be at most 2147483647"),
    ({"train__seed": -1}, "train.seed=-1 must be at least 0"),
    ({"train__seed": 2**32}, "train.seed=4294967296 must be at most 4294967295"),
    ({"optimizer__b1": 1}, "optimizer.b1=1.0 must be at least 0 and below 1"),
    ({"model__layers": 0}, "model.layers=0 must be at least 1"),
    ({"model__heads": 0}, "model.heads=0 must be at least 1"),
    ({"model__dropout": 1}, "model.dropout=1.0 must be at least 0 and below 1"),
    (
        {"mesh": "data=2 fsdp=2", "accumulate": 4},
        "batch=8 is not divisible by data=2 x fsdp=2 x accumulate=4 = 16; use a multiple of 16, such as 16",
    ),
    ({"model__heads": 6, "model__kv_heads": 6, "model__embed": 48, "mesh": "tensor=4"}, "heads=6 is not divisible by"),
    ({"model__heads": 6, "model__kv_heads": 3, "model__embed": 48, "mesh": "tensor=2"}, "kv_heads=3 is not divisible"),
    ({"model__heads": 4, "model__kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
    ({"model__mlp": 66, "mesh": "tensor=4"}, "mlp=66 is not divisible by tensor=4"),
    ({"rules": "embed:tensor"}, "mesh axis 'tensor' would split two dims"),
    ({"rules": "seq_residual:tensor", "data__seq": 31}, "seq_residual=31 is not divisible by tensor=2"),
    ({"rules": "mlp:data,mlp:tensor"}, "mlp is named twice in 'mlp:data,mlp:tensor'"),
    ({"rules": "embed:tensr"}, "unknown mesh axis 'tensr'; did you mean 'tensor'?"),
    ({"data__seq": 65}, "seq=65 is longer than the model's max_seq=64"),
    (
        {"data__source": "stdlb"},
        "source='stdlb' is neither a known corpus nor an existing path; did you mean 'stdlib'?",
    ),
    ({"data__source": ""}, "source='' is empty; name a folder, a file, stdlib or botocore"),
    ({"data__tokenizer": f"bpe:{10**20}"}, "must be bpe:N with a whole N of at least 257"),
    ({"data__tokenizer": "byte"}, "tokenizer='byte' is not known; did you mean 'bytes'?"),
    ({"model__vocab": 200}, "the tokenizer bytes has 257 tokens and model.vocab=200"),
    ({"train__batch": 4096}, "training rows of seq=32 tokens and one batch needs 4096"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD_VALUES, ids=[sentence for _, sentence in BAD_VALUES])
def test_a_bad_value_is_one_sentence_and_leaves_no_folder(
    changes: dict[str, Any],
    sentence: str,
    text: Path,
    tmp_path: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experiments.train_lm.train", lambda job: pytest.fail("training began"))
    assert sentence in refused([*arguments(text, **changes), "--out", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            ["--devices", "8"],
            "mesh data=2 tensor=2 is 4 devices but 8 are there; set one axis to -1 or change the sizes",
        ),
        (["--devices", "0"], "--devices 0 is below 1"),
        (["--recipe", "llama_tiny_stdlb"], "unknown recipe 'llama_tiny_stdlb'; did you mean 'llama_tiny_stdlib'?"),
        (["--recipe", "meshpar.mesh.build:abstract_mesh"], "'meshpar.mesh.build:abstract_mesh' needs spec"),
        (
            ["--recipe", "meshpar.compat:backend_started"],
            "returned a bool, not a meshpar.Recipe; name a function that does",
        ),
        (["--recipe", "nowhere:tiny"], "no module 'nowhere' here"),
        (["--set", "train.steps"], "override 'train.steps' is not key=value"),
        (["--resume", "always"], "--resume always does not say which run to continue; name its folder with --out"),
    ],
)
def test_a_bad_option_is_one_sentence(command: list[str], sentence: str, text: Path, capsys: Capsys) -> None:
    assert sentence in refused([*arguments(text), *command], capsys)


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_text_is_one_sentence(content: str, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "empty.txt").write_text(content)
    sentence = refused([*arguments(tmp_path / "empty.txt"), "--out", str(tmp_path / "run")], capsys)
    assert "holds only blank text" in sentence
    assert not (tmp_path / "run").exists()


def test_a_text_shorter_than_a_batch_is_one_sentence(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "short.txt").write_text("one line of text\n" * 10)
    sentence = refused([*arguments(tmp_path / "short.txt"), "--out", str(tmp_path / "run")], capsys)
    assert "training rows of seq=32 tokens and one batch needs 8; use more text" in sentence
    assert not (tmp_path / "run").exists()


def test_an_old_run_is_not_overwritten(text: Path, tmp_path: Path, finished: Finished, capsys: Capsys) -> None:
    before = (finished.folder / "metrics.jsonl").read_bytes()
    again = [*arguments(text), "--out", str(finished.folder)]
    assert "holds a run already; leave --resume out to go on" in refused([*again, "--resume", "never"], capsys)
    shorter = [*arguments(text, train__steps=5), "--out", str(finished.folder)]
    assert "has 6 steps behind it and train.steps=5" in refused(shorter, capsys)
    assert main(again) == 0
    assert "has all 6 steps behind it; set train.steps to more to go on" in capsys.readouterr().out
    assert (finished.folder / "metrics.jsonl").read_bytes() == before


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    text: Path, tmp_path: Path, finished: Finished
) -> None:
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((finished.folder / name).read_bytes())
    assert main([*arguments(text, train__sample_tokens=0, train__export="none"), "--out", str(tmp_path)]) == 0
    assert losses_of(tmp_path) == losses_of(finished.folder)


def test_two_runs_in_one_folder_refuse_each_other(text: Path, tmp_path: Path, capsys: Capsys) -> None:
    with lock(tmp_path / "run"):
        sentence = refused([*arguments(text), "--out", str(tmp_path / "run")], capsys)
    assert f"is in use by process {os.getpid()} on" in sentence
    lock(tmp_path / "run").close()  # which the end of the first has made free


@pytest.mark.parametrize("folder", ["{text}", "{text}/run", "/proc/run"])
def test_a_folder_that_cannot_be_made_is_one_sentence(
    folder: str, text: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.train_lm.train", lambda job: pytest.fail("training began"))
    sentence = refused([*arguments(text), "--out", folder.format(text=text)], capsys)
    assert sentence.startswith(f"--out {folder.format(text=text)} cannot be made")


def test_a_folder_that_is_read_only_is_one_sentence(
    text: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.train_lm.train", lambda job: pytest.fail("training began"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # permissions do not bind every user
    assert "cannot be written to" in refused([*arguments(text), "--out", str(tmp_path)], capsys)


def test_a_fixed_mesh_is_checked_before_devices_are_emulated(
    text: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpar.mesh.devices.choose_devices", lambda *_: pytest.fail("devices were asked for"))
    assert "batch=8 is not divisible by data=20000" in refused(arguments(text, mesh="data=20000"), capsys)


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"model__embed": 64}, "began with model.embed=32, not 64"),
    ({"optimizer__name": "sgd"}, "began with optimizer.name=adamw, not sgd"),
    ({"data__seed": 1, "train__seed": 1}, "began with data.seed=0, not 1, train.seed=0, not 1; give the recipe and"),
    ({"train__batch": 16}, "began with train.batch=8, not 16"),
]


@pytest.mark.parametrize(("changes", "sentence"), CHANGED, ids=[sentence for _, sentence in CHANGED])
def test_a_run_is_not_continued_as_another(
    changes: dict[str, Any], sentence: str, text: Path, finished: Finished, capsys: Capsys
) -> None:
    before = {name: (finished.folder / name).read_bytes() for name in ("config.json", "metrics.jsonl", "summary.json")}
    again = [*arguments(text, train__steps=8, **changes), "--out", str(finished.folder)]
    assert sentence in refused(again, capsys)
    assert {name: (finished.folder / name).read_bytes() for name in before} == before


def test_what_a_model_refuses_while_it_is_traced_is_one_sentence(
    text: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("such a block has no layout here")

    monkeypatch.setattr("models.llama.model.Llama.block", refuse)
    monkeypatch.setattr("experiments.train_lm.train", lambda job: pytest.fail("training began"))
    command = [*arguments(text), "--out", str(tmp_path / "run")]
    assert refused(command, capsys) == "such a block has no layout here"
    assert not (tmp_path / "run").exists()


def test_a_run_whose_recipe_is_lost_is_not_continued(
    text: Path, tmp_path: Path, finished: Finished, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.train_lm.train", lambda job: pytest.fail("training began"))
    shutil.copytree(finished.folder, tmp_path / "run")
    for content in (None, "", "[]", "{}", '{"recipe": 3}'):
        (tmp_path / "run" / "config.json").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "run" / "config.json").write_text(content)
        again = [*arguments(text, train__steps=8), "--out", str(tmp_path / "run")]
        assert "config.json does not tell the recipe of this run" in refused(again, capsys)


def test_a_restore_that_fails_leaves_the_folder_as_it_was(
    text: Path, tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("meshpar.checkpoint.manager.Checkpoints.restore", broken)
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 0.0}\n')
    before = {name: (folder / name).read_bytes() for name in ("config.json", "metrics.jsonl", "summary.json")}
    with pytest.raises(OSError, match="the disk is gone"):
        main([*arguments(text, train__steps=8, optimizer__lr=1e-3), "--out", str(folder)])
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_run_that_goes_on_has_no_summary_before_it_ends(
    text: Path, tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshpar.train.trainer.fit", killed)
    shutil.copytree(finished.folder, tmp_path / "run")
    assert main([*arguments(text, train__steps=8), "--out", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_signal_during_the_last_evaluation_ends_the_run_and_loses_no_step(
    text: Path, tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    def signalled(*_: Any, limit: int | None, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    shutil.copytree(finished.folder, tmp_path / "run")
    again = [*arguments(text, train__steps=8), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr("meshpar.train.data.validation_batches", signalled)
        assert main(again) == 130
    assert (tmp_path / "run" / "checkpoints" / "8").is_dir()
    capsys.readouterr()
    assert main(again) == 0
    assert "step 8/8  loss" not in capsys.readouterr().out  # no step is left
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 8


def test_resuming_without_a_checkpoint_is_one_sentence(text: Path, tmp_path: Path, capsys: Capsys) -> None:
    sentence = refused([*arguments(text), "--out", str(tmp_path / "run"), "--resume", "always"], capsys)
    assert "holds no checkpoint; leave --resume out to start there" in sentence
    assert not (tmp_path / "run").exists()


def test_keys_lists_what_can_be_set(capsys: Capsys) -> None:
    assert main(["--keys"]) == 0
    shown = capsys.readouterr().out
    assert "train.steps" in shown and "mesh" in shown and "optimizer.lr" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["--set", "mesh=data=3 fsdp=-1", "--devices", "8"], "does not divide 8"),
        (["--set", "mash=data=2"], "unknown key 'mash'; did you mean 'mesh'?"),
    ],
)
def test_a_real_process_says_one_sentence_and_exits_with_2(command: list[str], sentence: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "experiments.train_lm", "--out", str(tmp_path / "run"), *command]
    done = subprocess.run(run, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and sentence in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
