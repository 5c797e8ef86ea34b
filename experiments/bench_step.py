"""How fast is one training step, beside the same model's step written by hand in plain JAX and optax?

    python -m experiments.bench_step
    python -m experiments.bench_step --cells "data=1:fp32" "data=2 tensor=4" --blocks 8 --steps 10 --out step.json
    python -m experiments.bench_step --only-memory
    python -m experiments.bench_step --set remat=full --cells data=1:bf16

The model is that of the recipe llama_6m_stdlib: 4 layers, d 256, 8 heads / 4 kv, ff 1024, vocabulary 4096, batch
8 x 256. A cell is a mesh and a compute dtype, each in a process of its own that emulates just its devices; both steps
run in it, on the same devices, weights and batches. They take turns block by block, so that whatever else the machine
does hits both. A block's first step is not counted. Wall time is the ratio of the medians over all steps, CPU time the
ratio of the sums over all blocks; in brackets the smallest and largest ratio of a single block.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_set

RECIPE = "llama_6m_stdlib"
MESHES = ("data=1", "fsdp=8", "data=2 tensor=4")
DTYPES = ("fp32", "bf16", "fp16")
LR = 3e-4  # constant for both, so that their losses can be compared


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """What was measured of one of the two steps."""

    compile_seconds: float
    temp_bytes: int  # per device
    seconds: tuple[tuple[float, ...], ...] = ()  # by block, of each counted step
    cpu_seconds: tuple[float, ...] = ()  # by block, of its counted steps
    losses: tuple[float, ...] = ()  # of every step, counted or not

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(second for block in self.seconds for second in block)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The result of one cell."""

    mesh: str
    dtype: str
    ours: Contestant
    plain: Contestant

    def wall_ratio(self) -> tuple[float, float, float]:
        """Ours to plain: of the medians, and the least and largest of a block."""
        blocks = [
            statistics.median(a) / statistics.median(b)
            for a, b in zip(self.ours.seconds, self.plain.seconds, strict=True)
        ]
        return self.ours.milliseconds / self.plain.milliseconds, min(blocks), max(blocks)

    def cpu_ratio(self) -> tuple[float, float, float]:
        """Ours to plain: of the sums, and the least and largest of a block."""
        blocks = [a / b for a, b in zip(self.ours.cpu_seconds, self.plain.cpu_seconds, strict=True)]
        return sum(self.ours.cpu_seconds) / sum(self.plain.cpu_seconds), min(blocks), max(blocks)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        default=list(MESHES),
        metavar="MESH[:DTYPE]",
        help=f"a mesh of data, fsdp and tensor, with {' or '.join(DTYPES)}, each by default (default: all)",
    )
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each step in a cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="steps in a block, the first not counted (%(default)s)")
    add_set(parser, "change ours")
    parser.add_argument("--only-memory", action="store_true", help="compile both, run none")
    parser.add_argument("--out", type=Path, help="write everything that was measured as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.blocks < 1 or options.steps < 2:
            raise ValueError(f"--blocks {options.blocks} --steps {options.steps} counts no step; use 1 and 2 or more")
        cells = [cell for text in options.cells for cell in parse_cell(text)]
        results = []
        for mesh, dtype in cells:
            blocks = 0 if options.only_memory else options.blocks
            results.append(in_fresh_process(measure, mesh, dtype, options.overrides, blocks, options.steps))
            done = f"{mesh} {dtype} done" + (f": wall {results[-1].wall_ratio()[0]:.2f}" if blocks else "")
            print(done, file=sys.stderr, flush=True)
            if options.out:  # after each cell, so that a run that is stopped leaves what it has
                options.out.write_text(json.dumps([dataclasses.asdict(cell) for cell in results], indent=1))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_results(results, timed=not options.only_memory)
    return 0


def parse_cell(text: str) -> list[tuple[str, str]]:
    """ "fsdp=8:bf16" is one mesh and dtype, "fsdp=8" that mesh with every dtype.

    Raises:
      ValueError: no such mesh or dtype, or a mesh that the plain step does not know.
    """
    from meshpar.mesh.spec import MeshSpec

    mesh, colon, dtype = text.partition(":")
    spec = MeshSpec.parse(mesh)
    if colon and dtype not in DTYPES:
        raise ValueError(f"--cells {text!r} ends in {dtype!r}, which is no compute dtype; use {' or '.join(DTYPES)}")
    if spec.has_free_axis or spec.data * spec.fsdp * spec.tensor != spec.product:
        raise ValueError(f"--cells {text!r} is not sizes of data, fsdp and tensor; write for example 'fsdp=8'")
    return [(str(spec), dtype)] if colon else [(str(spec), dtype) for dtype in DTYPES]


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a new interpreter: the number of emulated devices, and with it of XLA's threads, is
    fixed once jax has started.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(mesh: str, dtype: str, overrides: Sequence[str], blocks: int, steps: int) -> Cell:
    """One cell, in this process, which must not have started jax yet."""
    import jax
    import numpy as np

    from meshpar.mesh.emulate import emulate
    from meshpar.mesh.spec import MeshSpec

    degrees = MeshSpec.parse(mesh).sizes
    emulate(MeshSpec.parse(mesh).product)
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured

    from experiments import plain_step
    from experiments.recipes import llama_6m_stdlib
    from meshpar.interfaces import Batch
    from meshpar.module import abstract
    from meshpar.train.build import build
    from meshpar.train.recipe import apply_overrides

    settings = [f"mesh={mesh}", f"precision.compute={dtype}", f"optimizer.lr={LR}", "optimizer.schedule=constant"]
    recipe = apply_overrides(llama_6m_stdlib(), [*settings, "optimizer.warmup=0", *overrides])
    config, rows, seq = recipe.model, recipe.train.batch, recipe.data.seq

    model = abstract(config.build, config)
    training = build(
        model,
        recipe.optimizer.make(recipe.train.steps, model),
        recipe.plan,
        batch=rows,
        seq=seq,
        objective=recipe.objective,
    )
    begun = time.perf_counter()
    ours = training.compile()
    ours_compile = time.perf_counter() - begun

    sizes = plain_step.Sizes(
        layers=config.layers,
        embed=config.embed,
        heads=config.heads,
        kv_heads=config.kv_heads,
        mlp=config.mlp,
        vocab=config.vocab,
        seq=seq,
        compute=recipe.plan.precision.compute_dtype,
    )
    by_hand = plain_step.make(sizes, degrees, jax.devices(), lr=LR)
    begun = time.perf_counter()
    plain = by_hand.step.lower(*plain_step.abstract_arguments(sizes, by_hand, rows)).compile()
    plain_compile = time.perf_counter() - begun

    found = {
        "ours": {"compile_seconds": ours_compile, "temp_bytes": ours.memory_analysis().temp_size_in_bytes},
        "plain": {"compile_seconds": plain_compile, "temp_bytes": plain.memory_analysis().temp_size_in_bytes},
    }
    if blocks:
        drawn = np.random.default_rng(0).integers(0, config.vocab, (4, rows, seq + 1), dtype=np.int32)
        batches = [
            training.place(
                Batch(tokens=b[:, :-1], targets=b[:, 1:], weights=np.ones((rows, seq), np.float32))  # type: ignore[arg-type]
            )
            for b in drawn
        ]
        tokens = [jax.device_put(b, by_hand.token_sharding) for b in drawn]
        state = training.init()
        # a copy through the host: both steps donate their parameters
        params = jax.device_put(jax.device_get(plain_step.parameters_of(state.params)), by_hand.shardings)
        opt_state = by_hand.init(params)

        def our_step(number: int) -> float:
            nonlocal state
            state, metrics = ours(state, batches[number % 4])
            jax.block_until_ready((state.params, metrics))
            return float(metrics["loss"])

        def plain_one(number: int) -> float:
            nonlocal params, opt_state
            params, opt_state, loss = plain(params, opt_state, tokens[number % 4])
            jax.block_until_ready((params, loss))
            return float(loss)

        runs = {"ours": Timer(our_step), "plain": Timer(plain_one)}
        for block in range(blocks):
            for name in ("ours", "plain") if block % 2 else ("plain", "ours"):
                runs[name].block(steps)
        for name, run in runs.items():
            found[name] |= {
                "seconds": tuple(run.seconds),
                "cpu_seconds": tuple(run.cpu_seconds),
                "losses": tuple(run.losses),
            }
    return Cell(mesh=mesh, dtype=dtype, ours=Contestant(**found["ours"]), plain=Contestant(**found["plain"]))


class Timer:
    """Runs blocks of one step and keeps their times."""

    def __init__(self, step: Callable[[int], float]):
        self._step = step
        self.seconds: list[tuple[float, ...]] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []

    def block(self, steps: int) -> None:
        """Runs `steps` steps; the first, which finds the other's data in the caches, is not counted."""
        self.losses.append(self._step(len(self.losses)))
        seconds, cpu = [], cpu_seconds()
        for _ in range(steps - 1):
            begun = time.perf_counter()
            self.losses.append(self._step(len(self.losses)))
            seconds.append(time.perf_counter() - begun)
        self.seconds.append(tuple(seconds))
        self.cpu_seconds.append(cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """CPU seconds of this process so far, all threads, user and system."""
    times = os.times()
    return times.user + times.system


def print_results(results: Sequence[Cell], *, timed: bool) -> None:
    """One table, a row for each cell."""
    from rich.console import Console
    from rich.table import Table

    columns = ["mesh", "compute"]
    if timed:
        columns += ["wall, ours/plain", "CPU, ours/plain", "ms", "loss, first to last"]
    table = Table(*columns, "compile s", "temp MB", title=f"{RECIPE}: ours / plain", title_justify="left", box=None)
    for cell in results:
        ours, plain = cell.ours, cell.plain
        row = [cell.mesh, cell.dtype]
        if timed:
            row += [
                _with_spread(cell.wall_ratio()),
                _with_spread(cell.cpu_ratio()),
                f"{ours.milliseconds:.0f} / {plain.milliseconds:.0f}",
                " / ".join(f"{one.losses[0]:.3f} {one.losses[-1]:.3f}" for one in (ours, plain)),
            ]
        table.add_row(
            *row,
            f"{ours.compile_seconds:.1f} / {plain.compile_seconds:.1f}",
            f"{ours.temp_bytes / 2**20:.0f} / {plain.temp_bytes / 2**20:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    console.print(machine(), highlight=False)


def machine() -> str:
    """What belongs beside every number: day, hardware, versions."""
    from importlib.metadata import version

    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line[:10] == "model name"]
        processor = names[0] if names else processor
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {processor}, Python {platform.python_version()}, "
        f"jax {version('jax')}, jaxlib {version('jaxlib')}"
    )


def _with_spread(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[0]:.2f} [{ratio[1]:.2f} {ratio[2]:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
