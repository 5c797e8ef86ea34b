"""Checkpoints that lose nothing: saved in the background, whole or not there, checked before they are trusted.

A save copies the arrays off the devices while the caller waits, and writes them in a thread: Orbax's array files into
`300.writing`, then checksums and the manifest, then one rename to `300`. Each process writes its own shards; process 0
renames. So whatever stops a run (an exception, kill -9, a full disk), a folder that is called by its step is whole.

A restore reads straight into the shards of its target, on whatever mesh that lies. It first compares every file with
the manifest and passes over a damaged step with a message; then `reshard.compare` says what will change.

    300           a checkpoint          300.writing   not finished; removed by the next run's first save
    300.replaced  while 300 is saved a second time      300.deleted   being removed
    300.unused    a newer step that a run went back from: never read, yours to delete
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # its end-of-interpreter hook must be there before ours, see `_at_exit`
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from meshpar.checkpoint.manifest import (
    NAME,
    STATE,
    Manifest,
    checksum,
    damage,
    read_manifest,
    to_text,
)
from meshpar.checkpoint.reshard import Report, axes_by_path, compare, describe_leaf, mesh_of, named_leaves
from meshpar.interfaces import PyTree

State = TypeVar("State")
Log = Callable[[str], object]

_WAIT_MS = 600_000  # how long processes wait for one another at the end of a save


class SaveError(RuntimeError):
    """A save failed; the message says which step and why. The older steps are as they were."""

    def __init__(self, step: int, folder: Path, cause: BaseException):
        super().__init__(
            f"step {step} was not saved in {folder}: {cause}; older steps are as they were, and {step} can be saved again"
        )
        self.step = step


class _Save:
    """One save: its thread, and how it ended."""

    def __init__(self, step: int, write: Callable[[threading.Event], None]):
        self.step = step
        self.error: BaseException | None = None
        self._write = write
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")

    def start(self) -> None:
        """Begins, and returns once the arrays may be donated."""
        self._thread.start()
        self._copied.wait()

    def finish(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write(self._copied)
        except BaseException as error:  # told to the caller by `Checkpoints.wait`
            self.error = error
        finally:
            self._copied.set()


class Checkpoints:
    """The checkpoints of one run, by step. Nothing is written before the first save.

    With several processes all of them call `save`, `restore`, `newest_whole`, `wait` and `close`, with the same steps;
    the folder is one that all of them see.
    """

    def __init__(self, folder: Path, *, keep: int = 2, best: int = 0, axes: PyTree | None = None):
        """Args:
        keep: how many of the newest stay.
        best: how many of those with the lowest metric stay besides.
        axes: the logical axes of the parameters (`Model.axes`), for the manifests.

        Raises:
          ValueError: `keep` is below 1 or `best` negative.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; use 1 or more")
        if best < 0:
            raise ValueError(f"best={best} is negative; 0 keeps none for its metric")
        self.folder = folder.absolute()
        self._keep = keep
        self._best = best
        self._axes = axes
        self._save: _Save | None = None
        self._restored: int | None = None  # the step that this run went on from, until its first save
        self._tidied = False

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, state: PyTree, *, extra: Mapping[str, Any] | None = None, metric: float | None = None
    ) -> None:
        """Writes a state in the background. The arrays may be donated when this returns.

        An earlier save is finished first. A step that exists is replaced.

        Args:
          state: a pytree of jax arrays.
          extra: JSON values to keep in the manifest: plan, recipe, versions, ...
          metric: what the best checkpoints are chosen by, lower is better.

        Raises:
          SaveError: this save cannot begin, or an earlier one failed (then this one has not begun).
          ValueError: `extra` has no JSON form.
        """
        self.wait()
        for other in list(_unfinished):  # another object on the same folder
            if other.folder == self.folder:
                other._finish()
        leaves = named_leaves(state)
        axes = axes_by_path(leaves, self._axes)
        manifest = Manifest(
            step=step,
            mesh=mesh_of(leaves),
            leaves={path: describe_leaf(leaf, axes.get(path)) for path, leaf in leaves.items()},
            metric=None if metric is None or not math.isfinite(metric) else float(metric),
            extra=extra or {},
        )
        to_text(manifest)
        arrays = {path: jax.random.key_data(leaf) if _is_key(leaf) else leaf for path, leaf in leaves.items()}
        self._save = _Save(step, functools.partial(self._write, manifest, arrays, str(next(_numbers))))
        _unfinished.add(self)
        self._save.start()
        if self._save.error is not None:
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          SaveError: it failed. Raised once.
        """
        save = self._finish()
        self._save = None
        if save is not None and save.error is not None:
            raise SaveError(save.step, self.folder, save.error) from save.error

    def close(self) -> None:
        """Waits for the last save, like `wait`. The end of the interpreter does too, but can only print an error."""
        self.wait()

    def _finish(self) -> _Save | None:
        save = self._save
        if save is not None:
            save.finish()
            _unfinished.discard(self)
        return save

    def _write(
        self, manifest: Manifest, arrays: Mapping[str, jax.Array], number: str, copied: threading.Event
    ) -> None:
        """A save from its beginning to its end; runs in a thread of each process."""
        import orbax.checkpoint as ocp

        meet = functools.partial(_meet, ocp.multihost.get_barrier_sync_fn(), number)
        final = self.folder / str(manifest.step)
        temporary = final.with_name(f"{final.name}.writing")
        first = jax.process_index() == 0
        mine = temporary / f"process_{jax.process_index()}.json"
        failure: BaseException | None = None
        try:
            if first:
                self._tidy()
                shutil.rmtree(temporary, ignore_errors=True)
                (temporary / STATE).mkdir(parents=True)
            meet("made")
            handler = _handler()
            arguments = ocp.args.PyTreeSave(dict(arrays))
            commits = asyncio.run(handler.async_save(_path(temporary / STATE), args=arguments)) or []
            copied.set()
            for commit in commits:
                commit.result()
            own = temporary / STATE / f"ocdbt.process_{jax.process_index()}"
            mine.write_text(json.dumps({str(path): _seal(path) for path in _files(own)}))
        except BaseException as error:
            failure = error
            copied.set()
        meet("written")
        if first:
            try:
                if failure is None:
                    self._commit(manifest, temporary, final)
            except BaseException as error:
                failure = error
            if failure is not None:
                shutil.rmtree(temporary, ignore_errors=True)
        meet("committed")
        if failure is not None:
            raise failure
        if not final.exists():
            raise RuntimeError("another process could not write its part")

    def _commit(self, manifest: Manifest, temporary: Path, final: Path) -> None:
        """What process 0 does when all have written: the index, the checksums, the manifest, the name."""
        sealed: dict[str, tuple[int, int]] = {}
        for index in range(jax.process_count()):
            part = temporary / f"process_{index}.json"
            if not part.exists():
                raise RuntimeError(f"process {index} could not write its part")
            sealed |= {path: (size, crc) for path, (size, crc) in json.loads(part.read_text()).items()}
            part.unlink()
        _handler().finalize(_path(temporary / STATE))
        files = {
            path.relative_to(temporary).as_posix(): sealed.get(str(path)) or _seal(path)
            for path in _files(temporary / STATE)
        }
        written = temporary / NAME
        written.write_text(to_text(dataclasses.replace(manifest, files=files)))
        _sync(written)
        _sync(temporary)
        base = manifest.step if self._restored is None else self._restored
        for step in self._folders():
            if step > base and step != manifest.step:
                _rename(self.folder / str(step), self.folder / f"{step}.unused")
        self._restored = None
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            _rename(final, replaced)
        temporary.rename(final)
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        """Removes what is neither among the newest nor among the best."""
        whole = self.steps()
        measured = [(metric, -step) for step in whole if (metric := self.manifest(step).metric) is not None]
        stay = {*whole[-self._keep :], *(-step for _, step in sorted(measured)[: self._best])}
        for step in self._folders():
            if step not in stay and step < whole[-1]:
                gone = self.folder / f"{step}.deleted"
                _rename(self.folder / str(step), gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _tidy(self) -> None:
        """Clears away what an earlier run could not finish."""
        if self._tidied:
            return
        self._tidied = True
        self._recover()
        for kind in ("writing", "deleted", "replaced"):
            for path in self.folder.glob(f"*.{kind}"):
                shutil.rmtree(path, ignore_errors=True)

    def _recover(self) -> None:
        """Gives a step its name back that a run was about to replace when it was stopped."""
        for path in self.folder.glob("*.replaced"):
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))

    # --- what there is -----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are there with all their files, oldest first. Needs no devices, and reads no array."""
        return [step for step in self._folders() if self._damage(step) is None]

    def latest(self) -> int | None:
        """The newest of `steps`."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest metric, the newest of equals; None when none has one."""
        measured = [(metric, -step) for step in self.steps() if (metric := self.manifest(step).metric) is not None]
        return -min(measured)[1] if measured else None

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint of a step holds.

        Raises:
          ValueError: there is none.
        """
        return read_manifest(self.folder, step)

    def newest_whole(self, *, log: Log = print) -> int | None:
        """The newest step of which every file has the checksum that it was written with; None when there is none.

        This reads the checkpoint once; processes share the work. What is passed over is logged.
        """
        self.wait()
        if jax.process_index() == 0:
            self._recover()
        for step in reversed(self._agree(self._folders())):
            wrong = self._damage(step, read=True)
            if not any(self._gather(wrong is not None)):
                return step
            _say(log, f"passing over step {step} in {self.folder}: {wrong or 'another process cannot read it'}")
        return None

    def _folders(self) -> list[int]:
        if not self.folder.exists():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def _damage(self, step: int, *, read: bool = False) -> str | None:
        try:
            manifest = self.manifest(step)
        except ValueError as error:
            return str(error)
        mine = sorted(manifest.files)[jax.process_index() :: jax.process_count()] if read else ()
        return damage(self.folder, manifest, read=mine)

    # --- restoring ---------------------------------------------------------------------------------------------------

    def restore(
        self,
        target: State,
        step: int | None = None,
        *,
        fresh: Callable[[], State] | None = None,
        log: Log = print,
    ) -> State:
        """Reads a checkpoint into the shapes, dtypes and shardings of `target`.

        Args:
          target: a pytree of ShapeDtypeStructs with shardings (`Training.abstract_state`), or of arrays.
          step: None: the newest that is whole, older ones when the newest are damaged.
          fresh: makes a first state; called when the checkpoint lacks a part that may begin anew (a loss scale).
          log: gets what is passed over and what will change, in process 0.

        Raises:
          ValueError: there is no whole checkpoint, the given one is damaged, or it does not fit the target; the
            sentence names path and both shapes.
        """
        step = self._choose(step, log)
        leaves = named_leaves(target)
        report = compare(self.manifest(step), leaves)
        values: dict[str, Any] = {}
        if report.fresh:
            if fresh is None:
                raise ValueError(
                    f"the checkpoint of step {step} has no {', '.join(report.fresh)}; "
                    "give restore a fresh= that makes a first state, or the plan that it was written with"
                )
            made = named_leaves(fresh())
            values = {path: made[path] for path in report.fresh}
        for line in report.lines():
            _say(log, line)
        newer = [other for other in self._folders() if other > step]
        if newer:
            _say(log, f"  newer: {', '.join(map(str, newer))}; the next save renames them to {newer[0]}.unused ...")
        values |= self._read(report, leaves)
        self._restored = step
        return jax.tree.unflatten(jax.tree.structure(target), [values[path] for path in leaves])

    def restore_params(self, target: PyTree, step: int | None = None, *, log: Log = print) -> PyTree:
        """Reads the parameters of a checkpoint alone: another optimizer, or none, on any mesh and in any float dtype.

        Args:
          target: parameters as ShapeDtypeStructs with shardings, or arrays.

        Raises:
          ValueError: as for `restore`.
        """
        step = self._choose(step, log)
        leaves = {f"params/{path}": leaf for path, leaf in named_leaves(target).items()}
        report = compare(self.manifest(step), leaves)
        for line in dataclasses.replace(report, left_over=()).lines():
            _say(log, line)
        values = self._read(report, leaves)
        return jax.tree.unflatten(jax.tree.structure(target), [values[path] for path in leaves])

    def _choose(self, step: int | None, log: Log) -> int:
        if step is None:
            step = self.newest_whole(log=log)
            if step is None:
                raise ValueError(
                    f"{self.folder} holds no whole checkpoint; train without resuming, or give another run folder"
                )
            return step
        self.wait()
        wrong = self._damage(step, read=True)
        if any(self._gather(wrong is not None)):
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"the checkpoint of step {step} in {self.folder} is not whole ({wrong}); there are: {there}")
        return step

    def _read(self, report: Report, leaves: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Values of the target's leaves by path, read and cast into their shards on the host, one shard at a time."""
        import orbax.checkpoint as ocp

        values: dict[str, jax.Array] = {}
        left = [match for match in report.matches if match.source is not None]
        while left:  # twice where parameters and masters have one source
            sources = {match.source: match for match in reversed(left)}
            wanted = {source: _plain(leaves[match.path]) for source, match in sources.items()}
            arguments = {
                source: ocp.ArrayRestoreArgs(
                    restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
                )
                for source, leaf in wanted.items()
            }
            found = _handler().restore(
                _path(self.folder / str(report.step) / STATE),
                args=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True),
            )
            values |= {match.path: _like(found[source], leaves[match.path]) for source, match in sources.items()}
            left = [match for match in left if match.path not in values]
        return values

    # --- processes ---------------------------------------------------------------------------------------------------

    def _agree(self, steps: list[int]) -> list[int]:
        """What process 0 sees, in all processes."""
        if jax.process_count() == 1:
            return steps
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
        sent = np.resize(np.asarray(steps or [0], np.int32), count)
        return [int(step) for step in multihost_utils.broadcast_one_to_all(sent)]

    def _gather(self, value: bool) -> list[bool]:
        if jax.process_count() == 1:
            return [value]
        return [bool(each) for each in multihost_utils.process_allgather(np.asarray(value))]


