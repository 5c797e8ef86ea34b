"""How many tokens a second does the data pipeline deliver, and how fast is text tokenised?

    python -m experiments.bench_data
    python -m experiments.bench_data --set data.seq=1024 --set train.batch=64 --seconds 5
    python -m experiments.bench_data --mixture "stdlib=0.7 data/*.jsonl=0.3" --out data.json

Three cells: rows of a recipe's data as windows, packed, and from a mixture with weights. Each is read twice: batches
made when asked for, and by a background thread ahead of a caller that does nothing else. A batch is ready when its
numpy arrays are; placing it on devices is not counted. The text is tokenised into an empty cache first, the training of
the tokenizer included; packed rows use the same tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_recipe, add_set
from experiments.bench_step import cpu_seconds, machine

MIXTURE = "stdlib=0.7 {here}/*.py=0.3"  # this folder's scripts: small, and everyone has them


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was measured of one way to read."""

    name: str
    rows: int  # in the training split
    bytes: int  # of text, both splits
    open_seconds: float  # reading, training the tokenizer, tokenising; of packed rows opening only
    first_seconds: float  # from the call to the first batch: packing rows, importing grain
    asked: float  # tokens a second, each batch made when asked for
    ahead: float  # tokens a second, prepared by a thread
    cpu_microseconds: float  # of all threads, for each row, when asked for


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser, what="whose data and batch are read")
    add_set(parser)
    parser.add_argument("--mixture", default=MIXTURE.format(here=Path(__file__).parent), help="sources with weights")
    parser.add_argument("--seconds", type=float, default=2.0, help="of reading, for each number (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write everything that was measured as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.seconds <= 0:
            raise ValueError(f"--seconds {options.seconds} reads nothing; use 2")
        cells = measure(options.recipe, options.overrides, options.mixture, options.seconds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(json.dumps([dataclasses.asdict(cell) for cell in cells], indent=1))
    print_results(options.recipe, cells)
    return 0


def measure(recipe: str, overrides: list[str], mixture: str, seconds: float) -> list[Cell]:
    """All cells, of one recipe."""
    from meshpar.train.recipe import apply_overrides, load_recipe

    run = apply_overrides(load_recipe(recipe), overrides)
    kinds: dict[str, dict[str, Any]] = {
        "windows": dict(packed=False),
        "packed": dict(packed=True),
        "mixture": dict(packed=False, source=mixture),
    }
    cells = []
    with tempfile.TemporaryDirectory() as cache:
        for name, changes in kinds.items():
            data = dataclasses.replace(run.data, **changes)
            cells.append(one_cell(name, data, run.train.batch, seconds, Path(cache)))
            print(f"{name} done", file=sys.stderr, flush=True)
    return cells


def one_cell(name: str, config: Any, batch: int, seconds: float, cache: Path) -> Cell:
    """Opens the data, which tokenises what the cache does not have, and reads it."""
    from meshpar.train.data import open_dataset
    from meshpar.train.rows import make_rows

    begun = time.perf_counter()
    dataset = open_dataset(config, cache=cache)
    opened = time.perf_counter() - begun
    counts = [json.loads((source.folder / "meta.json").read_text()) for source in dataset.sources]
    speeds = []
    for prefetch in (0, max(config.prefetch, 1)):
        again = dataclasses.replace(dataset, config=dataclasses.replace(config, prefetch=prefetch))
        speeds.append(read(again, batch, seconds))
    (first, asked, cpu), (_, ahead, _) = speeds
    return Cell(
        name=name,
        rows=sum(len(make_rows(s.train, seq=config.seq, packed=config.packed)) for s in dataset.sources),
        bytes=sum(count[split]["bytes"] for count in counts for split in ("train", "validation")),
        open_seconds=opened,
        first_seconds=first,
        asked=asked,
        ahead=ahead,
        cpu_microseconds=1e6 * cpu * config.seq / asked,
    )


def read(dataset: Any, batch: int, seconds: float) -> tuple[float, float, float]:
    """Seconds to the first batch, tokens a second after it, and CPU seconds for each second."""
    from meshpar.train.data import train_batches

    begun = time.perf_counter()
    batches = train_batches(dataset, batch=batch)
    next(batches)
    first = time.perf_counter() - begun
    begun, cpu, count = time.perf_counter(), cpu_seconds(), 0
    while (took := time.perf_counter() - begun) < seconds:
        next(batches)
        count += 1
    return first, count * batch * dataset.config.seq / took, (cpu_seconds() - cpu) / took


def print_results(recipe: str, cells: list[Cell]) -> None:
    """One table, a row for each cell."""
    from rich.console import Console
    from rich.table import Table

    columns = ["rows", "text", "training rows", "opened in s", "first batch s"]
    columns += ["M tokens/s, asked", "M tokens/s, ahead", "CPU µs a row"]
    table = Table(*columns, title=f"data of {recipe}", title_justify="left", box=None)
    for cell in cells:
        table.add_row(
            cell.name,
            f"{cell.bytes / 1e6:.1f} MB",
            str(cell.rows),
            f"{cell.open_seconds:.2f}",
            f"{cell.first_seconds:.2f}",
            f"{cell.asked / 1e6:.2f}",
            f"{cell.ahead / 1e6:.2f}",
            f"{cell.cpu_microseconds:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    console.print(machine(), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
