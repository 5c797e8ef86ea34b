"""Many CPU devices in one process, so that every mesh runs on any machine.

Emulated devices share the cores. A collective waits for all its participants, and XLA aborts the process when one comes
late (after a minute), which on few cores happens to correct programs: one device still computes, or the threads
that the collective needs are busy with the next step. So emulation raises XLA's limit, and a training loop keeps no
more steps in flight than `steps_in_flight` says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import jax

from meshpar.compat import backend_started

# XLA logs a stuck collective after the first and aborts when the second has passed as well (20 + 40 by default). It
# also aborts on a flag it does not know; these exist at both ends of the supported jax range.
_COLLECTIVE_LIMITS: Final = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 600,
}


def emulate(n: int) -> None:
    """Make jax see exactly `n` CPU devices in this process, and no accelerator.

    To be called before anything asks jax for devices; a no-op when jax already runs on `n` CPU devices. Limits of
    collectives that XLA_FLAGS already sets are kept.

    Raises:
        ValueError: `n` is not a positive integer.
        RuntimeError: jax has already started with other devices.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"emulate({n!r}) asks for no devices; give a positive integer")
    if backend_started():
        devices = jax.local_devices()
        if len(devices) == n and devices[0].platform == "cpu":
            return
        raise RuntimeError(
            f"jax already runs on {len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}, too "
            f"late to emulate {n}; call emulate({n}) before anything asks jax for devices, pass --devices {n}, or "
            f'start Python with JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count={n}"'
        )
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags.startswith("-") or not flags:  # otherwise it names a file of flags, which we leave alone
        added = [f"--{name}={seconds}" for name, seconds in _COLLECTIVE_LIMITS.items() if name not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)  # wins over --xla_force_host_platform_device_count in XLA_FLAGS


def steps_in_flight(devices: Sequence[jax.Device]) -> int | None:
    """How many dispatched steps may be unfinished before a loop waits for the oldest; None: as many as jax accepts.

    On CPU one where devices outnumber the cores, since a second step could hold the threads that a collective of the
    first waits for, and two where they do not. Accelerators run steps in order and need no bound.
    """
    if devices[0].platform != "cpu":
        return None
    local = sum(device.process_index == devices[0].process_index for device in devices)
    return 1 if local > _cores() else 2


def _cores() -> int:
    """Cores that this process may use, which under taskset or in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
