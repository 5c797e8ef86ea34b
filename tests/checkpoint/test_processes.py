"""Two real processes over loopback: each writes its own shards, a failure in one is known to both, one reads it all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint.manager import Checkpoints

REPOSITORY = Path(__file__).parents[2]

# Saves 1 and 2, fails at 3 in process 1 alone, saves 3 again, and restores: first 3, then 2 after 3 was damaged.
TWO = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from meshpar.checkpoint import commit
from meshpar.checkpoint.manager import Checkpoints, SaveError
from tests.checkpoint.damage import flip
address, index, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=index)
assert jax.device_count() == 4 and jax.local_device_count() == 2
mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
shardings = {"a": split, "b": whole, "step": whole}
init = jax.jit(
    lambda: {"a": jnp.arange(1 << 18, dtype=jnp.float32), "b": jnp.arange(16.0), "step": jnp.int32(0)},
    out_shardings=shardings,
)
step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0, out_shardings=shardings)
abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init), shardings
)
checkpoints = Checkpoints(folder, keep=3)
state = init()
for n in (1, 2, 3):
    state = step(state)
    checkpoints.wait()
    if n == 3 and index == 1:
        quick, commit._seal = commit._seal, lambda path: 1 / 0
    checkpoints.save(n, state, extra={"n": n})
try:
    checkpoints.wait()
except SaveError as error:
    print("said", error, flush=True)
if index == 1:
    commit._seal = quick
assert checkpoints.steps() == [1, 2], checkpoints.steps()
assert index or not list(folder.glob("*.*")), list(folder.glob("*.*"))  # process 0 clears up
checkpoints.save(3, state, extra={"n": 3})
told = []
restored = checkpoints.restore(abstract, log=told.append)
number = jax.jit(lambda s: s["step"])
assert int(number(restored)) == 3
same = jax.jit(lambda one, other: jax.tree.map(lambda x, y: (x == y).all(), one, other), out_shardings=whole)
assert all(jax.tree.leaves(jax.device_get(same(restored, state))))
if index == 0:
    biggest = max((folder / "3" / "state" / "ocdbt.process_1").rglob("*"), key=lambda path: path.stat().st_size)
    flip(biggest)
jax.experimental.multihost_utils.sync_global_devices("damaged")
assert int(number(checkpoints.restore(abstract, log=told.append))) == 2
assert len(told) == (4 if index == 0 else 0), told
checkpoints.close()
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_two_processes_write_what_one_reads(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    address = f"127.0.0.1:{free_port()}"
    logs = [tmp_path / f"{index}.log" for index in (0, 1)]
    both = []
    for index, log in enumerate(logs):
        with log.open("w") as file:
            both.append(
                subprocess.Popen(
                    [sys.executable, "-c", TWO, address, str(index), str(folder)],
                    cwd=REPOSITORY,
                    env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + 60
    while time.monotonic() < end and any(process.poll() is None for process in both):
        if any(process.poll() for process in both):
            time.sleep(2)  # the other one may end by itself, and say why
            break
        time.sleep(0.1)
    for process in both:
        process.kill()
        process.wait()
    outputs = [log.read_text() for log in logs]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    assert "said step 3 was not saved in" in outputs[0]
    assert "process 1 could not write its part" in outputs[0]
    assert "division by zero" in outputs[1]

    checkpoints = Checkpoints(folder)
    written = [
        sum(file.stat().st_size for file in (folder / "2" / "state" / f"ocdbt.process_{index}" / "d").iterdir())
        for index in (0, 1)
    ]
    assert all(size > 1 << 19 for size in written), written  # half of 1 MB each
    assert checkpoints.manifest(2).extra == {"n": 2}
    assert checkpoints.manifest(2).leaves["a"].spec == (("fsdp",),)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    target = {
        "a": jax.ShapeDtypeStruct((1 << 18,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))),
        "b": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
    }
    told: list[str] = []
    restored = checkpoints.restore(target, log=told.append)
    assert told[0].startswith(f"passing over step 3 in {folder}: state/ocdbt.process_1/d/")
    assert told[1].startswith("restoring step 2, written on fsdp=4, onto fsdp=8: ")
    np.testing.assert_array_equal(restored["a"], np.arange(1 << 18, dtype=np.float32) + 2)
    np.testing.assert_array_equal(restored["b"], np.arange(16, dtype=np.float32) + 2)
    assert int(restored["step"]) == 2
