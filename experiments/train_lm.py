"""Trains a language model: the main job.

    python -m experiments.train_lm --recipe llama_tiny_stdlib
    python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="data=2 tensor=4" --set train.steps=200
    python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="fsdp=-1" --devices 8 --set zero=2
    python -m experiments.train_lm --recipe mypackage.recipes:big --out runs/big
    python -m experiments.train_lm --recipe mypackage.recipes:big --out runs/big --resume
    python -m meshpar launch --processes 2 --devices 4 -- python -m experiments.train_lm --set mesh="data=2 tensor=4"

On a machine without accelerators the script emulates as many CPU devices as the mesh has (8 when one axis is -1).
The run folder gets config.json, metrics.jsonl, summary.json, losses.png, samples.txt, the tokenizer and checkpoints/.
Several processes run this same command, started by `meshpar launch`, srun, mpirun or on a TPU pod; all must see the run
folder, and the first one prints and writes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = time.perf_counter()
# What parameters, optimizer state and the order of the batches depend on: a resumed run must keep it.
FIXED = ("model.", "data.", "optimizer.name", "optimizer.momentum", "precision.storage", "train.batch", "train.seed")
FREE = ("data.prefetch",)
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.train_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--recipe",
        default="llama_tiny_stdlib",
        help="a function of experiments.recipes, or module:function (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one value; repeat for more",
    )
    parser.add_argument("--devices", type=int, help="emulate so many CPU devices, or use only so many accelerators")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/RECIPE-TIME)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 of several listens; usually detected"
    )
    parser.add_argument("--processes", type=int, help="how many processes there are, with --coordinator")
    parser.add_argument("--process", type=int, help="which one this is, from 0, with --coordinator")
    parser.add_argument("--keys", action="store_true", help="list what --set takes, with its value in this recipe")
    options = parser.parse_args(arguments)
    try:
        from meshpar.mesh.distributed import join, wait_for_all
        from meshpar.train.recipe import apply_overrides, load_recipe

        recipe = apply_overrides(load_recipe(options.recipe), options.overrides)
        if options.keys:
            print_keys(recipe)
            return 0
        if options.resume and options.out is None:
            raise ValueError("--resume does not say which run to continue; name its folder with --out")
        join(options.coordinator, options.processes, options.process)
        job = prepare(options.recipe, recipe, options.out, devices=options.devices, resume=options.resume)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    train(job)
    wait_for_all("finished")  # the first process still writes, and those that end do not wait for it long
    return 0


def print_keys(recipe: Any) -> None:
    """Every key of a recipe as a table."""
    from rich.console import Console
    from rich.table import Column, Table

    from meshpar.train.recipe import describe_keys

    table = Table(Column("key", no_wrap=True), "value", "type", "meaning", box=None)
    for key in describe_keys(recipe):
        table.add_row(key.key, str(key.value), key.type, key.comment)
    Console().print(table)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that was checked and has not compiled, drawn or written anything yet."""

    name: str
    recipe: Any
    out: Path
    training: Any
    dataset: Any
    batches: Iterator[Any]  # from the first update that is left
    checkpoints: Any
    done: int  # updates that a resumed run has behind it
    notes: list[str]  # what to tell about the run before it starts


def prepare(name: str, recipe: Any, out: Path | None, *, devices: int | None, resume: bool) -> Job:
    """Checks everything that a user can get wrong, and tokenises the data. `out` of None is named by recipe and time.

    Raises:
      ValueError: the first thing that is wrong, one sentence.
    """
    from meshpar.mesh.devices import choose_devices, use_compilation_cache
    from meshpar.mesh.distributed import time_stamp, wait_for_all
    from meshpar.module import abstract

    config, model_config = recipe.train, recipe.model
    model, tx = abstract(model_config.build, model_config), recipe.optimizer.make(config.steps)
    if not recipe.plan.mesh.has_free_axis:  # before devices are emulated, which takes long for many
        recipe.plan.check(model, batch=config.batch, seq=recipe.data.seq)
    chosen = choose_devices(recipe.plan.mesh, devices)
    use_compilation_cache()
    out = out or Path("runs") / f"{name.split(':')[-1]}-{time_stamp()}"

    from meshpar.checkpoint.manager import Checkpoints
    from meshpar.train.build import build
    from meshpar.train.data import open_dataset, train_batches

    checkpoints = Checkpoints(out / "checkpoints", keep=config.keep)
    done = updates_done(out, checkpoints, config.steps) if resume else refuse_old(out, checkpoints)
    notes = [compare(out, recipe, done) if resume else "", warmup_note(recipe)]
    training = build(
        model,
        tx,
        recipe.plan,
        batch=config.batch,
        seq=recipe.data.seq,
        objective=recipe.objective,
        devices=chosen,
    )
    training.trace(packed=recipe.data.packed)
    dataset = open_dataset(recipe.data)  # in each process: hosts may have caches of their own, and makers may share one
    if dataset.vocab > model_config.vocab:
        raise ValueError(
            f"the tokenizer {recipe.data.tokenizer} has {dataset.vocab} tokens and model.vocab={model_config.vocab}; "
            f"set model.vocab={dataset.vocab} or more"
        )
    batches = train_batches(dataset, batch=config.batch, start_step=done, own_rows=training.own_rows)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error.strerror}); name another folder") from None
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out} cannot be written to; change its permissions, or name another folder")
    wait_for_all("checked")  # the first process changes the folder next, and the others may still look at it
    return Job(
        name=name,
        recipe=recipe,
        out=out,
        training=training,
        dataset=dataset,
        batches=batches,
        checkpoints=checkpoints,
        done=done,
        notes=[note for note in notes if note],
    )


