"""Which cluster a process finds itself in, and what jax is told about it. Processes that really meet are in
`tests/cases/test_processes.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from meshpar.mesh import devices as choosing
from meshpar.mesh import distributed
from meshpar.mesh.distributed import Cluster, find, join
from meshpar.mesh.spec import MeshSpec

REPOSITORY = Path(__file__).parents[2]
LAUNCH = {
    "MESHPAR_COORDINATOR": "127.0.0.1:5000",
    "MESHPAR_PROCESSES": "2",
    "MESHPAR_PROCESS": "1",
    "MESHPAR_DEVICES": "4",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_GPUS_ON_NODE": "8",
}
ONE_A_NODE = SLURM | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
OPEN_MPI_4 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
POD = {"TPU_WORKER_HOSTNAMES": "host-0,host-1", "TPU_WORKER_ID": "1"}
TIMES = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 40}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What jax.distributed.initialize is called with, in a process where jax has not started and nothing was joined."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(distributed, "backend_started", lambda: False)
    monkeypatch.setattr(distributed, "_has_tpu", lambda: False)
    monkeypatch.setattr(distributed, "_joined", Cluster(source="one process"))
    monkeypatch.setattr(distributed, "emulate", lambda count: calls.append({"emulate": count}))
    return calls


def joined_in(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, *flags: Any) -> Cluster:
    monkeypatch.setattr(distributed.os, "environ", environment)
    return join(*flags)


@pytest.mark.parametrize(
    ("environment", "source", "process", "processes", "arguments"),
    [
        (SLURM, "slurm", 9, 16, {"cluster_detection_method": "slurm"}),
        (
            ONE_A_NODE,  # jax would take GPU 1 of 8, after SLURM_LOCALID
            "slurm",
            1,
            2,
            {"cluster_detection_method": "slurm", "local_device_ids": list(range(8))},
        ),
        (
            ONE_A_NODE | {"CUDA_VISIBLE_DEVICES": "0,1"},
            "slurm",
            1,
            2,
            {"cluster_detection_method": "slurm", "local_device_ids": [0, 1]},
        ),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "3"},  # --gpus-per-task=1: the only one it sees has number 0
            "slurm",
            9,
            16,
            {"cluster_detection_method": "slurm", "local_device_ids": [0]},
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "11(x2)"}, "slurm", 9, 16, {"cluster_detection_method": "slurm"}),
        (OPEN_MPI_4, "open mpi", 3, 4, {"cluster_detection_method": "ompi"}),
        (OPEN_MPI, "open mpi", 3, 4, {"cluster_detection_method": "mpi4py"}),
        # mpirun inside a SLURM batch job
        (OPEN_MPI_4 | SLURM | {"SLURM_PROCID": "0"}, "open mpi", 3, 4, {"cluster_detection_method": "ompi"}),
    ],
)
def test_schedulers_are_found_and_jax_is_told_to_ask_them(
    environment: dict[str, str],
    source: str,
    process: int,
    processes: int,
    arguments: dict[str, Any],
    told: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = joined_in(environment, monkeypatch)
    assert (cluster.source, cluster.process, cluster.processes) == (source, process, processes)
    assert told == [TIMES | arguments]
    assert distributed.joined() is cluster and not distributed.is_first()


def test_a_tpu_pod_is_left_to_jax_and_asked_for_its_numbers(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    cluster = joined_in(POD, monkeypatch)
    assert (cluster.source, cluster.process, cluster.processes) == ("tpu pod", 1, 2)
    assert told == [TIMES]


def test_tpu_chips_without_a_pod_are_one_process(monkeypatch: pytest.MonkeyPatch, told: list[dict[str, Any]]) -> None:
    def nothing_found(**_: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing_found)
    monkeypatch.setattr(distributed, "_has_tpu", lambda: True)
    assert joined_in({"TPU_WORKER_HOSTNAMES": "localhost"}, monkeypatch).source == "one process"
    with pytest.raises(ValueError, match=r"tpu pod: jax finds no way to process 0 .*; give --coordinator HOST:PORT"):
        joined_in(POD, monkeypatch)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},  # the batch script itself
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        POD | {"JAX_PLATFORMS": "cpu"},
    ],
)
def test_one_process_calls_nothing(
    environment: dict[str, str], told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert joined_in(environment, monkeypatch) == Cluster(source="one process")
    assert told == [] and distributed.is_first()


def test_the_launcher_s_process_emulates_its_devices_and_listens_to_this_machine_alone(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined_in(LAUNCH | SLURM | OPEN_MPI_4, monkeypatch)
    address = {"coordinator_address": "127.0.0.1:5000", "coordinator_bind_address": "127.0.0.1:5000"}
    numbers = {"num_processes": 2, "process_id": 1, "cluster_detection_method": "deactivate"}
    assert told == [{"emulate": 4}, TIMES | address | numbers]


def test_flags_come_before_everything_else(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = joined_in(LAUNCH | SLURM, monkeypatch, "10.0.0.1:1234", 3, 2)
    assert (cluster.source, cluster.process, cluster.processes) == ("flags", 2, 3)
    numbers = {"num_processes": 3, "process_id": 2, "cluster_detection_method": "deactivate"}
    assert told == [TIMES | {"coordinator_address": "10.0.0.1:1234"} | numbers]
    assert joined_in(LAUNCH, monkeypatch) is cluster  # a process joins once
    assert len(told) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("host:1", None, None), "--coordinator came without --processes and --process; give all three"),
        (("host:1", 2, None), "--coordinator and --processes came without --process; give all three"),
        ((None, None, 0), r"--process came without --coordinator and --processes; give all three"),
        (("host", 2, 0), "--coordinator host names no port; write it as HOST:PORT"),
        (("host:1", 0, 0), "--processes 0 is no number above 0; give"),
        (("host:1", 2, 2), "--process 2 is not one of 2 processes; use 0 to 1"),
        (("host:1", 2, -1), "--process -1 is not one of 2 processes; use 0 to 1"),
    ],
)
def test_wrong_flags_are_a_sentence(flags: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        find({}, coordinator=flags[0], processes=flags[1], process=flags[2])


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"MESHPAR_PROCESS": "1"},
            "MESHPAR_PROCESS came without MESHPAR_COORDINATOR and MESHPAR_PROCESSES; give all three",
        ),
        (LAUNCH | {"MESHPAR_PROCESSES": "two"}, "MESHPAR_PROCESSES two is no number above 0"),
        (LAUNCH | {"MESHPAR_PROCESS": "2"}, "MESHPAR_PROCESS 2 is not one of 2 processes; use 0 to 1"),
    ],
)
def test_wrong_variables_are_a_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        find(environment)


def test_joining_after_jax_has_started_is_refused() -> None:
    program = (
        "import jax; jax.devices()\n"
        "from meshpar.mesh.distributed import join\n"
        "try:\n    join('127.0.0.1:1', 2, 0)\nexcept RuntimeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.startswith("jax has already started in this process; call join() before")


def test_two_real_processes_make_one_mesh_and_name_their_run_alike() -> None:
    program = (
        "from meshpar.mesh.distributed import is_first, join, time_stamp, wait_for_all\n"
        "join()\n"
        "import jax, jax.numpy as jnp, os\n"
        "del os.environ['MESHPAR_STARTED']\n"
        "spread = jax.NamedSharding(jax.make_mesh((4,), ('data',)), jax.P('data'))\n"
        "numbers = jax.make_array_from_callback((4,), spread, lambda index: jnp.arange(4.0)[index])\n"
        "print(is_first(), jax.local_device_count(), float(numbers.sum()), time_stamp())\n"
        "wait_for_all('the end')"
    )
    launcher = [sys.executable, "-m", "meshpar", "launch", "--processes", "2", "--devices", "2", "--"]
    run = [*launcher, sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, cwd=REPOSITORY, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    first, second = sorted(done.stdout.splitlines())
    assert first.startswith("[0] True 2 6.0 20") and second.startswith("[1] False 2 6.0 20")
    assert first.split()[-1] == second.split()[-1]


# --- devices ---------------------------------------------------------------------------------------------------------


def choose(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, mesh: str, count: int | None = None
) -> tuple[int, int | None]:
    """(devices of the mesh, devices that this process was made to emulate) where all processes together have 8."""
    emulated: list[int] = []
    monkeypatch.setattr(choosing, "joined", lambda: cluster)
    monkeypatch.setattr(choosing, "backend_started", lambda: False)
    monkeypatch.setattr(choosing, "emulate", emulated.append)
    monkeypatch.setattr(choosing.importlib.util, "find_spec", lambda name: None)
    chosen = choosing.choose_devices(MeshSpec.parse(mesh), count)
    return len(chosen), emulated[0] if emulated else None


@pytest.mark.parametrize(
    ("each", "mesh", "count"),
    [
        (4, "data=2 tensor=4", None),
        (4, "data=-1", None),
        (None, "fsdp=8", None),
        (None, "data=-1", None),
        (4, "fsdp=8", 8),
    ],
)
def test_processes_emulate_equal_shares_of_the_mesh(
    each: int | None, mesh: str, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(source="launch", processes=2, devices=each)
    assert choose(monkeypatch, cluster, mesh, count) == (8, 4)


@pytest.mark.parametrize(
    ("processes", "each", "mesh", "sentence"),
    [
        (2, 4, "data=4", "4 devices do not spread over 2 processes of 4; use a mesh of 8"),
        (2, 4, "data=16", "16 devices do not spread over 2 processes of 4; use a mesh of 8"),
        (2, None, "data=7", "7 devices do not spread over 2 processes; use a mesh of 6 or 8"),
        (4, None, "data=2", "2 devices do not spread over 4 processes; use a mesh of 4"),
        (2, None, "data=4", "4 devices asked for and the 2 processes have 8; use them all"),
    ],
)
def test_a_mesh_that_leaves_a_process_without_its_share_is_refused(
    processes: int, each: int | None, mesh: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=sentence):
        choose(monkeypatch, Cluster(source="launch", processes=processes, devices=each), mesh)
