"""Does a run survive being killed? The same run twice: undisturbed, and killed with SIGKILL at random moments.

    python -m experiments.survive
    python -m experiments.survive --kills 3 --steps 60 --seed 7 --out runs/short
    python -m experiments.survive --set mesh="data=2 tensor=2" --set precision.compute=bf16

After each kill the same command starts again and must go on by itself from the newest checkpoint that was complete.
At the end every loss and every batch (its checksum) must be bit-equal to those of the undisturbed run. One kill in five
comes before the first step, the others after a number of steps drawn evenly from twice a kill's share of those that are
left, at the pace seen so far, so that they are spread over the whole run; every few steps are saved.
Exit code 0: all equal; 1: something is lost or differs, and it says what.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from experiments.arguments import add_set

# A small model whose steps take milliseconds, so that many steps and saves lie between two kills.
TINY = [
    "model.layers=2",
    "model.embed=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.mlp=64",
    "model.vocab=257",
    "model.max_seq=64",
    "data.tokenizer=bytes",
    "data.seq=32",
    "optimizer.warmup=10",
    "precision.compute=fp32",
    "train.batch=8",
    "train.eval_every=0",
    "train.checkpoint_every=10",
    "train.sample_tokens=0",
    "train.export=none",
    "train.tensorboard=false",
]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.survive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20, help="how often to kill (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="of the run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    add_set(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/survive"), help="two run folders (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.steps < 10:
        print(f"error: --kills {options.kills} --steps {options.steps}: use 1 and 10 or more", file=sys.stderr)
        return 2
    whole, killed = options.out / "whole", options.out / "killed"
    for folder in (whole, killed):
        shutil.rmtree(folder, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    overrides = [*TINY, f"train.steps={options.steps}", *options.overrides]
    start, life = run(whole, overrides, None)
    print(f"undisturbed: the first step after {start:.1f} s, {options.steps} steps in {life:.1f} s", flush=True)

    moments = random.Random(options.seed)
    pace = (life - start) / options.steps  # seconds a step
    wrong = hit = 0
    for number in range(1, options.kills + 1):
        saved = newest(killed)
        share = (options.steps - saved) / (options.kills - number + 2)  # one more: a part stays for the run that ends
        early = moments.random() < 0.2
        after = moments.uniform(0.0, start) if early else start + pace * moments.uniform(0.0, 2 * share)
        first, lived = run(killed, overrides, after)
        reached, now = last_step(killed), newest(killed)
        if first and reached > saved + 10:
            pace = (lived - first) / (reached - saved)
        if now < options.steps:
            hit += 1
        print(f"kill {number:2} after {after:5.1f} s: began from {saved}, reached {reached}, saved {now}", flush=True)
        if now < saved:
            print(f"  WRONG: the checkpoint of step {saved} was there and {now} is the newest", flush=True)
            wrong += 1
    run(killed, overrides, None)
    print(f"{hit} of {options.kills} kills met a run that had not ended", flush=True)
    for name in ("loss", "data", "grad_norm"):
        one, other = column(whole, name), column(killed, name)
        differs = [step for step in sorted(one.keys() | other.keys()) if one.get(step) != other.get(step)]
        verdict = f"differs first at step {differs[0]}" if differs else "bit-equal"
        print(f"{name} of {len(one)} steps: {verdict}", flush=True)
        wrong += bool(differs)
    return 1 if wrong else 0


def run(folder: Path, overrides: list[str], seconds: float | None) -> tuple[float, float]:
    """One process, which is killed after so many seconds; None: it must end well.

    Returns:
      Seconds until it wrote the line of its first new step, 0 if it never did, and until it ended.
    """
    command = [sys.executable, "-m", "experiments.train_lm", "--recipe", "llama_tiny_stdlib", "--out", str(folder)]
    words = [word for override in overrides for word in ("--set", override)]
    begun, first = time.monotonic(), 0.0
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        process = subprocess.Popen([*command, *words], stdout=log, stderr=subprocess.STDOUT)
        before = last_step(folder)
        while process.poll() is None:
            first = first or (time.monotonic() - begun if last_step(folder) > before else 0.0)
            if time.monotonic() - begun > (seconds or 1800):
                process.kill()
            time.sleep(0.01)
    if process.returncode and seconds is None:
        raise RuntimeError(f"the run ended with exit code {process.returncode}; see {folder.parent / folder.name}.log")
    return first, time.monotonic() - begun


def newest(folder: Path) -> int:
    """The newest checkpoint that is whole; 0 where there is none."""
    from meshpar.checkpoint.manager import Checkpoints

    return Checkpoints(folder / "checkpoints").latest() or 0


def column(folder: Path, name: str) -> dict[int, float]:
    """One number of each step's line in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    return {line["step"]: line[name] for line in values if name in line}


def last_step(folder: Path) -> int:
    """The last step with a line in metrics.jsonl."""
    return max(column(folder, "loss"), default=0)


if __name__ == "__main__":
    sys.exit(main())
