"""Many processes as one: `join` makes this process one of those that run the same program, each with devices of its
own.

How many there are and which one this is comes from the arguments, else from `python -m meshpar launch`, else from what
Open MPI, SLURM or a TPU pod tell each process, where jax finds the address of process 0 by itself. With none of these
there is one process and nothing is called. When a process dies, jax ends the others within `HEARTBEAT` seconds.
Source: https://docs.jax.dev/en/latest/multi_process.html and `jax/_src/clusters`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.compat import backend_started
from meshpar.mesh.emulate import emulate

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead; jax takes 100
SHUTDOWN = 40  # seconds that a process waits at its end for the others, such as those that failed; jax takes 300
_GOOGLE = "0x1ae0"  # the PCI vendor of TPU chips


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Which process this is, of how many, and who said so."""

    source: str  # "flags", "launch", "open mpi", "slurm", "tpu pod" or "one process"
    processes: int = 1
    process: int = 0
    coordinator: str | None = None  # host:port where process 0 listens; None: jax finds it
    method: str | None = None  # what jax is told to find the coordinator by
    devices: int | None = None  # CPU devices that this process emulates; None: whatever it finds
    local_devices: tuple[int, ...] | None = None  # numbers of this process's GPUs on its host; None: jax chooses


_joined = Cluster(source="one process")


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> Cluster:
    """Makes this process one of several; to be called before anything asks jax for devices.

    Args:
      coordinator: host:port where process 0 listens; all three arguments, or none of them.
      processes: how many there are.
      process: which one this is, from 0.

    Returns:
      What was found. A second call returns it again.

    Raises:
      ValueError: the arguments are incomplete or out of range, or the cluster does not tell where process 0 is.
      RuntimeError: jax has already started, or the others did not come.
    """
    global _joined
    cluster = find(os.environ, coordinator=coordinator, processes=processes, process=process)
    if _joined.source != "one process" or cluster.source == "one process":
        return _joined
    if backend_started():
        raise RuntimeError("jax has already started in this process; call join() before anything asks jax for devices")
    if cluster.devices is not None:
        emulate(cluster.devices)
    try:
        jax.distributed.initialize(**arguments(cluster))
    except ValueError as error:
        if cluster.source == "tpu pod" and not _pod_in(os.environ):
            return _joined  # TPU chips whose host belongs to no pod
        raise ValueError(f"{cluster.source}: jax finds no way to process 0 ({error}); {_FIX}") from error
    if cluster.source == "tpu pod":  # only jax knows these, and no device is emulated here
        cluster = replace(cluster, processes=jax.process_count(), process=jax.process_index())
    _joined = cluster
    return cluster


_FIX = "give --coordinator HOST:PORT, --processes and --process (Open MPI 5: or pip install mpi4py)"


def joined() -> Cluster:
    """What `join` found; one process before it was called."""
    return _joined


def is_first() -> bool:
    """Whether this is the process that prints and writes what is not sharded."""
    return _joined.process == 0


def wait_for_all(where: str) -> None:
    """Returns when every process has come to the place of that name; at once where there is one process."""
    if _joined.processes > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)


def time_stamp() -> str:
    """When the run began, as "20260131-235959": the same in all processes, and after each restart by the launcher.

    Called by all processes, after the devices were chosen.
    """
    if stamp := os.environ.get("MESHPAR_STARTED"):
        return stamp
    now = time.strftime("%Y%m%d-%H%M%S")
    if _joined.processes == 1:
        return now
    from jax.experimental import multihost_utils

    day, second = multihost_utils.broadcast_one_to_all(np.array([int(part) for part in now.split("-")], np.int32))
    return f"{day:08d}-{second:06d}"


