"""How much host memory does loading a Hugging Face checkpoint take beyond the parameters themselves?

    python -m experiments.bench_load
    python -m experiments.bench_load --layers 24 --mesh "fsdp=4 tensor=2"

Writes a random Llama of about 500 MB in several files, loads it onto 8 emulated devices, and asks Linux for the most
memory that the process held meanwhile. All devices are in this process, so it ends up with one whole copy; what it held
besides is compared with the largest tensor. Exit code 1 when that is twice the largest tensor or more.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 1e6


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=12, help="of 8.4M parameters (default: %(default)s, 500 MB)")
    parser.add_argument("--vocab", type=int, default=16_000, help="rows of the largest tensor (default: %(default)s)")
    parser.add_argument("--mesh", default="fsdp=8", help='(default: "%(default)s")')
    options = parser.parse_args(arguments)

    import jax

    from meshpar.hf.folder import load_hf, open_hf
    from meshpar.mesh.emulate import emulate
    from meshpar.mesh.spec import MeshSpec
    from meshpar.plan import Plan
    from models.llama import LlamaConfig

    plan = Plan(mesh=MeshSpec.parse(options.mesh))
    emulate(plan.mesh.product)
    jax.devices()
    config = LlamaConfig(
        vocab=options.vocab, layers=options.layers, embed=768, heads=12, kv_heads=6, mlp=2816, max_seq=1024
    )
    tiny = LlamaConfig(vocab=128, layers=2, embed=64, heads=8, kv_heads=8, mlp=64, max_seq=64)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "tiny", tiny)
        load_hf(Path(folder) / "tiny", plan)  # what jax allocates once, it has allocated
        write(Path(folder) / "model", config)
        source = open_hf(Path(folder) / "model")
        files = len(list((Path(folder) / "model").glob("*.safetensors")))
        largest = max(tensor.nbytes for tensor in source.tensors.values())  # type: ignore[attr-defined]
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
        before, begun = resident(), time.perf_counter()
        loaded = load_hf(Path(folder) / "model", plan)
        jax.block_until_ready(loaded.params)
        seconds, after, highest = time.perf_counter() - begun, resident(), resident("VmHWM")
    shards = sum(shard.data.nbytes for leaf in jax.tree.leaves(loaded.params) for shard in leaf.addressable_shards)
    beyond = highest - before - shards
    total = source.model.size * 4
    print(f"checkpoint         {total / MB:8.1f} MB in {files} files, largest tensor {largest / MB:.1f} MB")
    print(f"mesh               {plan.mesh}, {seconds:.1f} s to load")
    print(f"final shards       {shards / MB:8.1f} MB; the process grew by {(after - before) / MB:.1f} MB")
    print(f"highest            {(highest - before) / MB:8.1f} MB above what it was before")
    print(f"beyond the shards  {beyond / MB:8.1f} MB, {beyond / largest:.2f} of the largest tensor (limit: 2)")
    return 0 if beyond < 2 * largest else 1


def write(folder: Path, config: Any) -> None:
    """A random checkpoint in several files, a tensor at a time."""
    import json

    import numpy as np

    from meshpar.hf.families import family_of_config
    from meshpar.hf.mapping import outgoing, shapes_of
    from meshpar.hf.safetensors import write_folder
    from meshpar.module import abstract

    family, rng = family_of_config(config), np.random.default_rng(0)
    shapes = shapes_of(abstract(config.build, config).shapes)

    def drawn(path: str, layer: int | None) -> np.ndarray:
        return rng.random(shapes[path] if layer is None else shapes[path][1:], np.float32)

    specs, chunks = outgoing(family.weights(config), shapes, np.dtype(np.float32), drawn)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.write_config(config)))
    write_folder(folder, specs, chunks, shard_bytes=100_000_000)


def resident(which: str = "VmRSS") -> int:
    """Bytes of memory that this process holds, mapped files included; VmHWM is the highest so far."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[which].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
