"""What a run leaves when it is done: weights, adapters, samples, and what its loss is compared with."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from experiments.prepare import Job


def leave_weights(job: Job, state: Any, about: dict[str, Any]) -> list[str]:
    """Writes the trained weights of the recipe's model as weights.safetensors, and where training started from weights
    of others also as they have them: `hf/` for transformers, `adapter/` for PEFT. Nothing is rounded on the way:
    masters are taken where there are some, and adapters are merged into the weights as they were read.

    Returns what to tell about it.
    """
    from meshpar.checkpoint.weights import save_weights

    dtype = {"fp32": "float32", "bf16": "bfloat16"}[job.recipe.train.export]
    weights = job.training.model.trained(state.params) if state.master is None else state.master
    notes = []
    if job.recipe.lora is not None:
        notes = _leave_adapter(job, weights, dtype)
        weights = _merged(job, weights)
    save_weights(job.out / "weights.safetensors", weights, dtype=dtype, metadata=about)
    if job.source is not None:
        _leave_hf(job, weights, dtype)
    return notes


def _merged(job: Job, adapters: Any) -> Any:
    import jax
    import jax.numpy as jnp

    from meshpar.train.lora import merge_adapters

    frozen = job.training.model.untrained(job.training.abstract_weights())
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), frozen)
    return merge_adapters(job.source.load(target), adapters, job.recipe.lora)


def _leave_adapter(job: Job, adapters: Any, dtype: str) -> list[str]:
    from meshpar.train.peft import NoPeftForm, save_adapter

    recipe = job.recipe
    folder = _emptied(job.out / "adapter")
    try:
        save_adapter(folder, recipe.model, adapters, recipe.lora, base=recipe.weights, dtype=dtype)
    except NoPeftForm as error:
        return [f"without {folder}: {error}"]
    return []


def _leave_hf(job: Job, weights: Any, dtype: str) -> None:
    from meshpar.hf.folder import save_hf
    from meshpar.mesh.distributed import is_first
    from meshpar.train.chat import name_what_ends_answers

    data, token_ids = job.recipe.data, job.source.token_ids
    tokenizer = Path(data.tokenizer).expanduser()
    beside = tokenizer.parent if tokenizer.is_file() else tokenizer if tokenizer.is_dir() else job.out
    folder = _emptied(job.out / "hf")
    save_hf(folder, job.recipe.model, weights, dtype=dtype, tokenizer=beside, token_ids=token_ids)
    if data.chat and is_first():
        name_what_ends_answers(folder, data, job.dataset.tokenizer, job.source.stop)


def _emptied(folder: Path) -> Path:
    """The folder, without what an earlier part of the run left in it."""
    from meshpar.mesh.distributed import is_first

    if is_first():
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def sample_texts(job: Job, params: Any) -> list[str]:
    """Continuations of the first tokens of some validation rows."""
    from meshpar.generate.generator import sample
    from meshpar.train.data import validation_batches

    recipe, training, dataset = job.recipe, job.training, job.dataset
    batch = next(validation_batches(dataset, batch=recipe.train.batch, limit=1))
    length = min(16, recipe.data.seq)
    new = min(recipe.train.sample_tokens, recipe.model.max_seq - length)
    prompts = [[int(token) for token in row[:length]] for row in batch.tokens[:2]]
    rows = sample(training.model, training.plan, training.mesh, params, prompts, new_tokens=new, seed=recipe.train.seed)
    # a model may have more tokens than its tokenizer, and early in training it samples them
    return [dataset.tokenizer.decode(token for token in row if token < dataset.vocab) for row in rows]


def ngram_losses(dataset: Any) -> dict[str, float]:
    """Losses of a unigram and a bigram model of the same text, in nats a token."""
    from meshpar.train.ngram import bigram_loss, unigram_loss

    arguments = (dataset.train.tokens, dataset.validation.tokens, dataset.vocab)
    return {"unigram": unigram_loss(*arguments), "bigram": bigram_loss(*arguments)}


def perplexity(loss: float) -> float:
    """exp(loss); inf where a float ends."""
    return math.inf if loss > 709 else math.exp(loss)
