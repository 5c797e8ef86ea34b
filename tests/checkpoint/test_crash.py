"""Runs that are stopped at any moment, and disks that are full: what was saved before stays, and the run goes on."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.runs import finish, start

# Restores what there is, says so, then saves each step and says which ones are certainly on disk.
RESUMING = """
state = init() if checkpoints.latest() is None else checkpoints.restore(abstract)
print("begins at", number(state), flush=True)
for n in range(number(state) + 1, 100_000):
    state = step(state)
    checkpoints.save(n, state)
    print("surely", n - 1, flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing_beyond_the_last_complete_save(tmp_path: Path) -> None:
    rng = random.Random(0)
    sure = 0
    for _ in range(4):
        process = start(RESUMING, tmp_path)
        assert process.stdout
        line = process.stdout.readline()
        while not line.startswith("begins at"):
            assert line, process.communicate()[1]  # it ended by itself
            line = process.stdout.readline()
        begun = int(line.split()[-1])
        assert begun in (sure, sure + 1)
        lines, wanted = [process.stdout.readline()], begun + rng.randint(1, 3)
        while lines[-1].startswith("surely") and int(lines[-1].split()[-1]) < wanted:  # on a slow machine too
            lines.append(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.1))
        process.kill()
        lines += process.communicate()[0].splitlines()
        sure = max(int(text.split()[-1]) for text in lines if text.startswith("surely") and text.split()[-1].isdigit())
        assert sure >= wanted
    code, out, errors = finish("print(number(checkpoints.restore(abstract)) - checkpoints.latest())", tmp_path)
    assert (code, out.split()[-1]) == (0, "0"), errors


def test_a_save_that_fails_at_the_very_end_is_printed(tmp_path: Path) -> None:
    """Nobody can be told any more: the script is over."""
    body = """
checkpoints.save(1, step(init()))
checkpoints.wait()
commit._seal = lambda path: 1 / 0
checkpoints.save(2, step(init()))
"""
    code, _, errors = finish(body, tmp_path)
    assert code == 0
    assert f"error: step 2 was not saved in {tmp_path}: division by zero; older steps are as they were" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


# Step 2 does not fit; then there is room, and step 2 is saved after all. `room(False)` takes the room away.
FULL = """
state = step(init())
checkpoints.save(1, state)
checkpoints.wait()
room(False)
state = step(state)
try:
    checkpoints.save(2, state)
    checkpoints.wait()
except SaveError as error:
    print("said:", error)
print("there:", checkpoints.steps(), sorted(path.name for path in folder.iterdir()))
print("restored:", number(checkpoints.restore(abstract, log=lambda line: None)))
room(True)
checkpoints.save(2, state)
checkpoints.close()
print("again:", checkpoints.steps(), number(checkpoints.restore(abstract, log=lambda line: None)))
"""


def assert_recovered(code: int, out: str, errors: str, reason: str) -> None:
    said, there, restored, again = (out.splitlines() + [""] * 4)[:4]
    assert code == 0, errors
    assert said.startswith("said: step 2 was not saved in ")
    assert reason in said
    assert there == "there: [1] ['1']"
    assert restored == "restored: 1"
    assert again == "again: [1, 2] 2"


def test_a_file_that_may_not_grow_leaves_the_older_step_and_the_step_can_be_saved_again(tmp_path: Path) -> None:
    """A limit on the size of files: writes fail in the middle of the data, as they do on a full disk."""
    limit = """
import resource
def room(there):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if there else 300_000, resource.RLIM_INFINITY))
"""
    assert_recovered(*finish(limit + FULL, tmp_path), "File too large")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"file systems may not be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("left", [0, 1_500_000, 3_140_000], ids=["nothing", "data", "metadata"])
def test_a_full_disk_leaves_the_older_step_and_the_step_can_be_saved_again(left: int, small_disk: Path) -> None:
    """Of 8 MB a step takes 3.1: room for `left` bytes more ends the save at its start, in its data or after them."""
    fill = f"""
def room(there):
    import os
    filler = folder.parent / "filler"
    if there:
        filler.unlink()
    else:
        free = os.statvfs(folder)
        filler.write_bytes(bytes(free.f_bavail * free.f_frsize - {left}))
"""
    assert_recovered(*finish(fill + FULL, small_disk / "run"), "No space left on device")
