"""How long until the first step: compile time by depth, launch to first step, and what `import meshpar` costs.

    python -m experiments.bench_compile
    python -m experiments.bench_compile --only depth --repeats 1
    python -m experiments.bench_compile --only launch --recipe llama_tiny_stdlib --out compile.json

Depth: the step of the recipe on one device with 4 and with 32 layers, traced, lowered and compiled without any cache,
with a loop over layers (unroll=1) and as the recipe has it. Launch: `python -m experiments.train_lm` from the start of
the process to the line that tells the first step's loss is there, with tokens on disk and an empty compilation cache,
then again with the cache it left. Import: `import meshpar` after `import jax`, and all of its public names. Medians
over the repeats, in brackets the least and the most. On a busy machine trust the CPU seconds, of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from experiments.arguments import add_recipe
from experiments.bench_step import cpu_seconds, in_fresh_process, machine

PARTS = ("depth", "launch", "import")
DEPTHS = (4, 32)
IMPORT = """
import time, jax
begun = time.perf_counter()
import meshpar

from experiments.arguments import add_recipe

from experiments.arguments import add_recipe
bare = time.perf_counter() - begun
for name in meshpar.__all__:
    getattr(meshpar, name)
print(bare, time.perf_counter() - begun)
"""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=PARTS, help="one of the three (default: all)")
    add_recipe(parser, "llama_6m_stdlib")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write all seconds as JSON")
    options = parser.parse_args(arguments)
    measures: dict[str, Callable[[str, int], dict[str, list[float]]]] = {
        "depth": depth,
        "launch": launch,
        "import": import_time,
    }
    try:
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats} measures nothing; use 1 or more")
        seconds: dict[str, list[float]] = {}
        for part in [options.only] if options.only else PARTS:
            print(f"{part} ...", file=sys.stderr, flush=True)
            seconds |= measures[part](options.recipe, options.repeats)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_seconds(seconds)
    if options.out:
        options.out.write_text(json.dumps(seconds, indent=1))
    return 0


def depth(recipe: str, repeats: int) -> dict[str, list[float]]:
    """Seconds to compile the step, by depth and loop."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for unroll in ("unroll=1", ""):
            for layers in DEPTHS:
                name = f"compile, {layers} layers, {unroll or 'as the recipe'}"
                overrides = [f"model.layers={layers}", *([unroll] if unroll else [])]
                wall, cpu = in_fresh_process(compile_seconds, recipe, overrides)
                found.setdefault(name, []).append(wall)
                found.setdefault(f"{name}, CPU", []).append(cpu)
    return found


def compile_seconds(recipe: str, overrides: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds to trace, lower and compile the step of a recipe, in a process that has compiled nothing."""
    import jax

    from meshpar.mesh.devices import choose_devices
    from meshpar.train.build import build
    from meshpar.train.recipe import apply_overrides, load_recipe

    made = apply_overrides(load_recipe(recipe), overrides)
    devices = choose_devices(made.plan.mesh, None)
    jax.config.update("jax_enable_compilation_cache", False)
    model = made.abstract_model()
    training = build(
        model,
        made.optimizer.make(made.train.steps, model),
        made.plan,
        batch=made.train.batch,
        seq=made.data.seq,
        objective=made.objective,
        devices=devices,
    )
    begun, cpu = time.perf_counter(), cpu_seconds()
    training.compile()
    return time.perf_counter() - begun, cpu_seconds() - cpu


def launch(recipe: str, repeats: int) -> dict[str, list[float]]:
    """Seconds from the start of the process to the first step, with an empty compilation cache and with a full one."""
    from meshpar.train.data import open_dataset
    from meshpar.train.recipe import load_recipe

    open_dataset(load_recipe(recipe).data)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "full"):
                name = f"launch to first step, compilation cache {cache}"
                wall, cpu = first_step_seconds(recipe, Path(folder) / "xla", Path(folder) / f"run-{cache}")
                found.setdefault(name, []).append(wall)
                found.setdefault(f"{name}, CPU", []).append(cpu)
    return found


def first_step_seconds(recipe: str, cache: Path, out: Path) -> tuple[float, float]:
    """Starts the training script and stops it after its first step; wall and CPU seconds."""
    command = [sys.executable, "-m", "experiments.train_lm", "--recipe", recipe, "--out", str(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    with subprocess.Popen(
        command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("first step"):
                seconds = time.perf_counter() - begun
                process.kill()
                process.wait()
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    raise ValueError(f"{' '.join(command)} ended with {process.returncode} before its first step; run it to see why")


def import_time(recipe: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of `import meshpar`, and of all its public names, in processes that have imported jax."""
    found: dict[str, list[float]] = {"import meshpar": [], "all public names of meshpar": []}
    for _ in range(repeats):
        printed = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
        for name, value in zip(found, printed.split(), strict=True):
            found[name].append(float(value))
    return found


def print_seconds(seconds: dict[str, list[float]]) -> None:
    """One line for each time, and the ratios of the two depths."""
    for name, values in seconds.items():
        print(f"{name}: {statistics.median(values):.2f} s [{min(values):.2f} {max(values):.2f}]")
    few, many = DEPTHS
    for name, values in seconds.items():
        deeper = seconds.get(name.replace(f"{few} layers", f"{many} layers"))
        if deeper is not None and deeper is not values:
            print(
                f"{name.replace(f'{few} layers', f'{many} / {few} layers')}: "
                f"{statistics.median(deeper) / statistics.median(values):.2f} x"
            )
    print(machine())


if __name__ == "__main__":
    sys.exit(main())
