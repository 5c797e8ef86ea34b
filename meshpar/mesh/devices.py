"""What a script settles before its first device call: which devices it runs on, and where compiled programs are
kept.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from meshpar.compat import backend_started
from meshpar.mesh.distributed import joined
from meshpar.mesh.emulate import emulate
from meshpar.mesh.spec import MeshSpec

_PLUGINS = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
_MOST_EMULATED = 4096


def choose_devices(spec: MeshSpec, count: int | None) -> Sequence[jax.Device]:
    """The devices for a mesh, of all processes; with several of them `join` comes first.

    Without an accelerator it emulates `count` CPU devices, by default the mesh's product, or 8 when the mesh has a free
    axis; each process emulates an equal share. With one it takes all devices, or the first `count`. Several processes
    use all that they have.

    Raises:
      ValueError: `count` is below 1 or more than there are, more than can be emulated in reasonable time, or leaves a
        process without its share.
    """
    if count is not None and count < 1:
        raise ValueError(f"--devices {count} is below 1; give a positive number, or leave it out")
    processes, each = joined().processes, joined().devices
    usual = each * processes if each else processes * max(1, 8 // processes)
    wanted = count or (usual if spec.has_free_axis else spec.product)
    if wanted % processes or (each and wanted != usual):
        raise ValueError(
            f"{wanted} devices do not spread over {processes} processes"
            f"{f' of {each}' if each else ''}; use a mesh of {usual if each else _near(wanted, processes)}, or launch "
            "other processes"
        )
    if not backend_started():
        share = wanted // processes
        if os.environ.get("JAX_PLATFORMS", "") not in ("", "cpu") or any(
            importlib.util.find_spec(name) for name in _PLUGINS
        ):
            config: Any = jax.config  # the annotations of jax 0.10 do not list the option
            config.update("jax_num_cpu_devices", min(share, _MOST_EMULATED))  # in case the plug-in finds no hardware
        elif share > _MOST_EMULATED:
            raise ValueError(
                f"{share} CPU devices to emulate are more than {_MOST_EMULATED}; use fewer, it would take minutes"
            )
        else:
            emulate(share)
    devices = jax.devices()
    if devices[0].platform != "cpu" and count is None:
        return devices
    if wanted > len(devices):
        fix = (
            f"use a mesh of {len(devices)}, or start with --devices {wanted} before jax has started"
            if devices[0].platform == "cpu"
            else f"use at most {len(devices)}"
        )
        raise ValueError(
            f"{wanted} devices asked for and {len(devices)} {devices[0].platform} devices are there; {fix}"
        )
    if processes > 1 and wanted < len(devices):
        raise ValueError(
            f"{wanted} devices asked for and the {processes} processes have {len(devices)}; use them all, or launch "
            "fewer processes"
        )
    return devices[:wanted]


def _near(wanted: int, processes: int) -> str:
    """Numbers near `wanted` that all processes share evenly, as "4 or 8"."""
    below = wanted // processes * processes
    return f"{below} or {below + processes}" if below else f"{processes}"


def use_compilation_cache() -> None:
    """Keeps compiled programs in ~/.cache/meshpar/xla, so that a second start of the same program does not compile;
    JAX_COMPILATION_CACHE_DIR moves it.
    """
    config: Any = jax.config  # the annotations of jax do not list the option
    if not config.jax_compilation_cache_dir:
        home = Path(os.environ.get("MESHPAR_CACHE", Path.home() / ".cache" / "meshpar"))
        config.update("jax_compilation_cache_dir", str(home / "xla"))


def compiler_options(platform: str) -> dict[str, int] | None:
    """On CPU the lowest level that optimises, unless XLA_FLAGS asks for one: a step compiles a third faster and runs as
    fast, since its time goes into library calls for matrix products.
    """
    if platform != "cpu" or "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", ""):
        return None
    return {"xla_backend_optimization_level": 1}
