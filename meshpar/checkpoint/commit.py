"""How a checkpoint appears whole: written beside its name by all processes, sealed, and named with one rename.

Each process writes its own shards into `300.writing` and seals them: on the disk, with a checksum. Process 0 then adds
index and manifest and renames the folder to `300`. Processes meet after each part, also after one that failed, and tell
one another by what lies on disk.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from meshpar.checkpoint import arrays
from meshpar.checkpoint.manifest import NAME, STATE, Manifest, checksum, to_text

_WAIT_MS = 600_000  # how long processes wait for one another during a save
_numbers = itertools.count()


def next_number() -> str:
    """What the processes call the meetings of a save by; drawn where all of them save in one order."""
    return str(next(_numbers))


def write_step(
    final: Path,
    leaves: Mapping[str, jax.Array],
    copied: Callable[[], None],
    *,
    number: str,
    room: arrays.Room,
    begin: Callable[[], None],
    commit: Callable[[], None],
) -> None:
    """A save from its beginning to its end; runs in a thread of each process.

    Args:
      final: the folder that is to appear.
      leaves: the arrays by path.
      copied: is called when the arrays are off the devices, or will not be read any more.
      number: from `next_number`.
      room: host memory of earlier saves, to be used again.
      begin, commit: what process 0 does before anything is written, and when all is.

    Raises:
      Whatever went wrong here; RuntimeError where it did in another process.
    """
    temporary = _temporary(final)
    first = jax.process_index() == 0
    failure: BaseException | None = None

    def make() -> None:
        begin()
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / STATE).mkdir(parents=True)

    def write() -> None:
        if not (temporary / STATE).exists():
            raise RuntimeError("process 0 could not make the folder")
        commits = arrays.begin(temporary / STATE, leaves, room)
        copied()
        for of_array in commits:
            of_array.result()
        own = {path.relative_to(temporary).as_posix(): _seal(path) for path in arrays.own_files(temporary / STATE)}
        _part(temporary, jax.process_index()).write_text(json.dumps(own))

    for name, part, mine in (("made", make, first), ("written", write, True), ("named", commit, first)):
        if mine and failure is None:
            try:
                part()
            except BaseException as error:
                failure = error
                copied()  # nothing more is read
        _meet(number, name)
    if temporary.exists() and failure is None:
        failure = RuntimeError("another process could not write its part")
    _meet(number, "seen")
    if failure is not None:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise failure


def complete(final: Path, manifest: Manifest) -> None:
    """The index, the checksums of all processes and the manifest, in the folder that has no name yet."""
    temporary = _temporary(final)
    sealed: dict[str, tuple[int, int]] = {}
    for index in range(jax.process_count()):
        part = _part(temporary, index)
        if not part.exists():
            raise RuntimeError(f"process {index} could not write its part")
        sealed |= json.loads(part.read_text())
        part.unlink()
    arrays.merge(temporary / STATE)
    names = [path.relative_to(temporary).as_posix() for path in arrays.files(temporary / STATE)]
    files = {name: sealed.get(name) or _seal(temporary / name) for name in names}
    (temporary / NAME).write_text(to_text(dataclasses.replace(manifest, files=files)))
    _sync(temporary / NAME)
    for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
        _sync(folder)


def put_in_place(final: Path) -> None:
    """Names the folder. What had the name stays until then, and keeps it where the rename fails."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        rename(final, replaced)
    try:
        _temporary(final).rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def rename(path: Path, to: Path) -> None:
    """Renames a folder, over one that has the new name."""
    shutil.rmtree(to, ignore_errors=True)
    path.rename(to)


def _temporary(final: Path) -> Path:
    return final.with_name(f"{final.name}.writing")


def _meet(number: str, name: str) -> None:
    """Waits for all processes."""
    import orbax.checkpoint as ocp

    ocp.multihost.get_barrier_sync_fn()(key=f"meshpar_checkpoint_{number}_{name}", timeout_ms=_WAIT_MS)


def _part(temporary: Path, index: int) -> Path:
    """Where a process leaves the checksums of what it wrote, until process 0 has put them into the manifest."""
    return temporary / f"process_{index}.json"


def _seal(path: Path) -> tuple[int, int]:
    """Makes a file outlast a loss of power; returns its size and checksum."""
    _sync(path)
    return checksum(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
