"""What each number format does to training: the same model, text and batches in each of these ways.

    python -m experiments.precision
    python -m experiments.precision --steps 100 --out runs/precision
    python -m experiments.precision --only fp32 bf16 "fp16, no scaling"

    fp32                    the reference
    bf16                    fp32 master weights, products in bf16
    bf16, no master         the weights are bf16 too: updates below half a unit in their last place are lost
    fp16, no scaling        fp32 master weights; small gradients become 0
    fp16, 8M tokens         the same with gradients as small as in a batch of 8M tokens: underflow
    fp16, static 2^24       gradients too large for fp16: overflow, in every step
    fp16, dynamic scaling   as meshpar does by default for fp16
    fp16, from 2^24         the same from a scale that is too large at first: skips, halves, trains

It prints the range and precision of the formats, the losses, and how many gradients of the reference each way flushes
to zero; precision.png shows the loss curves and where the gradients lie. Source of the comparison: Micikevicius et al.
2018, Mixed Precision Training, figures 2b and 3; Kalamkar et al. 2019, A Study of BFLOAT16, section 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_set

RECIPE = "llama_tiny_stdlib"
REFERENCE = "fp32"
# name: compute, storage and loss scaling of a Policy
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"compute": "fp32"},
    "bf16": {"compute": "bf16"},
    "bf16, no master": {"compute": "bf16", "storage": "pure"},
    "fp16, no scaling": {"compute": "fp16", "loss_scale": {"kind": "none"}},
    # the gradient of a mean over 2^12 times the 2048 tokens of this recipe
    "fp16, 8M tokens": {"compute": "fp16", "loss_scale": {"kind": "static", "initial": 2.0**-12, "floor": 2.0**-12}},
    "fp16, static 2^24": {"compute": "fp16", "loss_scale": {"kind": "static", "initial": 2.0**24}},
    "fp16, dynamic scaling": {"compute": "fp16"},
    "fp16, from 2^24": {"compute": "fp16", "loss_scale": {"initial": 2.0**24}},
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one way came to."""

    losses: tuple[float, ...]  # of each step
    validation: float  # nats a token at the end
    skipped: int  # steps
    scale: float | None  # the last loss scale
    ended: str = ""  # why it ended before its last step
    flushed: float = 0.0  # share of the reference's gradients that are 0 this way
    error: float = 0.0  # norm of the difference to the reference's gradients, over their norm


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, help="of each run (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), metavar="WAY", help="some of the ways")
    add_set(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/precision"), help="a folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        from meshpar.train.recipe import apply_overrides, load_recipe

        if options.steps < 2:
            raise ValueError(f"--steps {options.steps} draws no curve; use 2 or more")
        recipe = apply_overrides(load_recipe(RECIPE), [f"train.steps={options.steps}", *options.overrides])
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ways = [REFERENCE, *(way for way in options.only or WAYS if way != REFERENCE)]
    print_formats()
    results, histogram = compare(recipe, ways)
    print_results(results)
    (options.out / "precision.json").write_text(
        json.dumps({way: dataclasses.asdict(result) for way, result in results.items()}, indent=1)
    )
    draw(options.out / "precision.png", results, histogram)
    print(f"\n{options.out / 'precision.png'}\n{options.out / 'precision.json'}")
    return 0


def compare(recipe: Any, ways: Iterable[str]) -> tuple[dict[str, Result], Any]:
    """Trains each way; returns the results and log2 of the reference's gradients that are not 0."""
    import numpy as np

    from meshpar.mesh.devices import choose_devices
    from meshpar.train.data import open_dataset

    devices = choose_devices(recipe.plan.mesh, None)
    model = recipe.abstract_model()
    dataset = open_dataset(recipe.data)
    results: dict[str, Result] = {}
    reference: Any = None
    weights: Any = None
    for way in ways:
        training = training_of(recipe, model, way, devices)
        begun = time.perf_counter()
        result, state = run(training, dataset, recipe)
        if way == REFERENCE:
            weights = state.params
            reference = gradients_of(training, dataset, recipe, weights)
        found = gradients_of(training, dataset, recipe, weights)
        there = reference != 0
        results[way] = dataclasses.replace(
            result,
            flushed=float(np.mean(found[there] == 0)),  # not finite is not 0
            error=float(np.linalg.norm(found - reference) / np.linalg.norm(reference)),
        )
        seconds = time.perf_counter() - begun
        print(f"{way}: validation loss {result.validation:.4f} after {seconds:.0f} s", file=sys.stderr, flush=True)
    return results, np.log2(np.abs(reference[reference != 0]))


def training_of(recipe: Any, model: Any, way: str, devices: Any) -> Any:
    """The compiled step of one way."""
    from meshpar.precision.loss_scale import LossScaling
    from meshpar.precision.policy import Policy
    from meshpar.train.build import build

    values = dict(WAYS[way])
    policy = Policy(**values | {"loss_scale": LossScaling(**values.get("loss_scale", {}))})
    plan = dataclasses.replace(recipe.plan, precision=policy)
    tx = recipe.optimizer.make(recipe.train.steps, model)
    return build(model, tx, plan, batch=recipe.train.batch, seq=recipe.data.seq, devices=devices)


def run(training: Any, dataset: Any, recipe: Any) -> tuple[Result, Any]:
    """One run, and the state at its end or where it diverged."""
    from meshpar.train.data import train_batches, validation_batches
    from meshpar.train.trainer import Diverged, Hook, fit

    losses: list[float] = []
    last: dict[str, float] = {}
    skipped = 0
    state = training.init(recipe.train.seed)
    ended = ""

    def on_metrics(step: int, metrics: dict[str, float], seconds: float) -> None:
        nonlocal skipped
        losses.append(metrics["loss"])
        skipped += int(metrics.get("skipped", 0.0))
        last.update(metrics)

    batches = train_batches(dataset, batch=recipe.train.batch)
    try:
        state = fit(training, state, batches, start=0, steps=recipe.train.steps, hooks=[Hook(on_metrics=on_metrics)])
    except Diverged as error:
        ended = str(error)
        return Result(losses=tuple(losses), validation=float("nan"), skipped=skipped, scale=None, ended=ended), None
    nll = targets = 0.0
    for batch in validation_batches(dataset, batch=recipe.train.batch):
        sums = training.evaluate(state.params, training.place(batch))
        nll, targets = nll + float(sums["nll"]), targets + float(sums["tokens"])
    scale = last.get("loss_scale")
    return Result(losses=tuple(losses), validation=nll / targets, skipped=skipped, scale=scale), state


def gradients_of(training: Any, dataset: Any, recipe: Any, weights: Any) -> Any:
    """Raw gradients of one batch at the given fp32 weights, as the step of this way computes them, divided by the loss
    scale: fp32, all in one array.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshpar.forward import Forward
    from meshpar.layout.context import placed
    from meshpar.train.data import train_batches
    from meshpar.train.step import Objective, gradients

    batch = training.place(next(train_batches(dataset, batch=recipe.train.batch, start_step=recipe.train.steps)))
    precision = training.plan.precision
    searched = precision.scales_dynamically  # which ends near 2^16
    scale = jnp.float32(2.0**16 if searched else precision.loss_scale.initial) if precision.scales else None

    def compute(weights: Any, batch: Any) -> Any:
        params = jax.tree.map(lambda w: w.astype(precision.param_dtype), weights)
        with placed(training.plan.placement(training.mesh)):
            forward = Forward(training.model, training.plan, training.mesh)
            found, _ = gradients(forward, Objective(), params, batch, None, scale)
        return jax.tree.map(lambda g: g.astype(jnp.float32) / (1.0 if scale is None else scale), found)

    leaves = jax.tree.leaves(jax.device_get(jax.jit(compute)(weights, batch)))
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def print_formats() -> None:
    """Range and precision of each format."""
    import jax.numpy as jnp
    from rich.console import Console
    from rich.table import Table

    table = Table("format", "largest", "smallest normal", "smallest", "step at 1", box=None, title="formats")
    for name, dtype in (("fp32", jnp.float32), ("bf16", jnp.bfloat16), ("fp16", jnp.float16)):
        info = jnp.finfo(dtype)
        numbers = (info.max, info.tiny, info.smallest_subnormal, info.eps)
        table.add_row(name, *(f"{float(number):.2g}" for number in numbers))
    Console().print(table)


def print_results(results: dict[str, Result]) -> None:
    """The table of the runs."""
    from rich.console import Console
    from rich.table import Table

    columns = ("way", "validation loss", "to fp32", "skipped", "last scale", "flushed to 0", "gradient error")
    table = Table(*columns, box=None, title="runs")
    reference = results[REFERENCE].validation
    for way, result in results.items():
        table.add_row(
            way,
            f"{result.validation:.4f}" if not result.ended else "ended",
            f"{result.validation / reference - 1:+.2%}" if not result.ended else "",
            str(result.skipped),
            "" if result.scale is None else f"{result.scale:g}",
            f"{result.flushed:.2%}",
            f"{result.error:.2%}" if math.isfinite(result.error) else "not finite",
        )
    Console().print(table)
    for way, result in results.items():
        if result.ended:
            print(f"{way}: {result.ended}")


def draw(path: Path, results: dict[str, Result], log2_gradients: Any) -> None:
    """Loss curves, and where the gradients of the reference lie beside the ranges of fp16."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    window = max(len(results[REFERENCE].losses) // 40, 1)
    for way, result in results.items():
        losses = np.convolve(result.losses, np.ones(window) / window, mode="valid")
        left.plot(np.arange(len(losses)) + window, losses, linewidth=1.2, label=way)
    left.set(xlabel="steps", ylabel=f"training loss, nats a token, mean of {window} steps")
    left.grid(alpha=0.3)
    left.legend()
    right.hist(log2_gradients, bins=np.arange(-60, 5), weights=np.full(len(log2_gradients), 100 / len(log2_gradients)))
    top = right.get_ylim()[1]
    for exponent, text in (
        (-24, "smallest fp16"),
        (-14, "smallest normal fp16"),
        (-40, "smallest fp16, scaled by 2^16"),
    ):
        right.axvline(exponent, linestyle="--", linewidth=1, color="black")
        label = right.text(exponent + 0.6, top * 0.98, text, rotation=90, va="top", fontsize=8)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
    right.set(xlabel="log2 of a gradient's size", ylabel="% of the gradients of fp32 that are not 0")
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