def refuse_old(out: Path, checkpoints: Any) -> int:
    """0 when the folder is free for a new run."""
    if not (out / "config.json").exists() and checkpoints.latest() is None:
        return 0
    fix = "choose another --out, or delete it" if checkpoints.latest() is None else "continue it with --resume"
    raise ValueError(f"{out} holds a run already; {fix}")


def updates_done(out: Path, checkpoints: Any, steps: int) -> int:
    """The update that the newest checkpoint was written after; the last one, if only the results are missing."""
    latest = checkpoints.latest()
    if latest is None:
        raise ValueError(f"{out} holds no checkpoint; leave --resume out to start there, or name the run's folder")
    if latest > steps or (latest == steps and (out / "summary.json").exists()):
        raise ValueError(f"{out} has {latest} updates behind it and train.steps={steps}; set train.steps to more")
    return int(latest)


def compare(out: Path, recipe: Any, done: int) -> str:
    """Refuses a recipe that cannot go on from the checkpoints in `out`; returns what to tell about one that can."""
    from meshpar.train.values import to_json

    try:
        before = flat(json.loads((out / "config.json").read_text())["recipe"])
        earlier = before["train.steps"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{out / 'config.json'} does not tell the recipe of this run; restore that file") from None
    now = flat(to_json(recipe))
    changed = [
        f"{key}={before[key]}, not {now[key]}"
        for key in now
        if key.startswith(FIXED) and key not in FREE and key in before and before[key] != now[key]
    ]
    if changed:
        raise ValueError(f"{out} began with {', '.join(changed)}; give the recipe and --set that the run began with")
    steps, optimizer = recipe.train.steps, recipe.optimizer
    if optimizer.schedule != "cosine" or steps in (earlier, done) or earlier <= optimizer.warmup:
        return ""
    old, new = (float(optimizer.learning_rate(count)(done)) for count in (earlier, steps))
    return f"train.steps was {earlier} and is {steps}: the learning rate goes on at {new:.3g} instead of {old:.3g}"


def warmup_note(recipe: Any) -> str:
    """What to tell about a run that ends while it warms up."""
    steps, optimizer = recipe.train.steps, recipe.optimizer
    if optimizer.warmup < steps:
        return ""
    return (
        f"optimizer.warmup={optimizer.warmup} takes all of train.steps={steps}: the learning rate does not reach its "
        f"peak; set optimizer.warmup={steps // 10} for a run of this length"
    )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's JSON as the keys that --set takes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}".removeprefix("plan.")
        found |= flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def train(job: Job) -> dict[str, Any]:
    """Trains, evaluates, samples and leaves the run folder; returns its summary."""
    from meshpar.mesh.distributed import is_first, wait_for_all
    from meshpar.train.data import validation_batches
    from meshpar.train.metrics import JsonLines, Progress, as_json, flops_per_token, mfu, plot_losses
    from meshpar.train.trainer import Hook, fit

    recipe, training, dataset, out, config = job.recipe, job.training, job.dataset, job.out, job.recipe.train
    begun = time.perf_counter()
    lines = JsonLines(out / "metrics.jsonl")
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    tokens = config.batch * recipe.data.seq
    per_token = flops_per_token(training.model, recipe.data.seq)
    flops = None if per_token is None else per_token * tokens
    devices = list(training.mesh.devices.flat)
    rates = recipe.optimizer.rates(config.steps)  # all now: later they would wait for the step in flight
    progress = Progress(steps=config.steps, start=job.done, tokens=tokens, flops=flops, devices=devices)

    def log_metrics(step: int, metrics: dict[str, float], seconds: float) -> None:
        losses[step] = metrics["loss"]
        speed = {
            "seconds": seconds,
            "tokens_per_second": metrics["tokens"] / seconds,
            "mfu": mfu(flops, seconds, devices),
        }
        lines.write({"step": step, **metrics, "lr": float(rates[step - 1]), **speed})
        if step == job.done + 1:
            progress.log(f"first step after {time.perf_counter() - START:.1f} s from launch")

    def validate(step: int, params: Any, limit: int | None) -> float:
        nll = targets = 0.0
        for batch in validation_batches(dataset, batch=config.batch, limit=limit, own_rows=training.own_rows):
            sums = training.evaluate(params, training.place(batch))
            nll, targets = nll + float(sums["nll"]), targets + float(sums["tokens"])
        validation[step] = nll / targets
        lines.write({"step": step, "validation_loss": validation[step]})
        progress.log(f"step {step}/{config.steps}  validation loss {validation[step]:.4f}")
        return validation[step]

    hooks = [
        progress.hook(),
        Hook(on_metrics=log_metrics),
        Hook(
            on_state=lambda step, state: validate(step, state.params, config.eval_batches),
            when=lambda step: _due(step, config.eval_every) and step != config.steps,  # the last one follows below
        ),
        Hook(
            on_state=job.checkpoints.save,
            when=lambda step: _due(step, config.checkpoint_every) or step == config.steps,
        ),
    ]
    progress.log(
        f"{job.name}: {training.model.size / 1e6:.2f}M parameters, mesh {training.plan.mesh} on "
        f"{devices[0].device_kind}, run folder {out}"
    )
    for note in job.notes:
        progress.log(note)
    try:
        # XLA compiles the step while the first state and batch are made; the loop's call then finds it compiled.
        with concurrent.futures.ThreadPoolExecutor(1) as ahead:
            compiled = ahead.submit(training.compile, packed=recipe.data.packed)
            state = (
                job.checkpoints.restore(training.abstract_state(), job.done) if job.done else training.init(config.seed)
            )
            batches = itertools.chain([next(job.batches)], job.batches)
            compiled.result()
        wait_for_all("compiled")  # processes on CPU give up on one that is half a minute late for a first collective
        # only now does the folder change: a restore may fail
        if is_first():
            dataset.tokenizer.save(out)
            write_config(job)
            (out / "summary.json").unlink(missing_ok=True)  # of the steps that a resumed run has behind it
        for line in lines.rewind(job.done):
            losses |= {line["step"]: line["loss"]} if "loss" in line else {}
            validation |= {line["step"]: line["validation_loss"]} if "validation_loss" in line else {}
        with progress:
            state = fit(training, state, batches, start=job.done, steps=config.steps, hooks=hooks)
    finally:
        job.checkpoints.close()

    final = validate(config.steps, state.params, None)
    texts = sample_texts(job, state.params) if config.sample_tokens else []
    if not is_first():
        return {"steps": config.steps, "validation_loss": final}
    baselines = ngram_losses(dataset)
    plot_losses(out / "losses.png", losses, validation, baselines)
    (out / "samples.txt").write_text("\n\n----\n\n".join(texts))
    for text in texts:
        progress.log(f"\n--- sampled ---\n{text}")
    summary = {
        "steps": config.steps,
        "validation_loss": final,
        **{f"{kind}_loss": loss for kind, loss in baselines.items()},
        "seconds": time.perf_counter() - begun,
    }
    (out / "summary.json").write_text(as_json(summary, indent=1))
    beside = ", ".join(f"{kind} model {loss:.4f}" for kind, loss in baselines.items())
    progress.log(
        f"\nvalidation loss {final:.4f} nats a token (perplexity {perplexity(final):.1f}); of the same text: {beside}"
    )
    progress.log(f"loss curve: {out / 'losses.png'}\nrun folder: {out}")
    return summary


def perplexity(loss: float) -> float:
    """exp(loss); inf where a float ends."""
    return math.inf if loss > 709 else math.exp(loss)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def ngram_losses(dataset: Any) -> dict[str, float]:
    """Losses of a unigram and a bigram model of the same text, in nats a token."""
    from meshpar.train.ngram import bigram_loss, unigram_loss

    arguments = (dataset.train.tokens, dataset.validation.tokens, dataset.vocab)
    return {"unigram": unigram_loss(*arguments), "bigram": bigram_loss(*arguments)}


def sample_texts(job: Job, params: Any) -> list[str]:
    """Continuations of the first tokens of some validation rows."""
    from meshpar.generate.sample import sample
    from meshpar.train.data import validation_batches

    recipe, training, dataset = job.recipe, job.training, job.dataset
    batch = next(validation_batches(dataset, batch=recipe.train.batch, limit=1))
    length = min(16, recipe.data.seq)
    new = min(recipe.train.sample_tokens, recipe.model.max_seq - length)
    prompts = [[int(token) for token in row[:length]] for row in batch.tokens[:2]]
    rows = sample(training.model, training.plan, training.mesh, params, prompts, new_tokens=new, seed=recipe.train.seed)
    # a model may have more tokens than its tokenizer, and early in training it samples them
    return [dataset.tokenizer.decode(token for token in row if token < dataset.vocab) for row in rows]


def write_config(job: Job) -> None:
    """Everything that the run was: resolved values, mesh, batch per device, versions."""
    from meshpar.mesh.distributed import joined
    from meshpar.train.values import to_json

    training = job.training
    rows = training.batch_sharding.shard_shape((training.batch, training.seq))[0]
    values = {
        "name": job.name,
        "recipe": to_json(dataclasses.replace(job.recipe, plan=training.plan)),
        "mesh": dict(training.mesh.shape),
        "devices": [str(device) for device in training.mesh.devices.flat],
        "processes": joined().processes,
        "rows_per_device_and_microbatch": rows // training.plan.accumulate,
        "parameters": training.model.size,
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "command": sys.argv,
    }
    (job.out / "config.json").write_text(json.dumps(values, indent=1))


def version(package: str) -> str:
    """The installed version of a package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
