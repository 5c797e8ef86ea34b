"""Emulation decides before jax starts, so each claim runs in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshpar.compat import backend_started
from meshpar.mesh.emulate import emulate, steps_in_flight

REPOSITORY = Path(__file__).parents[2]


def python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `source` in a fresh interpreter without this process's settings of jax."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=REPOSITORY,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_emulate_gives_exactly_the_devices_asked_for() -> None:
    """Whatever XLA_FLAGS says of their number; the last call before jax starts counts, and asking again is allowed."""
    result = python(
        "from meshpar.compat import backend_started\n"
        "from meshpar.mesh import emulate\n"
        "emulate(2); emulate(3)\n"
        "assert not backend_started()\n"
        "import jax, jax.numpy as jnp, os\n"
        "print(len(jax.devices()), jax.default_backend())\n"
        "assert backend_started()\n"
        "emulate(3)\n"
        "from meshpar.mesh import MeshSpec, build_mesh\n"
        "mesh = build_mesh(MeshSpec(data=-1))\n"
        "x = jax.device_put(jnp.ones(3), jax.NamedSharding(mesh, jax.P('data')))\n"
        "print(jnp.sum(x))\n"
        "print(os.environ['XLA_FLAGS'])\n",
        XLA_FLAGS="--xla_force_host_platform_device_count=5 --xla_cpu_collective_call_terminate_timeout_seconds=77",
    )
    assert result.returncode == 0, result.stderr
    devices, total, flags = result.stdout.splitlines()
    assert (devices, total) == ("3 cpu", "3.0")
    assert flags.split() == [
        "--xla_force_host_platform_device_count=5",
        "--xla_cpu_collective_call_terminate_timeout_seconds=77",  # the user's own limit is kept
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    ]


def test_the_limit_of_late_participants_reaches_xla() -> None:
    """Though set after jax was imported: limits of 1 + 1 seconds must abort an all-reduce whose peer comes after 6."""
    source = """
import jax, jax.numpy as jnp, numpy as np, time
from importlib import import_module
emulation = import_module("meshpar.mesh.emulate")
emulation._COLLECTIVE_LIMITS.update(dict.fromkeys(emulation._COLLECTIVE_LIMITS, 1))
emulation.emulate(2)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def wait(index):
    time.sleep(6.0 * int(index))
    return np.float32(1)
def body(x):
    one = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.axis_index("x"))
    return jax.lax.psum(x * one, "x")
mapped = jax.shard_map(body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P(), check_vma=False)
print(jax.jit(mapped)(jnp.ones(2)))
"""
    result = python(source)
    assert result.returncode == -signal.SIGABRT, result.stderr
    assert "Termination timeout" in result.stderr
    assert not result.stdout


def test_a_file_of_xla_flags_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "flags"
    file.write_text("--xla_cpu_collective_call_warn_stuck_timeout_seconds=7\n")
    result = python(
        "from meshpar.mesh import emulate\n"
        "emulate(2)\n"
        "import jax, os\n"
        "print(len(jax.devices()), os.environ['XLA_FLAGS'])\n",
        XLA_FLAGS=str(file),
    )
    assert result.stdout.split() == ["2", str(file)], result.stderr


def test_emulate_too_late_is_one_sentence_with_the_fix() -> None:
    assert backend_started() or jax.devices()
    emulate(8)  # as many as there are: nothing to do
    with pytest.raises(RuntimeError, match=r"already runs on 8 cpu devices, too late to emulate 4; call emulate\(4\)"):
        emulate(4)
    assert len(jax.devices()) == 8
    assert jax.config.jax_num_cpu_devices == 8


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "4"])
def test_emulating_no_devices_is_refused(n: object) -> None:
    with pytest.raises(ValueError, match="asks for no devices; give a positive integer"):
        emulate(n)  # type: ignore[arg-type]


@pytest.mark.parametrize(("cores", "expected"), [(2, 1), (7, 1), (8, 2), (64, 2)])
def test_cpu_keeps_one_step_in_flight_where_devices_outnumber_cores(
    cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert steps_in_flight(jax.devices()) == expected
    assert steps_in_flight(jax.devices()[:1]) == 2


def test_accelerators_need_no_bound() -> None:
    class Accelerator:
        platform = "tpu"
        process_index = 0

    assert steps_in_flight([Accelerator()] * 8) is None  # type: ignore[list-item]