def find(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> Cluster:
    """What `join` would join, from its arguments and the environment variables of this process; touches nothing.

    Raises:
      ValueError: the arguments, or the variables in their stead, are incomplete or out of range.
    """
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    variables = {
        name: environment.get(name) for name in ("MESHPAR_COORDINATOR", "MESHPAR_PROCESSES", "MESHPAR_PROCESS")
    }
    if given := _given("flags", flags):
        return given
    if given := _given("launch", variables):
        devices = environment.get("MESHPAR_DEVICES")
        return replace(given, devices=int(devices) if devices else None)
    # Open MPI comes first: mpirun inside a SLURM job leaves it the variables of a single task.
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return Cluster(
            source="open mpi",
            processes=int(environment["OMPI_COMM_WORLD_SIZE"]),
            process=int(environment["OMPI_COMM_WORLD_RANK"]),
            method="ompi" if "OMPI_MCA_orte_hnp_uri" in environment else "mpi4py",  # Open MPI 5 names no address
            local_devices=_gpus(environment, alone=environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"),
        )
    # Only srun lists the step's nodes: a batch script is one process, however many tasks its job has.
    if int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in environment:
        on_nodes = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")  # such as 8(x2),4
        return Cluster(
            source="slurm",
            processes=int(environment["SLURM_NTASKS"]),
            process=int(environment["SLURM_PROCID"]),
            method="slurm",
            local_devices=_gpus(environment, alone=all(re.fullmatch(r"1(\(x\d+\))?", node) for node in on_nodes)),
        )
    if environment.get("JAX_PLATFORMS") != "cpu" and (_pod_in(environment) or _has_tpu()):
        return Cluster(source="tpu pod")
    return Cluster(source="one process")


def arguments(cluster: Cluster) -> dict[str, Any]:
    """What `jax.distributed.initialize` gets."""
    given: dict[str, Any] = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": SHUTDOWN}
    if cluster.coordinator is not None:
        given["coordinator_address"] = cluster.coordinator
        given["num_processes"], given["process_id"] = cluster.processes, cluster.process
        given["cluster_detection_method"] = "deactivate"  # else SLURM would still choose one GPU for each process
        if cluster.coordinator.startswith("127.0.0.1:"):
            given["coordinator_bind_address"] = cluster.coordinator  # by default process 0 listens to the whole network
    elif cluster.method is not None:
        given["cluster_detection_method"] = cluster.method
    if cluster.local_devices is not None:
        given["local_device_ids"] = list(cluster.local_devices)
    return given


def _given(source: str, values: Mapping[str, str | int | None]) -> Cluster | None:
    """The cluster that coordinator, processes and process, in this order and by their names, spell; None where none
    is given.
    """
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        given = " and ".join(name for name in values if name not in missing)
        raise ValueError(f"{given} came without {' and '.join(missing)}; give all three, or none of them")
    coordinator, *numbers = (f"{name} {value}" for name, value in values.items())
    address, processes, process = (str(value) for value in values.values())
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"{coordinator} names no port; write it as HOST:PORT, such as 10.0.0.1:1234")
    if not re.fullmatch(r"0*[1-9]\d*", processes):
        raise ValueError(f"{numbers[0]} is no number above 0; give the number of processes of the whole job")
    if not re.fullmatch(r"\d+", process) or int(process) >= int(processes):
        raise ValueError(f"{numbers[1]} is not one of {processes} processes; use 0 to {int(processes) - 1}")
    return Cluster(source=source, processes=int(processes), process=int(process), coordinator=address)


def _gpus(environment: Mapping[str, str], *, alone: bool) -> tuple[int, ...] | None:
    """GPUs of this process where jax would be wrong to take the one of its number on the host: a process that is alone
    there takes all, and one that sees a single GPU takes that.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    return tuple(range(count)) if count and (alone or (visible and count == 1)) else None


def _pod_in(environment: Mapping[str, str]) -> bool:
    """Whether the variables that GKE sets name several TPU hosts."""
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    return (
        "," in hosts
        or "TPU_PROCESS_ADDRESSES_PATH" in environment
        or int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1
    )


def _has_tpu() -> bool:
    """Whether this host may have TPU chips: a TPU VM names its pod nowhere but in its metadata, which jax reads."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    return any(file.read_text().strip() == _GOOGLE for file in Path("/sys/bus/pci/devices").glob("*/vendor"))
