"""Devices for a mesh, in a process of their own: here jax has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("mesh", "count", "said"),
    [
        ("data=2", "None", "2"),
        ("data=-1", "None", "8"),
        ("data=-1", "3", "3"),
        ("data=-1", "0", "ValueError: --devices 0 is below 1; give a positive number, or leave it out"),
        (
            "data=-1",
            "10**23",
            "ValueError: 100000000000000000000000 CPU devices to emulate are more than 4096; use fewer",
        ),
        ("data=100 fsdp=1000", "None", "ValueError: 100000 CPU devices to emulate are more than 4096; use fewer"),
    ],
)
def test_as_many_cpu_devices_are_emulated_as_asked_for(mesh: str, count: str, said: str) -> None:
    program = (
        "from meshpar.mesh.devices import choose_devices\n"
        "from meshpar.mesh.spec import MeshSpec\n"
        f"print(len(choose_devices(MeshSpec.parse({mesh!r}), {count})))"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (done.stdout + done.stderr).splitlines()[-1].startswith(said)
