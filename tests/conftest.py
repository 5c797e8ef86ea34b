"""Every test sees 8 CPU devices, strict dtype promotion and a compilation cache, all set before jax starts.

`pyproject.toml` turns warnings into errors. The cache keys a compiled program by its content and the jax version, so it
cannot change a result; it lies in `.cache/jax` of the checkout, JAX_COMPILATION_CACHE_DIR moves it, `make clean`
deletes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
import pytest
from hypothesis import settings

from meshpar.mesh.build import build_mesh
from meshpar.mesh.emulate import emulate
from meshpar.mesh.spec import MeshSpec

# Unoptimised code computes the same sums; compiling it takes half the time, and tests run for milliseconds.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
emulate(8)
jax.devices()  # starts the backend, so that no test starts it with other devices
jax.config.update("jax_numpy_dtype_promotion", "strict")
# The same examples in every run; no deadline, since a core may be busy with another device.
settings.register_profile("meshpar", deadline=None, derandomize=True)
settings.load_profile("meshpar")


@pytest.fixture(scope="session")
def mesh_of() -> Callable[[str], jax.sharding.Mesh]:
    """Builds the mesh that a string such as "data=2 tensor=4" spells, on the first of the 8 devices."""
    return lambda text: build_mesh(MeshSpec.parse(text), jax.devices())
