"""Machines that are not here: devices to compile for, on any CPU.

    training = build(model, optimizer, plan, batch=256, seq=4096, devices=topology("v5e:4x4"))
    print(training.collectives().totals())

`libtpu` holds the TPU's compiler, the CUDA plug-ins of jax hold the GPU's; both take a description of the machine in
place of the machine. Nothing runs. A program that does not fit a TPU's memory is refused when it is compiled; for GPUs
there is no such check, and no cuDNN, so that attention is plain XLA.

| name | machine |
| --- | --- |
| `v5e:4x4` | 16 TPU chips in a square of 4 by 4; v6e alike |
| `v5p:2x2x4` | 16 chips in a box; v4 and tpu7x alike, which show two devices a chip |
| `v5e:4x4*2` | two such slices, with the data-centre network between them |
| `h100:8` | one node of 8 GPUs; h200 and a100 alike |
| `h100:8*4` | four nodes |
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any, Final

import jax

from meshpar.compat import backend_started
from meshpar.spelling import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the compiler asks of a GPU. Sources: NVIDIA's data sheets and its table of limits by compute capability."""

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    clock_ghz: float
    memory: int  # bytes
    bandwidth: int  # bytes a second
    l2: int  # bytes
    shared_memory: int  # bytes, of one multiprocessor


# An example of each, which shows how many sides its torus has.
TPUS: Final = {"v4": "2x2x2", "v5e": "4x4", "v5p": "2x2x4", "v6e": "4x4", "tpu7x": "2x2x1"}
_GIB = 2**30
GPUS: Final = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        clock_ghz=1.41,
        memory=80 * _GIB,
        bandwidth=2039 * 10**9,
        l2=40 * 2**20,
        shared_memory=164 * 2**10,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        memory=80 * _GIB,
        bandwidth=3352 * 10**9,
        l2=50 * 2**20,
        shared_memory=228 * 2**10,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        cores=132,
        clock_ghz=1.98,
        memory=141 * 10**9,
        bandwidth=4800 * 10**9,
        l2=50 * 2**20,
        shared_memory=228 * 2**10,
    ),
}

# libtpu asks these of the machine that it is on; this one has no TPU to tell of.
_QUIET: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology(name: str) -> list[jax.Device]:
    """The devices of a machine that is not here, for `build(..., devices=...)`; they compile and do not run.

    Where jax has not started yet it starts on CPU, since it would look for the hardware of the plug-in: a process that
    calls this first has no accelerator of its own.

    Args:
      name: as in the table above.

    Raises:
      ValueError: no such machine or shape, or a package that is not installed; the sentence has its name and version.
    """
    found = re.fullmatch(r"\s*([\w.\-]+):(\d+(?:x\d+)*)(?:\*(\d+))?\s*", name)
    kind = found[1].lower() if found else name.partition(":")[0].strip().lower()
    if kind not in (*TPUS, *GPUS):
        raise ValueError(f"unknown machine {kind!r}{did_you_mean(kind, [*TPUS, *GPUS]) or ';'} {_known()}")
    if found is None:
        raise ValueError(f"topology {name!r} is not machine:shape, with *slices behind it for several; {_known()}")
    count = int(found[3] or 1)
    if count < 1:
        raise ValueError(f"topology {name!r} has no slices; give a positive number behind the *")
    make = _tpu if kind in TPUS else _gpu
    if not backend_started():
        jax.config.update("jax_platforms", "cpu")
    return make(kind, found[2], count)


def _tpu(kind: str, shape: str, slices: int) -> list[jax.Device]:
    sides = TPUS[kind].count("x") + 1
    if shape.count("x") + 1 != sides or "0" in shape.split("x"):
        raise ValueError(
            f"{kind}:{shape} is no torus of {sides} sides; name the chips along each, for example {kind}:{TPUS[kind]}"
        )
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ValueError(_missing(f"{kind}:{shape}", "libtpu", ("libtpu",), "tpu"))
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    options = {"num_slices": slices} if slices > 1 else {}
    try:
        return _devices("tpu", f"{kind}:{shape}", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"libtpu has no machine {kind}:{shape} ({str(error).splitlines()[0]}); most sides are powers of 2, for "
            f"example {kind}:{TPUS[kind]}"
        ) from error


def _gpu(kind: str, shape: str, nodes: int) -> list[jax.Device]:
    if not shape.isdigit() or int(shape) < 1:
        raise ValueError(
            f"{kind}:{shape} is no node; give the number of its GPUs, and that of nodes as {kind}:8*{nodes}"
        )
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        raise ValueError(
            _missing(f"{kind}:{shape}", "jax's CUDA plug-in", ("jax-cuda13-plugin", "jax-cuda13-pjrt"), "aot-cuda")
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # else it says at length that there is no GPU
    config = _target(GPUS[kind])
    return _devices("cuda", kind, target_config=config, topology=f"{nodes}x1x{shape}")


def _devices(platform: str, name: str, **options: Any) -> list[jax.Device]:
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(name, platform, **options).devices)


def _target(gpu: Gpu) -> str:
    """The description that XLA's GPU compiler reads, a text of its GpuTargetConfigProto."""
    major, minor = gpu.capability
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": gpu.shared_memory,
        "shared_memory_per_block_optin": gpu.shared_memory - 2**10,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": 64 if major == 8 else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.l2,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    return (
        "gpu_device_info {\n"
        + "".join(f"  {field}: {value}\n" for field, value in device.items())
        + f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        f'platform_name: "CUDA"\ndevice_description_str: "{gpu.name}"\n'
    )


def _known() -> str:
    examples = [f"{kind}:{shape}" for kind, shape in TPUS.items()] + [f"{kind}:8" for kind in GPUS]
    return f"there are, for example, {', '.join(examples)}, and v5e:4x4*2 for two slices"


def _missing(what: str, needed: str, packages: tuple[str, ...], extra: str) -> str:
    """A sentence that names what to install for the jax in use."""
    pins = " ".join(f'"{package}{_pin(package)}"' for package in packages)
    return (
        f"{what} needs {needed} to compile for, which is not installed; for jax {jax.__version__}: pip install {pins}, "
        f'or from a clone pip install -e ".[{extra}]"'
    )


def _pin(package: str) -> str:
    """The version of a package that the installed jax asks for, as `==0.0.42.*`."""
    for requirement in importlib.metadata.requires("jax") or []:
        name = requirement.partition(";")[0].strip()
        if found := re.match(rf"{re.escape(package)}(?:\[[\w\-,]*\])?\s*([=<>!~].*)$", name):
            versions = dict.fromkeys(re.findall(r"[\d.*]+", found[1]))  # "<=0.10.2,>=0.10.2" is one version
            return f"=={next(iter(versions))}" if len(versions) == 1 else found[1]
    return f"=={jax.__version__}"