_unfinished: set[Checkpoints] = set()  # those with a save that nobody has waited for
_numbers = itertools.count()  # of saves: what processes call their meetings by


def _at_exit() -> None:
    for checkpoints in list(_unfinished):
        try:
            checkpoints.wait()
        except SaveError as error:
            print(f"error: {error}", file=sys.stderr)


# A save that is still running needs thread pools, and the interpreter stops those before it calls `atexit`. So this is
# the hook that stops them (concurrent.futures.thread), which runs in reverse order and has no public name.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]


def _meet(barrier: Callable[..., None], number: str, name: str) -> None:
    """Waits for all processes."""
    barrier(key=f"meshpar_checkpoint_{number}_{name}", timeout_ms=_WAIT_MS)


@functools.cache
def _handler() -> Any:
    """Orbax's reader and writer of arrays. Without compression: trained weights shrink by a tenth, for most of the
    time that a save takes.
    """
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _path(path: Path) -> Any:
    from etils import epath

    return epath.Path(path)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


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


def _rename(path: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    path.rename(to)


def _say(log: Log, text: str) -> None:
    if jax.process_index() == 0:
        log(text)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> jax.ShapeDtypeStruct:
    """What is read for a leaf: key data for a typed PRNG key; on the first device where it is not said on which."""
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)


def _like(array: jax.Array, leaf: Any) -> jax.Array:
    if not _is_key(leaf):
        return array
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)  # which asks for an array, or a traced one
    return jax.random.wrap_key_data(array, impl=impls[0])
