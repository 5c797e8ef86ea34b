"""What each of several processes does in `test_processes.py`, and what one process does in their stead.

python -m meshpar launch --processes 2 --devices 4 -- python -m tests.cases.processes ACTIVITY FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint.manager import Checkpoints
from meshpar.generate.generator import sample
from meshpar.interfaces import Batch
from meshpar.mesh.distributed import is_first, join, wait_for_all
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.train import build as building
from meshpar.train.build import Training, build
from tests.conformance.runs import BATCH, FP32, LLAMA, SEQ, batch_of, model_of

STEPS = 4
WITHIN = "data=2 tensor=4"  # tensor stays inside a process
SPANNING = "tensor=8"  # over both processes, each of which needs all rows
MESHES = {"data=8": LLAMA, WITHIN: LLAMA, SPANNING: dataclasses.replace(LLAMA, heads=8)}


def training_on(mesh: str, config: Any = LLAMA) -> Training:
    """A step of the tiny Llama on all devices, with SGD."""
    plan = Plan(mesh=MeshSpec.parse(mesh), precision=FP32)
    return build(model_of(config), optax.sgd(0.3), plan, batch=BATCH, seq=SEQ)


def compile_together(training: Training) -> None:
    """So that no process is late for the first step, as in `experiments.train_lm`."""
    training.compile()
    wait_for_all("compiled")


def rows_of(batch: Batch, rows: np.ndarray) -> Batch:
    return jax.tree.map(lambda leaf: leaf[rows], batch)


def whole(training: Training, array: jax.Array) -> np.ndarray:
    """A spread array, on the host of each process."""
    everywhere = NamedSharding(training.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(array))


def train(mesh: str, folder: Path) -> dict[str, Any]:
    """A few steps on a mesh: all that must not depend on the number of processes. Leaves a checkpoint in `folder` where
    each process holds a part of the parameters.
    """
    training = training_on(mesh, MESHES[mesh])
    compile_together(training)
    own = training.own_rows
    state, losses, shapes = training.init(seed=0), [], {}
    for number in range(STEPS):
        state, metrics = training.step(state, training.place(rows_of(batch_of(number), own)))
        losses.append(float(metrics["loss"]))
        shapes = {name: [list(value.shape), str(value.dtype)] for name, value in metrics.items()}
    sums = training.evaluate(state.params, training.place(rows_of(batch_of(99), own)))
    found = {"losses": losses, "shapes": shapes, "evaluated": {name: float(value) for name, value in sums.items()}}
    if mesh == SPANNING:
        checkpoints = Checkpoints(folder / "checkpoints")
        checkpoints.save(STEPS, state)
        checkpoints.close()
    if mesh == WITHIN:  # each process samples one of the two rows, and reads both
        prompts = [[1, 2, 3], [4, 5]]
        found["sampled"] = sample(
            training.model, training.plan, training.mesh, state.params, prompts, new_tokens=4, temperature=0
        )
    return found | assembled(training)


def assembled(training: Training) -> dict[str, Any]:
    """The rows of this process, and the batch that all processes make of theirs."""
    batch = training.place(rows_of(batch_of(0), training.own_rows))
    return {"own_rows": training.own_rows.tolist(), "tokens": whole(training, batch.tokens).tolist()}


def assembled_interleaved(mesh: str) -> dict[str, Any]:
    """The same on a mesh whose neighbouring devices are of different processes, as no mesh of ours is today."""
    devices = jax.devices()
    order = [device for pair in zip(devices[:4], devices[4:], strict=True) for device in pair]
    plain = building.build_mesh

    def interleaved(*arguments: Any) -> jax.sharding.Mesh:
        mesh = plain(*arguments)
        return jax.sharding.Mesh(
            np.array(order).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types
        )

    with mock.patch.object(building, "build_mesh", interleaved):
        return assembled(training_on(mesh))


def everything(folder: Path) -> dict[str, Any]:
    """What is compared with one process."""
    return {
        **{mesh: train(mesh, folder) for mesh in MESHES},
        **{f"interleaved {mesh}": assembled_interleaved(mesh) for mesh in ("data=8", "data=4 tensor=2")},
    }


def die_and_resume(folder: Path) -> dict[str, Any]:
    """Trains from the newest checkpoint; in the first start process 1 is killed in the middle of a step's work."""
    training, checkpoints = training_on(WITHIN), Checkpoints(folder / "checkpoints")
    done = checkpoints.latest() or 0
    state = checkpoints.restore(training.abstract_state(), done) if done else training.init(seed=0)
    compile_together(training)
    losses = {}
    for number in range(done, STEPS):
        if number == STEPS - 1 and os.environ.get("MESHPAR_RESTARTS", "0") == "0" and not is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = training.step(state, training.place(rows_of(batch_of(number), training.own_rows)))
        losses[number] = float(metrics["loss"])
        if number == 1:
            checkpoints.save(number + 1, state)
    checkpoints.close()
    return {"from": done, "losses": losses}


def main() -> None:
    activity, folder = sys.argv[1], Path(sys.argv[2])
    flags = sys.argv[3:]  # coordinator, processes, process
    cluster = join(flags[0], int(flags[1]), int(flags[2])) if flags else join()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    result = {"everything": everything, "die": die_and_resume}[activity](folder)
    (folder / f"{activity}-{cluster.process}.json").write_text(json.dumps(result))
    wait_for_all("written")


if __name__ == "__main__":
    main()
