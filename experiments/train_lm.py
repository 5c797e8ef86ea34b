"""Trains a language model: the main job.

    python -m experiments.train_lm --recipe llama_tiny_stdlib
    python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="data=2 tensor=4" --set train.steps=200
    python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="fsdp=-1" --devices 8 --set zero=2
    python -m experiments.train_lm --recipe mypackage.recipes:big --out runs/big
    python -m experiments.train_lm --out runs/big --resume --recipe mypackage.recipes:big

On a machine without accelerators the script emulates as many CPU devices as the mesh has (8 when one axis is -1).
The run folder gets config.json, metrics.jsonl, losses.png, samples.txt, the tokenizer and checkpoints/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

START = time.perf_counter()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="llama_tiny_stdlib", help="a function of experiments.recipes, or module:function (default: %(default)s)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override one value; repeat for more")
    parser.add_argument("--devices", type=int, help="emulate so many CPU devices, or use only so many accelerators")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/RECIPE-TIME)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument("--keys", action="store_true", help="list every key that --set takes, with its value in this recipe, and stop")
    options = parser.parse_args(arguments)
    try:
        from meshpar.train.recipe import apply_overrides, load_recipe

        recipe = apply_overrides(load_recipe(options.recipe), options.overrides)
        if options.keys:
            print_keys(recipe)
            return 0
        name = options.recipe.split(":")[-1]
        out = options.out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run(recipe, out, devices=options.devices, resume=options.resume, name=options.recipe)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_keys(recipe: Any) -> None:
    """Every key of a recipe as a table."""
    from rich.console import Console
    from rich.table import Table

    from meshpar.train.recipe import describe_keys

    table = Table("key", "value", "type", "meaning", box=None)
    for key in describe_keys(recipe):
        table.add_row(key.key, str(key.value), key.type, key.comment)
    Console().print(table)


def run(recipe: Any, out: Path, *, devices: int | None, resume: bool, name: str) -> dict[str, Any]:
    """Trains, evaluates, samples and leaves the run folder; returns its summary."""
    import jax

    from meshpar.mesh.devices import choose_devices, use_compilation_cache

    chosen = choose_devices(recipe.plan.mesh, devices)
    use_compilation_cache()

    from meshpar.checkpoint.manager import Checkpoints
    from meshpar.module import abstract
    from meshpar.train.build import build
    from meshpar.train.data import open_dataset, train_batches, validation_batches
    from meshpar.train.metrics import JsonLines, Progress, flops_per_token, mfu, plot_losses
    from meshpar.train.trainer import Hook, fit

    config, model_config = recipe.train, recipe.model
    model = abstract(model_config.build, model_config)
    schedule = recipe.optimizer.learning_rate(config.steps)
    training = build(
        model,
        recipe.optimizer.make(config.steps),
        recipe.plan,
        batch=config.batch,
        seq=recipe.data.seq,
        objective=recipe.objective,
        devices=chosen,
    )
    dataset = open_dataset(recipe.data)
    if dataset.vocab > model_config.vocab:
        raise ValueError(
            f"the tokenizer {recipe.data.tokenizer} has {dataset.vocab} tokens and model.vocab={model_config.vocab}; set model.vocab={dataset.vocab} or more"
        )
    hosts: dict[str, int] = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    first = time.perf_counter()
    start_step = 0
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(out / "checkpoints", keep=config.keep)
    if resume:
        state = checkpoints.restore(training.abstract_state())
        start_step = int(state.step)
    elif checkpoints.latest() is not None:
        raise ValueError(f"{out} holds a run already; continue it with --resume or choose another --out")
    else:
        state = training.init(config.seed)
    batches = train_batches(dataset, batch=config.batch, start_step=start_step, **hosts)
    dataset.tokenizer.save(out)
    write_config(out, recipe, training, name)

    lines = JsonLines(out / "metrics.jsonl")
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    tokens = config.batch * recipe.data.seq
    flops = flops_per_token(model, recipe.data.seq) * tokens
    mesh_devices = list(training.mesh.devices.flat)
    progress = Progress(steps=config.steps, start=start_step, tokens=tokens, flops=flops, devices=mesh_devices)

    def log_metrics(step: int, metrics: dict[str, float], seconds: float) -> None:
        losses[step] = metrics["loss"]
        share = mfu(flops, seconds, mesh_devices)
        lines.write({"step": step, **metrics, "lr": float(schedule(step - 1)), "seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds, "mfu": share})
        if len(losses) == 1:
            progress.log(f"first step after {time.perf_counter() - START:.1f} s from launch")

    def validate(step: int, params: Any, limit: int | None) -> float:
        total = tokens = 0.0
        for batch in validation_batches(dataset, batch=config.batch, limit=limit, **hosts):
            sums = training.evaluate(params, training.place(batch))
            total, tokens = total + float(sums["nll"]), tokens + float(sums["tokens"])
        validation[step] = total / tokens
        lines.write({"step": step, "validation_loss": validation[step]})
        progress.log(f"step {step}/{config.steps}  validation loss {validation[step]:.4f}")
        return validation[step]

    def along_the_way(step: int, state: Any) -> None:
        if config.eval_every and step % config.eval_every == 0 and step != config.steps:
            validate(step, state.params, config.eval_batches)
        if (config.checkpoint_every and step % config.checkpoint_every == 0) or step == config.steps:
            checkpoints.save(step, state)

    progress.log(f"{name}: {model.size / 1e6:.2f}M parameters, mesh {training.plan.mesh} on {training.mesh.devices.flat[0].device_kind}, run folder {out}")
    try:
        with progress:
            hooks = [progress.hook(), Hook(on_metrics=log_metrics, on_state=along_the_way)]
            state = fit(training, state, batches, start=start_step, steps=config.steps, hooks=hooks)
    finally:
        checkpoints.close()
    final = validate(config.steps, state.params, None)
    baselines = ngram_losses(dataset)
    plot_losses(out / "losses.png", losses, validation, baselines)
    texts = sample_texts(recipe, training, state.params, dataset) if config.sample_tokens else []
    (out / "samples.txt").write_text("\n\n----\n\n".join(texts))
    for text in texts:
        progress.log(f"\n--- sampled ---\n{text}")
    summary = {"steps": config.steps, "validation_loss": final, **{f"{n}_loss": v for n, v in baselines.items()}, "seconds": time.perf_counter() - first}
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    beside = ", ".join(f"{kind} model {loss:.4f}" for kind, loss in baselines.items())
    progress.log(f"\nvalidation loss {final:.4f} nats a token (perplexity {math.exp(final):.1f}); of the same text: {beside}")
    progress.log(f"loss curve: {out / 'losses.png'}\nrun folder: {out}")
    return summary


def ngram_losses(dataset: Any) -> dict[str, float]:
    """Losses of a unigram and a bigram model of the same text, in nats a token."""
    from meshpar.train.ngram import bigram_loss, unigram_loss

    train, validation = dataset.train.tokens, dataset.validation.tokens
    return {"unigram": unigram_loss(train, validation, dataset.vocab), "bigram": bigram_loss(train, validation, dataset.vocab)}


def sample_texts(recipe: Any, training: Any, params: Any, dataset: Any) -> list[str]:
    """Continuations of the first tokens of some validation rows."""
    from meshpar.generate.sample import sample
    from meshpar.train.data import validation_batches

    batch = next(validation_batches(dataset, batch=recipe.train.batch, limit=1))
    length = min(16, recipe.data.seq)
    new = min(recipe.train.sample_tokens, recipe.model.max_seq - length)
    prompts = [[int(token) for token in row[:length]] for row in batch.tokens[:2]]
    rows = sample(training.model, training.plan, training.mesh, params, prompts, new_tokens=new, seed=recipe.train.seed)
    return [dataset.tokenizer.decode(row) for row in rows]


def write_config(out: Path, recipe: Any, training: Any, name: str) -> None:
    """Everything that the run was: resolved values, mesh, batch per device, versions."""
    import jax

    from meshpar.train.values import to_json

    batch = training.batch_sharding.shard_shape((training.batch, training.seq))
    values = {
        "name": name,
        "recipe": to_json(dataclasses.replace(recipe, plan=training.plan)),
        "mesh": {axis: size for axis, size in training.mesh.shape.items()},
        "devices": [str(device) for device in training.mesh.devices.flat],
        "rows_per_device_and_microbatch": batch[0] // training.plan.accumulate,
        "parameters": training.model.size,
        "versions": {"python": platform.python_version(), **{package: version(package) for package in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")}},
        "command": sys.argv,
    }
    (out / "config.json").write_text(json.dumps(values, indent=1, default=str))


def version(package: str) -> str:
    """The installed version of a package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
