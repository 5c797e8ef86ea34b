"""How long does a checkpoint hold up training?

    python -m experiments.bench_checkpoint
    python -m experiments.bench_checkpoint --mb 1024 --rounds 3 --folder /mnt/fast --out checkpoint.json
    python -m experiments.bench_checkpoint --rows 16

A Llama with AdamW in fp32 on one device, with as many layers as make its state nearest to --mb. A save is timed twice:
with nothing else to do until it is on disk (synchronous), and in the middle of training. There each round is some
ordinary steps, a save, and the steps until it is on disk. Reported are how long `save` keeps the loop, as a share of a
synchronous save; the step after it and the average step while it is written, beside ordinary ones; and what a save
costs the loop in all: what `save` took, and what those steps took more than ordinary ones.

Wall time and CPU time of the process, all threads: on a busy machine the second is the steadier one, and where XLA
computes on the CPU, writing takes cores from the steps. Medians over the rounds; in brackets the smallest and largest.
The files are written where --folder says and removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.bench_step import cpu_seconds, machine

ORDINARY = 3  # steps of a round before its save; the first, right after the last save, is not counted


@dataclass(frozen=True)
class Cost:
    """Seconds that something took."""

    wall: float
    cpu: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Cost:
    """The clocks; a difference of two is what happened in between."""
    return Cost(time.perf_counter(), cpu_seconds())


def mean(costs: Sequence[Cost]) -> Cost:
    return Cost(statistics.mean(c.wall for c in costs), statistics.mean(c.cpu for c in costs))


@dataclass(frozen=True, kw_only=True)
class Round:
    """One save in the middle of training."""

    ordinary: tuple[Cost, ...]  # steps while nothing is written
    save: Cost  # the call
    during: tuple[Cost, ...]  # steps until the checkpoint is on disk, at least one

    @property
    def in_all(self) -> Cost:
        """What the loop lost."""
        usual = mean(self.ordinary)
        return sum((step - usual for step in self.during), start=self.save)


@dataclass(frozen=True, kw_only=True)
class Result:
    """All that was measured."""

    bytes: int  # of the state
    layers: int
    rows: int
    synchronous: tuple[Cost, ...]  # of each save
    rounds: tuple[Round, ...]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mb", type=int, default=512, help="size of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="rows of 256 tokens in a batch (default: %(default)s)")
    parser.add_argument("--embed", type=int, default=512, help="width of the model (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    parser.add_argument("--out", type=Path, help="write everything that was measured as JSON")
    options = parser.parse_args(arguments)
    try:
        for name, value in (("mb", options.mb), ("rounds", options.rounds), ("rows", options.rows)):
            if value < 1:
                raise ValueError(f"--{name} {value} measures nothing; use 1 or more")
        if options.embed < 64 or options.embed % 64:
            raise ValueError(f"--embed {options.embed} is no multiple of 64, the size of a head; use for example 512")
        folder = Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=options.folder))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        result = measure(folder, options.mb, options.rounds, options.rows, options.embed)
    finally:
        shutil.rmtree(folder)
    if options.out:
        options.out.write_text(json.dumps(asdict(result), indent=1))
    print_result(result)
    return 0


def measure(folder: Path, mb: int, rounds: int, rows: int, embed: int) -> Result:
    """Times saves into `folder`, which is left with what they wrote."""
    import jax
    import numpy as np
    import optax

    from meshpar.checkpoint.manager import Checkpoints
    from meshpar.interfaces import Batch
    from meshpar.module import abstract
    from meshpar.plan import Plan
    from meshpar.precision.policy import Policy
    from meshpar.train.build import Training, build
    from models.llama.config import LlamaConfig

    seq, vocab = 256, 4096
    plan = Plan(precision=Policy(compute="fp32"))

    def training_of(layers: int) -> Training:
        config = LlamaConfig(
            vocab=vocab,
            embed=embed,
            layers=layers,
            heads=embed // 64,
            kv_heads=embed // 64,
            head_dim=64,
            mlp=4 * embed,
            max_seq=seq,
        )
        return build(
            abstract(config.build, config), optax.adamw(3e-4), plan, batch=rows, seq=seq, devices=jax.devices()[:1]
        )

    one, two = (size_of(training_of(layers).abstract_state()) for layers in (1, 2))
    layers = max(1, 1 + round((mb * 2**20 - one) / (two - one)))
    training = training_of(layers)
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, seq + 1), dtype=np.int32)
    batch = training.place(
        Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=np.ones((rows, seq), np.float32))  # type: ignore[arg-type]
    )
    step = training.compile()
    state = training.init()
    number = 0

    def timed_step() -> Cost:
        nonlocal state, number
        begun = now()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        number += 1
        return now() - begun

    checkpoints = Checkpoints(folder, keep=1)
    timed_step()
    checkpoints.save(number, state)  # the first imports Orbax and takes memory for copies
    checkpoints.wait()
    synchronous = []
    for _ in range(rounds):
        timed_step()
        begun = now()
        checkpoints.save(number, state)
        checkpoints.wait()
        synchronous.append(now() - begun)
    found = []
    for _ in range(rounds):
        ordinary = [timed_step() for _ in range(ORDINARY)][1:]
        begun = now()
        checkpoints.save(number, state)
        save, saved = now() - begun, number
        during = [timed_step()]
        while not (folder / str(saved)).exists():
            during.append(timed_step())
        checkpoints.wait()
        found.append(Round(ordinary=tuple(ordinary), save=save, during=tuple(during)))
    return Result(
        bytes=size_of(training.abstract_state()),
        layers=layers,
        rows=rows,
        synchronous=tuple(synchronous),
        rounds=tuple(found),
    )


def size_of(state: Any) -> int:
    """Bytes of a state, without its key."""
    import jax

    leaves = [leaf for leaf in jax.tree.leaves(state) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def print_result(result: Result) -> None:
    """One table, a row for each question."""
    from rich.console import Console
    from rich.table import Table

    usual = [mean(one.ordinary) for one in result.rounds]
    saves = [mean(result.synchronous)] * len(usual)
    rows = (
        ("synchronous save", result.synchronous, None, ""),
        ("ordinary step", usual, None, ""),
        ("save blocks the loop", [one.save for one in result.rounds], saves, "synchronous save"),
        ("step right after", [one.during[0] for one in result.rounds], usual, "ordinary step"),
        ("steps until it is on disk", [mean(one.during) for one in result.rounds], usual, "ordinary step"),
        ("cost of a save in all", [one.in_all for one in result.rounds], saves, "synchronous save"),
    )
    title = f"{result.bytes / 2**20:.0f} MB, {result.layers} layers, {result.rows} rows of 256 tokens"
    table = Table("", "wall s", "CPU s", "wall", "CPU", "in units of", title=title, title_justify="left", box=None)
    for name, costs, base, unit in rows:
        cells = [_spread([c.wall for c in costs]), _spread([c.cpu for c in costs])]
        if base is not None:
            cells.append(_spread([c.wall / b.wall for c, b in zip(costs, base, strict=True)]))
            cells.append(_spread([c.cpu / b.cpu for c, b in zip(costs, base, strict=True)]))
        table.add_row(name, *cells, *([unit] if base is not None else []))
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    console.print(machine(), highlight=False)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f} {max(values):.2f}]"


if __name__ == "__main__":
    sys.exit(main())
