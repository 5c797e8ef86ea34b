"""c59 and what else changes between one process and several: real processes over loopback, beside one with 8
devices.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments import train_lm
from meshpar.checkpoint.manager import Checkpoints
from meshpar.launch import _free_port
from tests.cases import processes
from tests.conformance.runs import BATCH, batch_of
from tests.experiments.test_train_lm import arguments

pytestmark = pytest.mark.slow  # each pair starts jax twice; tests/mesh/test_distributed.py has a short one

REPOSITORY = Path(__file__).parents[2]
LIMIT = 240  # seconds after which a pair counts as stuck


def surroundings() -> dict[str, str]:
    """The environment of tests without what was set for 8 devices; programs compile as tests do."""
    return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}


def launched(module: str, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a module in two processes of 4 devices."""
    launcher = [sys.executable, "-m", "meshpar", "launch", "--processes", "2", "--devices", "4", *flags, "--"]
    return subprocess.run(
        [*launcher, sys.executable, "-m", module, *words],
        cwd=REPOSITORY,
        env=surroundings(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What two processes found, and what one with as many devices did."""

    folder: Path  # of the two: their checkpoints
    two: list[dict[str, Any]]
    one: dict[str, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder, alone = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    done = launched("tests.cases.processes", "everything", str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    two = [json.loads((folder / f"everything-{process}.json").read_text()) for process in (0, 1)]
    return Pair(folder=folder, two=two, one=json.loads(json.dumps(processes.everything(alone))))


@pytest.mark.parametrize("mesh", processes.MESHES)
def test_two_processes_of_4_devices_train_as_one_of_8(pair: Pair, mesh: str) -> None:
    for process in pair.two:
        assert process[mesh]["losses"] == pytest.approx(pair.one[mesh]["losses"], abs=1e-5)
    assert len(set(pair.one[mesh]["losses"])) == processes.STEPS


@pytest.mark.parametrize("mesh", processes.MESHES)
def test_c59_what_a_process_reads_has_the_same_shapes_and_values_in_one_and_in_two(pair: Pair, mesh: str) -> None:
    for process in pair.two:
        assert process[mesh]["shapes"] == pair.one[mesh]["shapes"]
        assert process[mesh]["tokens"] == pair.one[mesh]["tokens"] == batch_of(0).tokens.tolist()
        assert process[mesh]["evaluated"] == pytest.approx(pair.one[mesh]["evaluated"], rel=1e-5)
        assert process[mesh].get("sampled") == pair.one[mesh].get("sampled")
    assert all(shape == [] for shape, _ in pair.one[mesh]["shapes"].values())


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ("data=8", ([0, 1, 2, 3], [4, 5, 6, 7])),
        ("data=2 tensor=4", ([0, 1, 2, 3], [4, 5, 6, 7])),  # disjoint over data
        ("tensor=8", (list(range(BATCH)), list(range(BATCH)))),  # equal over tensor
        ("interleaved data=8", ([0, 2, 4, 6], [1, 3, 5, 7])),  # not one run
        ("interleaved data=4 tensor=2", (list(range(BATCH)), list(range(BATCH)))),
    ],
)
def test_each_process_reads_the_rows_of_its_devices(pair: Pair, mesh: str, rows: tuple[list[int], list[int]]) -> None:
    assert tuple(process[mesh]["own_rows"] for process in pair.two) == rows
    assert pair.one[mesh]["own_rows"] == list(range(BATCH))
    for process in pair.two:
        assert process[mesh]["tokens"] == batch_of(0).tokens.tolist()


def test_a_checkpoint_of_two_processes_restores_in_one(pair: Pair) -> None:
    mesh = processes.SPANNING
    training = processes.training_on(mesh, processes.MESHES[mesh])
    checkpoints = Checkpoints(pair.folder / "checkpoints")
    state = checkpoints.restore(training.abstract_state())
    checkpoints.close()
    assert int(state.step) == processes.STEPS
    sums = training.evaluate(state.params, training.place(batch_of(99)))
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        pair.two[0][mesh]["evaluated"], rel=1e-5
    )


# --- death -----------------------------------------------------------------------------------------------------------


def test_a_pair_of_which_one_is_killed_starts_again_and_ends_as_if_nothing_had_happened(
    pair: Pair, tmp_path: Path
) -> None:
    done = launched("tests.cases.processes", "die", str(tmp_path), flags=("--max-restarts", "1"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("launch:")]
    assert said == [
        "launch: process 1 was killed by SIGKILL; ending the other 1",
        "launch: starting all 2 again, restart 1 of 1",
    ]
    for process in (0, 1):
        result = json.loads((tmp_path / f"die-{process}.json").read_text())
        assert result["from"] == 2  # the checkpoint, not the beginning
        expected = pair.one[processes.WITHIN]["losses"][2:]
        assert list(result["losses"].values()) == pytest.approx(expected, abs=1e-5)


def test_train_lm_in_two_processes_prints_and_writes_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} says {number * number}\n" for number in range(1000)))
    words = arguments(text, mesh="data=2 tensor=4", train__sample_tokens=0)
    assert train_lm.main([*words, "--out", str(tmp_path / "one")]) == 0
    done = launched("experiments.train_lm", *words, "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert [line for line in done.stdout.splitlines() if not line.startswith("[0] ")] == []
    assert "run folder:" in done.stdout
    one, two = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("one", "two")
    )
    for name in ("step", "loss", "validation_loss"):
        assert [line.get(name) for line in two] == [pytest.approx(line.get(name), abs=1e-5) for line in one]
    assert json.loads((tmp_path / "two" / "config.json").read_text())["processes"] == 2


def interrupted(folder: Path, words: list[str], number: signal.Signals, *flags: str) -> tuple[int, str]:
    """`train_lm` in two processes, of which the second gets a signal when a few steps are done: the launcher's exit
    code, and what it said.
    """
    launcher = [sys.executable, "-m", "meshpar", "launch", "--processes", "2", "--devices", "4", *flags, "--"]
    command = [*launcher, sys.executable, "-m", "experiments.train_lm", *words, "--out", str(folder)]
    log, metrics = folder.with_suffix(".log"), folder / "metrics.jsonl"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=surroundings(), stdout=output, stderr=output)
    try:
        until = time.monotonic() + LIMIT
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 12) and time.monotonic() < until:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.02)
        members = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(members[1]), number)
        return process.wait(timeout=LIMIT), log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    """The words of a run, and the folder of the one that one process made of it."""
    folder = tmp_path_factory.mktemp("long")
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} says {number * number}\n" for number in range(1000)))
    plain = {"train__sample_tokens": 0, "train__export": "none", "train__tensorboard": False, "train__eval_every": 0}
    words = arguments(text, mesh="data=2 tensor=4", train__steps=150, train__checkpoint_every=5, **plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHPAR_CACHE", str(folder / "cache"))
        assert train_lm.main([*words, "--out", str(folder / "one")]) == 0
        yield words, folder / "one"


def assert_same_run(folder: Path, expected: Path) -> None:
    runs = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (folder, expected)
    ]
    for name in ("step", "data"):
        assert [line[name] for line in runs[0] if name in line] == [line[name] for line in runs[1] if name in line]
    losses = [[line["loss"] for line in run if "loss" in line] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


def test_a_signal_to_one_process_saves_the_same_step_in_both_and_one_process_goes_on(
    long_run: tuple[list[str], Path], tmp_path: Path
) -> None:
    words, expected = long_run
    code, said = interrupted(tmp_path / "run", words, signal.SIGTERM)
    assert code == 143, said[-3000:]
    (stopped,) = (line for line in said.splitlines() if "stopped by a signal after step" in line)
    step = int(stopped.split(" of ")[0].split()[-1])
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() == step < 150
    assert train_lm.main([*words, "--out", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", expected)


def test_a_pair_of_train_lm_goes_on_by_itself_when_one_is_killed(
    long_run: tuple[list[str], Path], tmp_path: Path
) -> None:
    words, expected = long_run
    code, said = interrupted(tmp_path / "run", words, signal.SIGKILL, "--max-restarts", "1")
    assert code == 0, said[-3000:]
    assert "launch: process 1 was killed by SIGKILL; ending the other 1" in said
    assert "restoring step" in said
    assert_same_run(tmp_path / "run", expected)


def test_without_a_launcher_the_death_of_one_ends_the_other_within_a_minute_with_a_message(tmp_path: Path) -> None:
    address = f"127.0.0.1:{_free_port()}"
    program = [sys.executable, "-m", "tests.cases.processes", "die", str(tmp_path), address, "2"]
    environment = surroundings() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    log = tmp_path / "log"
    with log.open("w") as stderr:
        members = [
            subprocess.Popen(
                [*program, str(process)], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=stderr
            )
            for process in (0, 1)
        ]
    try:
        assert members[1].wait(timeout=LIMIT) == -signal.SIGKILL
        died = time.monotonic()
        assert members[0].wait(timeout=90) != 0
        assert time.monotonic() - died < 60
        assert "Task 1 heartbeat timeout" in log.read_text()
    finally:
        for member in members:
            member.kill()
            member.wait()
