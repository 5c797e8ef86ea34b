"""What is settled before a run trains: all that a user can get wrong is checked here, and nothing compiles yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Look(Protocol):
    """What else to tell about the parameters of a run, before its first step and after its last."""

    def check(self, config: Any, tokenizer: Any) -> None:
        """Raises ValueError for what cannot be told of a model."""
        ...

    def __call__(self, training: Any, tokenizer: Any, params: Any) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that was checked and has not compiled, drawn or written anything yet."""

    name: str
    recipe: Any
    out: Path
    training: Any
    dataset: Any
    batches: Iterator[Any]  # from the first step that is left
    checkpoints: Any
    done: int  # steps that a resumed run has behind it
    finished: bool  # whether nothing is left to do
    source: Any  # the weights that training starts from; None: they are drawn
    look: Look | None
    notes: list[str]  # what to tell about the run before it starts


def prepare(
    name: str,
    recipe: Any,
    out: Path | None,
    *,
    devices: int | None,
    resume: Any,
    held: contextlib.ExitStack,
    look: Look | None = None,
) -> Job:
    """Checks everything that a user can get wrong, and tokenises the data. `out` of None is named by recipe and time;
    the folder stays locked until `held` is left.

    Raises:
      ValueError: the first thing that is wrong, one sentence.
    """
    from meshpar.mesh.devices import choose_devices, use_compilation_cache
    from meshpar.mesh.distributed import is_first, time_stamp, wait_for_all

    config, model_config = recipe.train, recipe.model
    source, model = open_source(recipe), recipe.abstract_model()
    tx = recipe.optimizer.make(config.steps, model)
    if not recipe.plan.mesh.has_free_axis:  # before devices are emulated, which takes long for many
        recipe.plan.check(model, batch=config.batch, seq=recipe.data.seq)
    chosen = choose_devices(recipe.plan.mesh, devices)
    use_compilation_cache()
    refuse_own_input(recipe, out)
    out = out or Path("runs") / f"{name.split(':')[-1]}-{time_stamp()}"

    from meshpar.checkpoint.manager import Checkpoints
    from meshpar.train import run_folder
    from meshpar.train.build import build
    from meshpar.train.data import open_dataset, train_batches

    existed = out.is_dir()
    if existed and is_first():  # before anything in it is looked at
        held.enter_context(run_folder.lock(out))
    checkpoints = Checkpoints(out / "checkpoints", keep=config.keep, best=config.keep_best, axes=model.axes)
    notes: list[str] = []
    done = run_folder.steps_done(out, checkpoints.newest_whole(log=notes.append), recipe, resume)
    notes += [run_folder.resume_note(out, recipe, done), warmup_note(recipe)]
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
        fix = "use the one that belongs to it" if source else f"set model.vocab={dataset.vocab} or more"
        raise ValueError(
            f"the tokenizer {recipe.data.tokenizer} has {dataset.vocab} tokens and model.vocab={model_config.vocab}; "
            f"{fix}"
        )
    if look is not None:
        look.check(model_config, dataset.tokenizer)
    batches = train_batches(dataset, batch=config.batch, start_step=done, own_rows=training.own_rows)
    if not existed and is_first():
        held.enter_context(run_folder.lock(out))
        if checkpoints.latest() is not None:
            raise ValueError(f"another run has begun in {out} meanwhile; start this one again")
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
        finished=run_folder.is_finished(out, done, recipe),
        source=source,
        look=look,
        notes=[note for note in (*notes, *dataset.notes) if note],
    )


def open_source(recipe: Any) -> Any:
    """The weights that the recipe starts from, checked and not read; None where it draws them.

    Raises:
      ValueError: they are not there, or of another model than the recipe's.
    """
    from meshpar.hf.folder import open_hf
    from meshpar.hf.mapping import shapes_of
    from meshpar.module import abstract

    if recipe.weights is None:
        return None
    source = open_hf(recipe.weights)
    ours = shapes_of(abstract(recipe.model.build, recipe.model).shapes)
    theirs = shapes_of(source.model.shapes)
    for path in (*ours, *theirs):
        if ours.get(path) != theirs.get(path):
            raise ValueError(
                f"{path} is {ours.get(path, 'not there')} in the recipe's model and {theirs.get(path, 'not there')} in "
                f"{recipe.weights}; give the recipe that model's config, as experiments.finetune_lm does"
            )
    return source


def refuse_own_input(recipe: Any, out: Path | None) -> None:
    """Raises ValueError where what a run leaves would replace what it reads, or what is not of a run."""
    if recipe.weights is None or out is None:
        return
    read = [Path(path).expanduser().resolve() for path in (recipe.weights, recipe.data.tokenizer)]
    for folder in (out / "hf", out / "adapter"):
        if any(path.is_relative_to(folder.resolve()) for path in read):
            raise ValueError(f"--out {out} would replace {folder}, which this run reads; name another folder")
        if folder.exists() and not (out / "config.json").exists():
            raise ValueError(f"{folder} is there, and no run that made it; name another folder with --out")


def first_state(job: Job) -> Any:
    """The state before the first step: drawn, or of the weights that the recipe names, read into their shards."""
    from meshpar.train.lora import with_fresh_adapters

    training, seed = job.training, job.recipe.train.seed
    if job.source is None:
        return training.init(seed)
    wanted = training.abstract_weights()
    if job.recipe.lora is None:
        return training.start(job.source.load(wanted), seed)
    base = job.source.load(training.model.untrained(wanted))
    return training.start(with_fresh_adapters(training, base, seed), seed)


def warmup_note(recipe: Any) -> str:
    """What to tell about a run that ends while it warms up."""
    steps, optimizer = recipe.train.steps, recipe.optimizer
    if optimizer.warmup < steps:
        return ""
    return (
        f"optimizer.warmup={optimizer.warmup} takes all of train.steps={steps}: the learning rate does not reach its "
        f"peak; set optimizer.warmup={steps // 10} for a run of this length"
    )
