"""Checkpoints: another number of devices, the end of the interpreter, donated arrays, memory after a restore."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint.manager import Checkpoints
from meshpar.checkpoint.reshard import named_leaves
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import Training, build
from tests.checkpoint.runs import finish
from tests.conformance.runs import BATCH, LLAMA, SEQ, batch_of, model_of

REPOSITORY = Path(__file__).parents[2]


def training_of(mesh: str) -> Training:
    """A tiny Llama with AdamW, bf16 parameters and fp32 masters."""
    plan = Plan(mesh=MeshSpec.parse(mesh), precision=Policy(compute="bf16", storage="copy"))
    devices = jax.devices()[: plan.mesh.product]
    return build(model_of(LLAMA), optax.adamw(1e-2), plan, batch=BATCH, seq=SEQ, devices=devices)


def with_scale(state: Any, scale: Any) -> dict[str, Any]:
    """All parts of a state by name, and the state of a loss scale."""
    return {**vars(state), "scale": scale}


def fingerprints(tree: Any) -> dict[str, list[str]]:
    """Dtype and hash of each leaf."""
    plain = {
        path: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for path, leaf in named_leaves(tree).items()
    }
    return {
        path: [str(leaf.dtype), hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()] for path, leaf in plain.items()
    }


# In a process with fewer devices: reads everything and parameters alone, and compares shardings and bits.
RESTORE = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from meshpar.mesh.emulate import emulate
devices, mesh, folder, expected = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
emulate(devices)
assert jax.device_count() == devices
from meshpar.checkpoint.manager import Checkpoints
from tests.cases.test_checkpoints import fingerprints, training_of, with_scale
training = training_of(mesh)
whole = NamedSharding(training.mesh, PartitionSpec())
scale = {"value": jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)}
target = with_scale(training.abstract_state(), scale)
checkpoints = Checkpoints(folder)
assert checkpoints.manifest(checkpoints.latest()).mesh["fsdp"] == 4
state = checkpoints.restore(target)
for path, leaf in jax.tree.leaves_with_path(target):
    pass
same = jax.tree.map(lambda x, like: x.sharding == like.sharding and x.shape == like.shape, state, target)
assert all(jax.tree.leaves(same)), same
wanted = json.loads(expected.read_text())
assert fingerprints(state) == wanted
params = checkpoints.restore_params(target["params"])
assert fingerprints({"params": params}) == {path: v for path, v in wanted.items() if path.startswith("params/")}
"""


def test_c37_eight_devices_are_restored_on_two_and_on_one(tmp_path: Path) -> None:
    training = training_of("fsdp=4 tensor=2")
    state = training.init(3)
    for number in range(2):
        state, _ = training.step(state, training.place(batch_of(number)))
    scale = jax.device_put(np.float32(1024), NamedSharding(training.mesh, PartitionSpec()))
    saved = with_scale(state, {"value": scale})
    assert not np.array_equal(*(np.asarray(jax.random.key_data(k)) for k in (state.key, jax.random.key(0))))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(2, saved)
    checkpoints.close()
    (tmp_path / "expected.json").write_text(json.dumps(fingerprints(saved)))
    for devices, mesh in ((2, "fsdp=2"), (1, "data=1")):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                RESTORE,
                str(devices),
                mesh,
                str(tmp_path / "checkpoints"),
                str(tmp_path / "expected.json"),
            ],
            cwd=REPOSITORY,
            env={**os.environ, "XLA_FLAGS": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert (
            f"restoring step 2, written on fsdp=4 tensor=2, onto {mesh if devices > 1 else 'one device'}" in done.stdout
        )


# A slow disk, so that the last save is certainly unfinished when the script ends.
THREE_STEPS = """
import time
quick = commit._seal
commit._seal = lambda path: (time.sleep(0.1), quick(path))[1]
state = init()
for n in (1, 2, 3):
    state = step(state)
    checkpoints.save(n, state)
print("unfinished:", Checkpoints(folder).latest(), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("raise KeyError('a bug')", 1), ("sys.exit(3)", 3), ("import os, signal; os.kill(os.getpid(), 15)", -15)],
    ids=["normal", "exception", "sys.exit", "sigterm"],
)
def test_c38_the_last_save_is_finished_however_the_script_ends(end: str, code: int, tmp_path: Path) -> None:
    """A signal that nothing handles ends the process at once: then the one before is the last, and it is whole."""
    returned, out, errors = finish(THREE_STEPS + end, tmp_path)
    assert (returned, out.split()) == (code, ["unfinished:", "2"]), errors
    assert Checkpoints(tmp_path).newest_whole() == (2 if code == -15 else 3)
    assert ("a bug" in errors) == (code == 1)


def digest(array: jax.Array) -> bytes:
    """A hash of the values. Of a copy, since an array of which numpy has a view is not donated on CPU."""
    return hashlib.sha256(np.asarray(jnp.copy(array)).tobytes()).digest()


def test_c39_donated_arrays_are_saved_as_they_were(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    shardings = {"a": split, "b": whole}
    state = jax.device_put(
        {"a": np.arange(1 << 20, dtype=np.float32), "b": np.arange(1 << 18, dtype=np.float32)}, shardings
    )
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.01 + 1, tree), donate_argnums=0, out_shardings=shardings)
    checkpoints = Checkpoints(tmp_path / "all", keep=50)
    taken = {}
    for n in range(1, 51):
        before = state
        state = step(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))  # the save holds none of them
        taken[n] = jax.tree.map(digest, state)
        checkpoints.save(n, state)
    assert checkpoints.steps()[:49] == list(range(1, 50))
    for n in (1, 2, 25, 49, 50):
        restored = checkpoints.restore(abstract, n, log=lambda line: None)
        assert jax.tree.map(digest, restored) == taken[n]
    checkpoints.close()
    shutil.rmtree(checkpoints.folder)


def addresses(tree: Any) -> dict[int, int]:
    """Bytes of each buffer by its address."""
    plain = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    shards = [shard.data for leaf in plain for shard in leaf.addressable_shards]
    return {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}


def live_bytes() -> int:
    """Bytes of all buffers that live, each once: an array that was asked for its shards holds them as arrays too."""
    gc.collect()
    return sum(addresses(jax.live_arrays()).values())


def test_c57_the_first_step_after_a_restore_needs_no_second_copy_of_the_state(tmp_path: Path) -> None:
    """The peak of a step is what its program takes beyond its arguments, and a copy of each buffer that it was
    given but could not reuse: memory that numpy or a file reader still owns.
    """
    training = training_of("fsdp=2 tensor=2")
    step, batch = training.compile(), training.place(batch_of(0))
    program = step.memory_analysis().temp_size_in_bytes
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, training.init(3))
    checkpoints.close()
    peaks = {}
    for kind in ("fresh", "restored"):
        others = live_bytes()
        if kind == "fresh":
            state = jax.block_until_ready(training.init(3))
        else:
            state = checkpoints.restore(training.abstract_state(), log=lambda line: None)
        held, given, leaves = live_bytes() - others, addresses(state), jax.tree.leaves(state)
        state, metrics = jax.block_until_ready(step(state, batch))
        copied = sum(size for address, size in addresses(state).items() if address not in given)
        peaks[kind] = held + program + copied
        assert all(leaf.is_deleted() for leaf in leaves)
        del state, metrics, leaves
    assert peaks["restored"] == pytest.approx(peaks["fresh"], rel=0.05)
