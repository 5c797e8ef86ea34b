"""Trains a language model: the main job.

    python -m experiments.train_lm --recipe llama_tiny_stdlib
    python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="data=2 tensor=4" --set train.steps=200
    python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="fsdp=-1" --devices 8 --set zero=2
    python -m experiments.train_lm --recipe mypackage.recipes:big --out runs/big     # again: goes on where it stopped
    python -m meshpar launch --processes 2 --devices 4 -- python -m experiments.train_lm --set mesh="data=2 tensor=4"

On a machine without accelerators the script emulates as many CPU devices as the mesh has (8 when one axis is -1).
The run folder gets config.json, metrics.jsonl, tensorboard/, summary.json, losses.png, samples.txt, the tokenizer,
weights.safetensors and checkpoints/. SIGTERM or Ctrl-C saves and ends; the same command goes on from there, with --out.
Several processes run this same command, started by `meshpar launch`, srun, mpirun or on a TPU pod; all must see the run
folder, and the first one prints and writes.

Exit codes: 0 done; 1 the run failed, with a sentence; 2 a bad value, before anything ran; 143 stopped by a signal
that saved; 130 Ctrl-C before there was anything to save.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import errno
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from experiments.arguments import add_recipe, add_run
from experiments.prepare import Job, Look, first_state, prepare
from experiments.results import leave_weights, ngram_losses, perplexity, sample_texts

START = time.perf_counter()
STOPPED, INTERRUPTED = 143, 130  # as the shell reports SIGTERM and SIGINT


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.train_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser)
    add_run(parser)
    options = parser.parse_args(arguments)

    def recipe() -> Any:
        from meshpar.train.recipe import apply_overrides, load_recipe

        return apply_overrides(load_recipe(options.recipe), options.overrides)

    return run_or_tell(options, options.recipe, recipe)


def run_or_tell(
    options: argparse.Namespace, name: str, make_recipe: Callable[[], Any], look: Look | None = None
) -> int:
    """`run`, with a sentence for Ctrl-C outside the loop; returns the exit code."""
    try:
        return run(options, name, make_recipe, look)
    except KeyboardInterrupt:  # outside the loop, which saves: before its first step, or while results are written
        print("interrupted outside of training; the same command, with its --out, goes on", file=sys.stderr, flush=True)
        from meshpar.mesh.distributed import joined

        if joined().processes > 1:
            os._exit(INTERRUPTED)  # jax would wait for the others, and abort with a trace when they are gone
        return INTERRUPTED


def run(options: argparse.Namespace, name: str, make_recipe: Callable[[], Any], look: Look | None = None) -> int:
    """What the parsed command line asks for; returns the exit code.

    Args:
      name: of the run, for its folder and its first line.
      make_recipe: may raise ValueError for what the command line has wrong.
      look: what else to tell about the parameters before the first step and after the last.
    """
    with contextlib.ExitStack() as held:
        try:
            from meshpar.mesh.distributed import join, wait_for_all

            recipe = make_recipe()
            if options.keys:
                print_keys(recipe)
                return 0
            if options.resume == "always" and options.out is None:
                raise ValueError("--resume always does not say which run to continue; name its folder with --out")
            join(options.coordinator, options.processes, options.process)
            job = prepare(
                name, recipe, options.out, devices=options.devices, resume=options.resume, held=held, look=look
            )
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        code = train_or_tell(job)
        if code in (0, STOPPED):
            wait_for_all("finished")  # the first process still writes, and those that end do not wait for it long
    return code


def train_or_tell(job: Job) -> int:
    """Trains; what goes wrong with a run is a sentence. Returns the exit code."""
    import jax

    from meshpar.checkpoint.background import SaveError
    from meshpar.mesh.distributed import is_first, joined
    from meshpar.train.trainer import Diverged

    if job.finished:
        if is_first():
            print(f"{job.out} has all {job.done} steps behind it; set train.steps to more to go on")
        return 0
    try:
        return train(job)
    except Misfit as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Diverged, SaveError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if joined().processes == 1:
            raise
        print(f"error: another process is gone, or cannot be reached ({str(error).splitlines()[0]})", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: the disk of {job.out} is full; make room and give the same command again", file=sys.stderr)
        return 1


class Misfit(ValueError):
    """A checkpoint that does not fit the run."""


def print_keys(recipe: Any) -> None:
    """Every key of a recipe, one a line, as --set takes it, then its type and meaning."""
    from meshpar.train.recipe import describe_keys

    keys = describe_keys(recipe)
    spelled = [f"{key.key}={key.value}" for key in keys]
    width = min(max(map(len, spelled)), 44)
    for text, key in zip(spelled, keys, strict=True):
        print(f"{text:{width}}  {key.type}" + (f": {key.comment}" if key.comment else ""))


def train(job: Job) -> int:
    """Trains, evaluates, samples and leaves the run folder; returns the exit code."""
    from meshpar.mesh.distributed import is_first, joined, wait_for_all
    from meshpar.train import run_folder
    from meshpar.train.clock import STEPS, Clock
    from meshpar.train.data import validation_batches
    from meshpar.train.metrics import JsonLines, Progress, as_json, flops_per_token, mfu, plot_losses, replace_text
    from meshpar.train.nan_report import NanReport
    from meshpar.train.profile import Profile, parse_steps
    from meshpar.train.stop import Stop
    from meshpar.train.tensorboard import TensorBoard
    from meshpar.train.trainer import Hook, fit, in_flight
    from meshpar.train.watchdog import Watchdog

    recipe, training, dataset, out, config = job.recipe, job.training, job.dataset, job.out, job.recipe.train
    clock = Clock(since=START)
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
    watchdog = Watchdog(config.stall, start=job.done)
    profile = Profile(parse_steps(config.profile), out / "profile")
    about = run_folder.describe_run(recipe, training)
    board: TensorBoard | None = None
    saved = job.done

    def write(step: int, values: dict[str, Any]) -> None:
        lines.write({"step": step, **values})
        if board is not None:
            board.write(step, values)

    def log_metrics(step: int, metrics: dict[str, float], seconds: float) -> None:
        losses[step] = metrics["loss"]
        speed = {
            "seconds": seconds,
            "tokens_per_second": metrics["tokens"] / seconds,
            "mfu": mfu(flops, seconds, devices),
        }
        rate = 0.0 if metrics.get("skipped") else float(rates[int(metrics["updates"]) - 1])  # the one that was applied
        write(step, {**metrics, "lr": rate, **speed})
        if step == job.done + 1:
            progress.log(f"first step after {time.perf_counter() - START:.1f} s from launch")

    def loss_of(params: Any, limit: int | None, source: str | None = None) -> float:
        nll = targets = 0.0
        rows = validation_batches(dataset, batch=config.batch, limit=limit, own_rows=training.own_rows, source=source)
        for batch in rows:
            sums = training.evaluate(params, training.place(batch))
            nll, targets = nll + float(sums["nll"]), targets + float(sums["tokens"])
            watchdog.touch()
        return nll / targets

    def validate(step: int, params: Any, limit: int | None) -> None:
        validation[step] = loss_of(params, limit)
        values = {"validation_loss": validation[step]}
        if len(dataset.sources) > 1:
            values |= {f"validation_loss/{part.name}": loss_of(params, limit, part.name) for part in dataset.sources}
        write(step, values)
        of_sources = "".join(f", {name.partition('/')[2]} {loss:.4f}" for name, loss in [*values.items()][1:])
        progress.log(f"step {step}/{config.steps}  validation loss {validation[step]:.4f}{of_sources}")

    def is_last_validation(line: dict[str, Any]) -> bool:  # which is made anew
        return "validation_loss" in line and bool(line["step"] == config.steps)

    def save(step: int, state: Any, metric: float | None = None) -> None:
        nonlocal saved
        extra = {**about, "step": step, "rows_read": step * config.batch}
        job.checkpoints.save(step, state, extra=extra, metric=validation.get(step) if metric is None else metric)
        saved = step
        watchdog.touch()

    hooks = [
        watchdog.hook(),
        profile.hook(),
        progress.hook(),
        Hook(on_metrics=log_metrics),
        Hook(
            on_state=lambda step, state: validate(step, state.params, config.eval_batches),
            when=lambda step: _due(step, config.eval_every) and step != config.steps,  # the last one follows below
            cause="evaluation",
        ),
        Hook(
            on_state=save,
            when=lambda step: _due(step, config.checkpoint_every) and step != config.steps,
            cause="checkpoints",
        ),
    ]
    if config.nan_report:
        hooks.append(NanReport(training, recipe.objective).hook())
    progress.log(
        f"{job.name}: {training.model.size / 1e6:.2f}M parameters{trained_share(training.model)}, "
        f"mesh {training.plan.mesh} on {devices[0].device_kind}, run folder {out}"
    )
    for note in job.notes:
        progress.log(note)
    with contextlib.ExitStack() as at_end:
        at_end.callback(job.checkpoints.close)
        # XLA compiles the step while the first state and batch are made; the loop's call then finds it compiled.
        with clock.during("compilation"), concurrent.futures.ThreadPoolExecutor(1) as ahead:
            compiled = ahead.submit(training.compile, packed=recipe.data.packed)

            if job.done:
                with clock.during("restore"):
                    target = training.abstract_state()
                    try:
                        state = job.checkpoints.restore(
                            target, job.done, fresh=lambda: first_state(job), log=progress.log
                        )
                    except ValueError as error:
                        raise Misfit(str(error)) from error
            else:
                state = first_state(job)
            batches = itertools.chain([next(job.batches)], job.batches)
            compiled.result()
            wait_for_all("compiled")  # on CPU they give up on one that is half a minute late for a first collective
            if job.look is not None and not job.done:
                progress.log(job.look(training, dataset.tokenizer, state.params))
        # only now does the folder change: a restore may fail
        if is_first():
            dataset.tokenizer.save(out)
            command = {"name": job.name, "processes": joined().processes, "command": sys.argv}
            replace_text(out / "config.json", json.dumps({**command, **about}, indent=1))
            (out / "summary.json").unlink(missing_ok=True)  # of the steps that a resumed run has behind it
            if config.tensorboard:
                board = TensorBoard(out / "tensorboard", start=job.done)
                at_end.callback(board.close)
        for line in lines.rewind(job.done, drop=is_last_validation):
            losses |= {line["step"]: line["loss"]} if "loss" in line else {}
            validation |= {line["step"]: line["validation_loss"]} if "validation_loss" in line else {}
        with progress, watchdog, profile:
            with Stop(in_flight(training)) as stop:
                state = fit(
                    training, state, batches, start=job.done, steps=config.steps, hooks=hooks, stop=stop, clock=clock
                )
                step, metric = int(state.step), None
                if step == config.steps and config.keep_best:  # of the rows that those before it were compared by
                    with clock.during("evaluation"):
                        metric = loss_of(state.params, config.eval_batches)
                if step > saved:
                    with clock.during("checkpoints"):
                        save(step, state, metric)
                        job.checkpoints.wait()
            if step == config.steps:  # all is saved: a signal may now end the process, however long this takes
                with clock.during("evaluation"):
                    progress.log("evaluating on the validation split")
                    validate(step, state.params, config.final_eval_batches or None)
        if step < config.steps:
            progress.log(f"stopped by a signal after step {step} of {config.steps}; go on with --out {out}")
            return STOPPED

        with clock.during("results"):
            if config.export != "none":
                progress.log("writing the weights")
                for note in leave_weights(job, state, about):
                    progress.log(note)
            if config.sample_tokens or job.look is not None:
                progress.log("sampling")
            texts = sample_texts(job, state.params) if config.sample_tokens else []
            looked = job.look(training, dataset.tokenizer, state.params) if job.look is not None else ""
            compared = is_first() and not recipe.data.chat  # of answers alone they have no losses
            baselines = ngram_losses(dataset) if compared else {}
            if is_first():
                plot_losses(out / "losses.png", losses, validation, baselines)
                (out / "samples.txt").write_text("\n\n----\n\n".join(texts))
    if not is_first():
        return 0
    if looked:
        progress.log(looked)
    for text in texts:
        progress.log(f"\n--- sampled ---\n{text}")
    final = validation[config.steps]
    summary = {
        "steps": config.steps,
        "validation_loss": final,
        **{f"{kind}_loss": loss for kind, loss in baselines.items()},
        "seconds": time.perf_counter() - begun,
        "goodput": clock.goodput(),
        **{f"seconds_{cause}": seconds for cause, seconds in clock.seconds().items()},
    }
    others = ", ".join(f"{kind} model {loss:.4f}" for kind, loss in baselines.items())
    beside = f"; of the same text: {others}" if others else ""
    progress.log(f"\nvalidation loss {final:.4f} nats a token (perplexity {perplexity(final):.1f}){beside}")
    waited = clock.seconds().get("data", 0.0)
    trained = waited + clock.seconds().get(STEPS, 0.0)
    progress.log(f"{clock.text()}; {waited / max(trained, 1e-9):.2%} of the loop waited for data")
    progress.log(f"loss curve: {out / 'losses.png'}\nrun folder: {out}")
    replace_text(out / "summary.json", as_json(summary, indent=1))  # last: it says that nothing is left to do
    return 0


def trained_share(model: Any) -> str:
    """How many of a model's parameters are trained, where not all are."""
    import jax

    if not model.frozen:
        return ""
    return f", {sum(leaf.size for leaf in jax.tree.leaves(model.trained(model.shapes))) / 1e6:.2f}M of them trained"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    sys.exit(main())
