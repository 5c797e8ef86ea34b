"""What does a token cost, early and late in a row, with a cache and without one?

    python -m experiments.bench_decode
    python -m experiments.bench_decode --lengths 256 1024 --rows 1 --set mesh="data=2 tensor=2"

The recipe's model with random weights continues prompts of 16 tokens until a row is full, for each length of the
cache. With the cache: milliseconds a token in the first and in the last quarter of the row, whose ratio should be 1,
and how often each program was compiled. Without one: milliseconds of a forward of the whole row, which is what a token
costs then. Medians over all tokens of a quarter; in brackets the quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_recipe, add_set
from experiments.bench_step import machine

PROMPT = 16


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was measured of one length; seconds."""

    length: int
    rows: int
    compiles: list[int]  # of prompts and of tokens
    compile_seconds: float  # of both, with the first two tokens
    prompt: float  # from prompts to the first tokens
    early: list[float]  # of each token in the first quarter
    late: list[float]  # and in the last
    whole: list[float]  # of forwards of whole rows


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser, "llama_6m_stdlib", "whose model and plan")
    add_set(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024], help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="of a batch (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write all seconds as JSON")
    options = parser.parse_args(arguments)
    try:
        if min(options.lengths) < 4 * PROMPT or options.rows < 1:
            raise ValueError(f"--lengths of at least {4 * PROMPT} and --rows of at least 1 can be measured; give such")
        cells = measure(options.recipe, options.overrides, options.lengths, options.rows)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(json.dumps([dataclasses.asdict(cell) for cell in cells], indent=1))
    print_results(cells)
    return 0


def measure(recipe: str, overrides: list[str], lengths: list[int], rows: int) -> list[Cell]:
    """One cell for each length, in this process."""
    import jax

    from meshpar.mesh.build import build_mesh
    from meshpar.mesh.devices import choose_devices
    from meshpar.module import init_sharded
    from meshpar.train.recipe import apply_overrides, load_recipe

    run = apply_overrides(load_recipe(recipe), [f"model.max_seq={max(lengths)}", *overrides])
    model = run.abstract_model()
    devices = choose_devices(run.plan.mesh, None)
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured
    plan = run.plan.on(len(devices))
    mesh = build_mesh(plan.mesh, devices)
    cells, params = [], None
    for length in lengths:
        print(f"length {length} ...", file=sys.stderr, flush=True)
        from meshpar.generate.generator import Generator

        generator = Generator(model, plan, mesh, rows=rows, length=length)
        if params is None:
            drawn = init_sharded(
                model, jax.random.key(0), jax.tree.map(lambda x: x.sharding, generator.abstract_params())
            )
            params = generator.ready(drawn)
        cells.append(one_cell(generator, params))
    return cells


def one_cell(generator: Any, params: Any) -> Cell:
    """Continues prompts to the end of the cache, then runs whole rows of its length."""
    import numpy as np

    prompts = np.random.default_rng(0).integers(0, generator.model.config.vocab, (generator.rows, PROMPT)).tolist()
    begun = time.perf_counter()
    generator.generate(params, prompts, new_tokens=2)
    compile_seconds = time.perf_counter() - begun
    seconds, at = [], time.perf_counter()
    for _ in generator.stream(params, prompts, new_tokens=generator.length - PROMPT):
        now = time.perf_counter()
        seconds.append(now - at)
        at = now
    prompt, *tokens = seconds
    quarter = len(tokens) // 4
    return Cell(
        length=generator.length,
        rows=generator.rows,
        compiles=[program._cache_size() for program in (generator._prefill, generator._decode)],
        compile_seconds=compile_seconds,
        prompt=prompt,
        early=tokens[:quarter],
        late=tokens[-quarter:],
        whole=whole_rows(generator, params, repeats=8),
    )


def whole_rows(generator: Any, params: Any, repeats: int) -> list[float]:
    """Seconds of a forward of rows as long as the cache, up to the logits of one position."""
    import jax
    import numpy as np

    from meshpar.generate.decode import read_prompts

    def forward(params: Any, tokens: Any, ends: Any) -> Any:
        logits, _ = read_prompts(generator._forward, params, tokens, ends, length=generator.length)
        return logits.argmax(axis=-1)  # XLA drops the caches, which nobody reads

    compiled = jax.jit(forward, compiler_options=generator._options)
    tokens = np.ones((generator._rows, generator.length), np.int32)
    ends = np.full(generator._rows, generator.length, np.int32)
    jax.block_until_ready(compiled(params, tokens, ends))
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(params, tokens, ends))
        seconds.append(time.perf_counter() - begun)
    return seconds


def print_results(cells: list[Cell]) -> None:
    """A table in Markdown, and where and when."""
    names = (
        "length",
        "first quarter, ms a token",
        "last quarter",
        "late / early",
        "whole row",
        "prompt, ms",
        "compiles",
    )
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for cell in cells:
        ratio = statistics.median(cell.late) / statistics.median(cell.early)
        print(
            f"| {cell.length} | {_spread(cell.early)} | {_spread(cell.late)} | {ratio:.2f} | {_spread(cell.whole)} | "
            f"{1e3 * cell.prompt:.1f} | {' + '.join(map(str, cell.compiles))} |"
        )
    print(f"\n{cells[0].rows} rows; {machine()}")


def _spread(seconds: list[float]) -> str:
    low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
