"""A run's folder: one run at a time, and what a run must share with the one that it goes on from.

config.json    the resolved recipe, mesh, devices, versions, command
lock           held by the running process; the operating system lets go of it however the process ends
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from meshpar.train.build import Training
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.run import Recipe
from meshpar.train.tokenizer import tokenizer_identity
from meshpar.train.values import to_json

Resume = Literal["auto", "always", "never"]

# What parameters, optimizer state and the order of the batches depend on: a resumed run must keep it.
_FIXED = ("model.", "weights", "lora", "data.", "optimizer.name", "optimizer.momentum", "train.batch", "train.seed")
_FREE = ("data.prefetch",)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def lock(folder: Path) -> TextIO:
    """Makes the folder and holds it until the returned file is closed.

    Raises:
      ValueError: it cannot be made or written to, or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be made ({error.strerror}); name another folder") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder} cannot be written to; change its permissions, or name another folder")
    file = (folder / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{folder} is in use by {holder}; wait for it or end it, or name another folder with --out"
        ) from None
    except OSError:  # some network file systems have no locks: then nothing is held
        pass
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def steps_done(folder: Path, latest: int | None, recipe: Recipe, resume: Resume) -> int:
    """The step that a run in `folder` goes on from; 0 for a run that begins.

    Args:
      latest: the newest whole checkpoint there.

    Raises:
      ValueError: what is there and what is asked for do not fit.
    """
    steps, begun = recipe.train.steps, latest is not None or (folder / "config.json").exists()
    if resume == "never" and begun:
        raise ValueError(f"{folder} holds a run already; leave --resume out to go on with it, or name another --out")
    if resume == "always" and latest is None:
        raise ValueError(f"{folder} holds no checkpoint; leave --resume out to start there, or name the run's folder")
    if begun:
        _compare(folder, recipe)
    if (latest or 0) > steps:
        raise ValueError(f"{folder} has {latest} steps behind it and train.steps={steps}; set train.steps to more")
    return latest or 0


def is_finished(folder: Path, done: int, recipe: Recipe) -> bool:
    """Whether nothing is left to do: all steps are done and the summary of that run was written."""
    return done == recipe.train.steps and (folder / "summary.json").exists()


def resume_note(folder: Path, recipe: Recipe, done: int) -> str:
    """What to tell about a learning rate that jumps, because the run is longer or shorter than planned."""
    if not done:
        return ""
    before, steps = _recipe_of(folder), recipe.train.steps
    earlier, was = before["train.steps"], _optimizer_of(before)
    if recipe.optimizer.schedule == "constant" or steps in (earlier, done) or earlier <= was.warmup:
        return ""
    old, new = float(was.learning_rate(earlier)(done)), float(recipe.optimizer.learning_rate(steps)(done))
    return f"train.steps was {earlier} and is {steps}: the learning rate goes on at {new:.3g} instead of {old:.3g}"


def describe_run(recipe: Recipe, training: Training) -> dict[str, Any]:
    """Everything that a run is: resolved values, mesh, batch per device, versions. JSON values, for `config.json` and
    for each checkpoint.
    """
    rows = training.batch_sharding.shard_shape((training.batch, training.seq))[0]
    return {
        "recipe": to_json(dataclasses.replace(recipe, plan=training.plan)),
        "mesh": dict(training.mesh.shape),
        "devices": [str(device) for device in training.mesh.devices.flat],
        "rows_per_device_and_microbatch": rows // training.plan.accumulate,
        "parameters": training.model.size,
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}},
    }


def _compare(folder: Path, recipe: Recipe) -> None:
    """Refuses a recipe that cannot go on from what is in `folder`."""
    before, now = _recipe_of(folder), _flat(to_json(recipe))
    had, has = (any(key.startswith("lora.") for key in values) for values in (before, now))
    if had != has:
        raise ValueError(
            f"{folder} began {'with' if had else 'without'} adapters; {'give --lora' if had else 'leave --lora out'}, "
            "or name another folder with --out"
        )
    changed = [
        f"{key}={before[key]}, not {now[key]}"
        for key in now
        if key.startswith(_FIXED) and key not in _FREE and key in before and not _same(key, before[key], now[key])
    ]
    if changed:
        raise ValueError(f"{folder} began with {', '.join(changed)}; give the recipe and --set that the run began with")


def _same(key: str, before: Any, now: Any) -> bool:
    """Whether a value is the one that a run began with; a tokenizer may have moved."""
    if before != now and key == "data.tokenizer":
        try:
            return tokenizer_identity(before) == tokenizer_identity(now)
        except ValueError:  # one of them is gone
            return False
    return bool(before == now)


def _recipe_of(folder: Path) -> dict[str, Any]:
    try:
        before = _flat(json.loads((folder / "config.json").read_text())["recipe"])
        _ = before["train.steps"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{folder / 'config.json'} does not tell the recipe of this run; restore that file") from None
    return before


def _optimizer_of(values: Mapping[str, Any]) -> OptimizerConfig:
    prefix = "optimizer."
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    given = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    return OptimizerConfig(**{name: value for name, value in given.items() if name in known})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's JSON as the keys that --set takes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}".removeprefix("plan.")
        found |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
