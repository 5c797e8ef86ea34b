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

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshpar.checkpoint import arrays
from meshpar.checkpoint.background import Save, SaveError, let_others_finish
from meshpar.checkpoint.commit import complete, next_number, put_in_place, rename, write_step
from meshpar.checkpoint.manifest import STATE, Manifest, damage, read_manifest, to_text
from meshpar.checkpoint.reshard import Report, axes_by_path, compare, describe_leaf, mesh_of, named_leaves
from meshpar.interfaces import PyTree

__all__ = ["Checkpoints", "SaveError"]

State = TypeVar("State")
Log = Callable[[str], object]


class Checkpoints:
    """The checkpoints of one run, by step. Nothing is written before the first save.

    With several processes all of them call `save`, `restore`, `newest_whole`, `wait` and `close`, with the same steps;
    the folder is one that all of them see.
    """

    def __init__(self, folder: Path | str, *, keep: int = 2, best: int = 0, axes: PyTree | None = None):
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
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._best = best
        self._axes = axes
        self._save: Save | None = None  # the last one, until it was waited for
        self._restored: int | None = None  # the step that this run went on from, until its first save
        self._room: arrays.Room = {}
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
        let_others_finish(self.folder)
        leaves = named_leaves(state)
        axes = axes_by_path(leaves, self._axes)
        manifest = Manifest(
            step=step,
            mesh=mesh_of(leaves),
            leaves={path: describe_leaf(leaf, axes.get(path)) for path, leaf in leaves.items()},
            metric=None if metric is None or not math.isfinite(metric) else float(metric),
            extra=extra or {},
        )
        to_text(manifest)  # refuses what cannot be written, before anything is
        write = functools.partial(
            write_step,
            self.folder / str(step),
            leaves,
            number=next_number(),
            room=self._room,
            begin=self._tidy,
            commit=lambda: self._commit(manifest),
        )
        self._save = Save(step, self.folder, write)
        if not self._save.start():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          SaveError: it failed. Raised once.
        """
        save, self._save = self._save, None
        if save is not None:
            save.wait()

    def close(self) -> None:
        """Waits for the last save, like `wait`. The end of the interpreter does too, but can only print an error."""
        self.wait()

    def _commit(self, manifest: Manifest) -> None:
        """What process 0 does when all have written."""
        final = self.folder / str(manifest.step)
        complete(final, manifest)
        self._set_aside(manifest.step)
        put_in_place(final)
        self._prune()

    def _set_aside(self, step: int) -> None:
        """Takes the names of steps that a run went back from, so that no run goes on from them by mistake."""
        base = step if self._restored is None else self._restored
        for other in self._folders():
            if other > base:
                rename(self.folder / str(other), self.folder / f"{other}.unused")
        self._restored = None

    def _prune(self) -> None:
        """Removes what is neither among the newest nor among the best."""
        whole = self.steps()
        measured = [(metric, -step) for step in whole if (metric := self.manifest(step).metric) is not None]
        stay = {*whole[-self._keep :], *(-step for _, step in sorted(measured)[: self._best])}
        for step in self._folders():
            if step not in stay and step < whole[-1]:
                gone = self.folder / f"{step}.deleted"
                rename(self.folder / str(step), gone)
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
        values = _made(report, fresh)
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
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} is not whole ({wrong}); there are: {there}"
            )
        return step

    def _read(self, report: Report, leaves: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Values of the target's leaves by path."""
        values: dict[str, jax.Array] = {}
        left = [match for match in report.matches if match.source is not None]
        while left:  # twice where parameters and masters have one source
            by_source = {match.source: match.path for match in reversed(left) if match.source is not None}
            wanted = {source: leaves[path] for source, path in by_source.items()}
            found = arrays.read(self.folder / str(report.step) / STATE, wanted)
            values |= {path: found[source] for source, path in by_source.items()}
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


def _made(report: Report, fresh: Callable[[], Any] | None) -> dict[str, Any]:
    """The leaves that begin anew. What else `fresh` makes is gone before anything is read."""
    if not report.fresh:
        return {}
    if fresh is None:
        raise ValueError(
            f"the checkpoint of step {report.step} has no {', '.join(report.fresh)}; "
            "give restore a fresh= that makes a first state, or the plan that it was written with"
        )
    made = named_leaves(fresh())
    return {path: made[path] for path in report.fresh}


def _say(log: Log, text: str) -> None:
    if jax.process_index() == 0:
        log(text)
