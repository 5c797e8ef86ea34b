"""The batches that a case is compared on: the recipe's own text, or random tokens, with some targets masked.

Masks matter: where every target counts, a mean of means equals the mean.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from meshpar.check.case import Case
from meshpar.interfaces import Batch
from meshpar.train.data import open_dataset, train_batches


def batches_of(case: Case) -> list[Batch]:
    """As many batches as the case has steps, numpy arrays `[batch, seq]`."""
    recipe = case.recipe
    rows, seq = recipe.train.batch, recipe.data.seq
    if case.random_data:
        sizes = (rows, seq, recipe.model.vocab)
        found = [random_batch(number, *sizes, packed=recipe.data.packed) for number in range(case.steps)]
    else:
        dataset = open_dataset(recipe.data)
        if dataset.vocab > recipe.model.vocab:
            raise ValueError(
                f"the tokenizer {recipe.data.tokenizer} has {dataset.vocab} tokens and "
                f"model.vocab={recipe.model.vocab}; set model.vocab={dataset.vocab} or more, or give --random-data"
            )
        found = list(itertools.islice(train_batches(dataset, batch=rows), case.steps))
    return [masked(batch, number) if case.masked else batch for number, batch in enumerate(found)]


def random_batch(seed: int, rows: int, seq: int, vocab: int, *, packed: bool) -> Batch:
    """Random tokens; with `packed` two documents in each row, and some padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, seq + 1), dtype=np.int32)
    weights = np.ones((rows, seq), np.float32)
    segments = positions = None
    if packed:
        places = np.arange(seq)[None]
        first, end = np.sort(rng.integers(1, seq + 1, (2, rows, 1)), axis=0)
        segments = np.where(places < first, 1, np.where(places < end, 2, 0)).astype(np.int32)
        positions = np.where(places < first, places, np.where(places < end, places - first, 0)).astype(np.int32)
        # the last token of a document predicts nothing
        weights = ((segments > 0) & (places != first - 1) & (places != end - 1)).astype(np.float32)
    arrays: Any = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    arrays |= {"segments": segments, "positions": positions}
    return Batch(**arrays)


def masked(batch: Batch, seed: int) -> Batch:
    """The batch with a fifth of its targets, and all of the last row, without weight."""
    rng = np.random.default_rng((seed, 1))
    weights = np.asarray(batch.weights) * (rng.random(batch.weights.shape) < 0.8)
    if len(weights) > 1:
        weights[-1] = 0.0
    return dataclasses.replace(batch, weights=weights.astype(np.float32))  # type: ignore[arg-type]


def wrong_targets(batch: Batch) -> int:
    """How many targets with a weight are not the token that follows in the same document; of a row's last token nothing
    is known.
    """
    tokens, targets = np.asarray(batch.tokens), np.asarray(batch.targets)
    counts = np.asarray(batch.weights)[:, :-1] != 0
    if batch.segments is not None:
        segments = np.asarray(batch.segments)
        counts &= segments[:, :-1] == segments[:, 1:]
    return int(np.sum(counts & (targets[:, :-1] != tokens[:, 1:])))
