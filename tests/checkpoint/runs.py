"""Short programs that save checkpoints, for tests that stop them in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# A donating step over 8 devices whose state at step n is n everywhere, so that a checkpoint shows which one it is.
COUNTING = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from meshpar.checkpoint import commit
from meshpar.checkpoint.manager import Checkpoints, SaveError
from meshpar.mesh.build import build_mesh
from meshpar.mesh.emulate import emulate
from meshpar.mesh.spec import MeshSpec

emulate(2)
mesh = build_mesh(MeshSpec.parse("fsdp=2"), jax.devices())
split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
shardings = {"params": {"a": split, "b": whole}, "step": whole}
step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0, out_shardings=shardings)
init = jax.jit(
    lambda: {"params": {"a": jnp.zeros((512, 1024)), "b": jnp.zeros((256, 1024))}, "step": jnp.int32(0)},
    out_shardings=shardings,
)
abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init), shardings
)

def number(state):
    values = {float(np.unique(np.asarray(x)).item()) for x in jax.tree.leaves(state)}  # one value, the same everywhere
    return int(values.pop()) if len(values) == 1 else values

folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder, keep=2)
"""


def start(body: str, folder: Path, **options: object) -> subprocess.Popen[str]:
    """Starts COUNTING and `body` on a folder; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", COUNTING + body, str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def finish(body: str, folder: Path) -> tuple[int, str, str]:
    """Runs COUNTING and `body` to their end: exit code, output, errors."""
    process = start(body, folder)
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, errors
