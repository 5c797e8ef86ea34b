"""`python -m meshpar launch` with commands that last milliseconds; training through it is in
`tests/cases/test_processes.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshpar import cli, launch
from meshpar.train.recipe import load_recipe

REPOSITORY = Path(__file__).parents[1]
PROCESS = "import os, signal, sys, time; process = os.environ['MESHPAR_PROCESS']; "


def run(program: str, *flags: str) -> int:
    """The exit code of a launch of a Python program."""
    return launch.main([*flags, "--", sys.executable, "-S", "-c", PROCESS + program])


def test_each_process_learns_its_place_and_prints_behind_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("MESHPAR_PROCESSES", "MESHPAR_DEVICES", "JAX_PLATFORMS", "MESHPAR_RESTARTS")
    program = (
        f"print(*[os.environ[name] for name in {names}]); print(os.environ['MESHPAR_COORDINATOR'], file=sys.stderr)"
    )
    assert run(program, "--processes", "2", "--devices", "4", "--port", "1234") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [f"[{i}] {line}" for i in (0, 1) for line in ("127.0.0.1:1234", "2 4 cpu 0")]


def test_without_devices_the_command_finds_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert run("print('MESHPAR_DEVICES' in os.environ, 'JAX_PLATFORMS' in os.environ)", "--processes", "1") == 0
    assert capsys.readouterr().out == "[0] False False\n"


def test_lines_come_when_they_are_printed() -> None:
    program = "print('first', flush=False); time.sleep(30)"
    command = [
        sys.executable,
        "-m",
        "meshpar",
        "launch",
        "--processes",
        "1",
        "--",
        sys.executable,
        "-c",
        PROCESS + program,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY, text=True
    ) as process:
        begun = time.monotonic()
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] first\n"
        assert time.monotonic() - begun < 20
        process.terminate()
        process.wait(timeout=15)


def test_what_gloo_tells_of_its_connections_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    gloo = "[Gloo] Rank {} is connected to 3 peer ranks. Expected number of connected peer ranks is : "
    first, second = gloo.format(1), gloo.format(2)
    program = f"print(17); print({first + second + '3'!r}); print(3); print({'[Gloo] Rank ' + second + '3'!r})"
    program += f"; print({first.removeprefix('[Gloo] Rank ') + '3'!r}); print(18); print('\\n[Gloo] Rank', 'one')"
    assert run(program, "--processes", "1") == 0
    assert capsys.readouterr().out.splitlines() == ["[0] 17", "[0] 18", "[0] ", "[0] [Gloo] Rank one"]


@pytest.mark.parametrize(
    ("death", "how", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "process 1 was killed by SIGKILL; ending the other 2", 137),
        ("sys.exit(7)", "process 1 ended with exit code 7; ending the other 2", 7),
    ],
)
def test_one_that_dies_ends_all_and_is_named(
    death: str, how: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    assert run(f"{death} if process == '1' else time.sleep(60)", "--processes", "3") == code
    assert time.monotonic() - begun < 10
    assert capsys.readouterr().err == f"launch: {how}\n"


def test_one_that_does_not_listen_to_sigterm_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.3)
    deaf = "signal.signal(signal.SIGTERM, lambda *_: print('told')); print(os.getpid()); time.sleep(1); time.sleep(60)"
    assert run(f"time.sleep(0.5) or sys.exit(3) if process == '1' else exec({deaf!r})", "--processes", "2") == 3
    pid, told = capsys.readouterr().out.splitlines()
    assert told == "[0] told"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.removeprefix("[0] ")), 0)


def test_of_two_that_die_together_the_victim_is_not_blamed() -> None:
    codes = {"by SIGKILL": -9, "by an error": 1, "by jax, with SIGABRT": -6}
    assert sorted(codes, key=lambda name: launch._guilt(codes[name])) == list(codes)


def test_a_death_starts_all_again_until_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    program = "print(os.environ['MESHPAR_STARTED']); sys.exit(os.environ['MESHPAR_RESTARTS'] != '2' and process == '0')"
    assert run(program, "--processes", "2", "--max-restarts", "5") == 0
    printed = capsys.readouterr()
    assert [line for line in printed.err.splitlines() if "again" in line] == [
        "launch: starting all 2 again, restart 1 of 5",
        "launch: starting all 2 again, restart 2 of 5",
    ]
    assert len({line.partition("] ")[2] for line in printed.out.splitlines()}) == 1  # one run, however often it starts


def test_each_start_has_a_port_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("print(os.environ['MESHPAR_COORDINATOR']); sys.exit(1)", "--processes", "1", "--max-restarts", "2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("[0] 127.0.0.1:") for line in lines)


def test_bad_input_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sys.exit(2)", "--processes", "1", "--max-restarts", "3") == 2
    assert "again" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_and_what_it_ends_is_not_started_again(number: signal.Signals) -> None:
    program = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved')); signal.signal(signal.SIGINT, lambda *_: "
        "sys.exit('saved')); print('ready', flush=True); time.sleep(60)"
    )
    flags = ["--processes", "2", "--max-restarts", "3", "--"]
    command = [sys.executable, "-m", "meshpar", "launch", *flags, sys.executable, "-S", "-c", PROCESS + program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=REPOSITORY, text=True
    ) as process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(number)
        printed, _ = process.communicate(timeout=20)
    assert {"[0] saved", "[1] saved"} <= set(printed.splitlines())
    assert "again" not in printed
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--processes", "0", "--", "true"], "--processes 0 must be at least 1"),
        (["--processes", "2", "--devices", "0", "--", "true"], "--devices 0 must be at least 1"),
        (["--processes", "2", "--max-restarts", "-1", "--", "true"], "--max-restarts -1 must be at least 0"),
        (["--processes", "2"], "there is no command to run; write it after --"),
        (["--processes", "2", "--"], "there is no command to run; write it after --"),
        (["--processes", "2", "--", "no-such-program"], r"no-such-program cannot be started \(No such file"),
    ],
)
def test_bad_flags_are_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: {sentence}", line)


def test_help_shows_a_command_that_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "--help"])
    assert ended.value.code == 0
    assert "python -m meshpar launch --processes 2 --devices 4 --" in capsys.readouterr().out


def test_commands_are_listed_and_a_wrong_one_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "launch" in capsys.readouterr().out
    assert cli.main(["lunch"]) == 2
    assert "unknown command 'lunch'; did you mean 'launch'?" in capsys.readouterr().err


# --- job files -------------------------------------------------------------------------------------------------------

JOBS = REPOSITORY / "experiments" / "launch"


def submitted(script: str, program: str, folder: Path, *arguments: str, **environment: str) -> list[str]:
    """The words that a job file calls its cluster's program with."""
    stub = folder / "bin" / program
    stub.parent.mkdir(exist_ok=True)
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    paths = f"{stub.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", JOBS / script, *arguments],
        env=os.environ | {"PATH": paths} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_slurm_job_starts_each_task_and_a_requeued_one_in_the_same_folder(tmp_path: Path) -> None:
    job = dict(SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_ID="77", PYTHON="python3")
    words = submitted("slurm.sh", "srun", tmp_path, "--set", "mesh=data=2 fsdp=8", **job)
    run = tmp_path / "runs" / "slurm-77"
    assert words[words.index("python3") :] == [
        *("python3", "-m", "experiments.train_lm", "--out", str(run)),
        *("--set", "mesh=data=2 fsdp=8"),
    ]


def test_the_xpk_job_quotes_the_command(tmp_path: Path) -> None:
    words = submitted("xpk.sh", "xpk", tmp_path, "--set", "mesh=data=4 fsdp=16", CLUSTER="c", IMAGE="i")
    assert words[-1] == r"python -m experiments.train_lm --set mesh=data=4\ fsdp=16"


def test_the_gke_job_has_as_many_pods_as_its_chips_need_hosts() -> None:
    text = (JOBS / "gke.yaml").read_text()
    rows, columns = map(int, re.findall(r"gke-tpu-topology: (\d+)x(\d+)", text)[0])
    (chips,) = map(int, re.findall(r"google.com/tpu: (\d+)", text))
    pods = {int(count) for count in re.findall(r"(?:parallelism|completions): (\d+)", text)}
    assert pods == {rows * columns // chips}
    (recipe,) = re.findall(r"--recipe (\w+)", text)
    assert load_recipe(recipe).plan.mesh.product == rows * columns
