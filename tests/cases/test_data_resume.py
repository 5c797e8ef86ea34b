"""Data order: a resume reads what the whole run read, whatever else changed, and each epoch is its own permutation."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from meshpar.interfaces import Batch
from meshpar.train.data import (
    DataConfig,
    Dataset,
    Source,
    mixture,
    open_dataset,
    train_batches,
    validation_batches,
)
from meshpar.train.token_cache import TokenStream

SEQ, BATCH = 4, 10


def source(name: str, share: Fraction, begin: int, rows: int) -> Source:
    """A source of `rows` rows; row r, counted from `begin` over all sources, holds tokens r · SEQ and on."""
    tokens = np.arange(begin * SEQ, (begin + rows) * SEQ + 1).astype(np.uint16)
    offsets = np.append(np.arange(0, rows * SEQ, SEQ), len(tokens))
    stream = TokenStream(tokens=tokens, offsets=offsets, eod=60_000)  # eod never occurs
    return Source(name=name, share=share, folder=Path(), train=stream, validation=stream)


def alone(rows: int = 100, **config: object) -> Dataset:
    one = source("stdlib", Fraction(1), 0, rows)
    return Dataset(config=DataConfig(seq=SEQ, **config), tokenizer=None, sources=(one,))


def mixed(**config: object) -> Dataset:
    """70% of rows 0 to 59, 20% of rows 100 to 102, 10% of rows 200 to 206."""
    shares = (Fraction(7, 10), 0, 60), (Fraction(2, 10), 100, 3), (Fraction(1, 10), 200, 7)
    sources = tuple(source(f"s{begin}", share, begin, rows) for share, begin, rows in shares)
    return Dataset(config=DataConfig(seq=SEQ, **config), tokenizer=None, sources=sources)


def ids(batch: Batch) -> list[int]:
    assert (batch.tokens[:, 0] % SEQ == 0).all()
    return (batch.tokens[:, 0] // SEQ).tolist()


def steps(dataset: Dataset, begin: int, end: int, **options: object) -> list[list[int]]:
    """Ids of the rows of steps begin + 1 to end."""
    batches = train_batches(dataset, batch=BATCH, start_step=begin, **options)
    return [ids(batch) for batch in itertools.islice(batches, end - begin)]


RUNS = {
    "windows": alone(),
    "packed": alone(packed=True),
    "an epoch ends inside a batch": alone(rows=93),
    "in order": alone(shuffle=False),
    "mixture": mixed(),
    "packed mixture": mixed(packed=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_steps_14_to_20_are_those_of_the_uninterrupted_run(name: str) -> None:
    data = RUNS[name]
    whole = steps(data, 0, 20)
    assert len({tuple(rows) for rows in whole}) == (10 if name == "in order" else 20)
    assert steps(data, 0, 13) + steps(data, 13, 20) == whole


@pytest.mark.parametrize("prefetch", [0, 1, 7])
@pytest.mark.parametrize("degree", [1, 2, 5, 10])
@pytest.mark.parametrize("name", RUNS)
def test_another_data_degree_and_prefetch_depth_resume_the_same_stream(name: str, degree: int, prefetch: int) -> None:
    whole = steps(RUNS[name], 0, 20)
    data = dataclasses.replace(RUNS[name], config=dataclasses.replace(RUNS[name].config, prefetch=prefetch))
    shares = np.arange(BATCH).reshape(degree, -1)
    if degree == 5:
        shares = shares[::-1]  # ranks need not hold rows in their order
    parts = [steps(data, 13, 20, own_rows=rows) for rows in shares]
    for step, rows in enumerate(whole[13:]):
        together = dict(zip(shares.flat, itertools.chain.from_iterable(part[step] for part in parts), strict=True))
        assert [together[row] for row in range(BATCH)] == rows


@pytest.mark.parametrize("size", [100, 5000])  # few rows and many are permuted in two ways
def test_each_epoch_is_a_permutation_of_its_own(size: int) -> None:
    epoch = size // BATCH
    rows = list(itertools.chain.from_iterable(steps(alone(size), 0, 3 * epoch)))
    epochs = [rows[i * size : (i + 1) * size] for i in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(size)]}) == 4
    assert list(itertools.chain.from_iterable(steps(alone(size), 0, 3 * epoch))) == rows  # by the seed
    assert list(itertools.chain.from_iterable(steps(alone(size), epoch, 2 * epoch))) == epochs[1]  # a restart
    assert list(itertools.chain.from_iterable(steps(alone(size, seed=1), 0, epoch))) not in epochs


def test_each_source_of_a_mixture_has_epochs_of_its_own() -> None:
    rows = list(itertools.chain.from_iterable(steps(mixed(), 0, 90)))  # 900 rows: 630, 180 and 90
    for begin, size, count in ((0, 60, 630), (100, 3, 180), (200, 7, 90)):
        own = [row for row in rows if begin <= row < begin + 100]
        assert len(own) == count
        epochs = [own[i : i + size] for i in range(0, count - size + 1, size)]
        assert all(sorted(epoch) == list(range(begin, begin + size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    order = [row // 100 for row in rows]
    for first in range(0, 900, BATCH):  # and every batch has the shares of the whole
        assert Counter(order[first : first + BATCH]) == {0: 7, 1: 2, 2: 1}


@pytest.mark.parametrize("weights", [(1,), (7, 3), (1, 1, 1), (5, 1, 1, 93), (1, 999)])
def test_a_mixture_takes_each_row_of_a_source_once_and_holds_its_shares_throughout(weights: tuple[int, ...]) -> None:
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    choose = mixture(shares)
    taken = [0] * len(weights)
    for row in range(3 * sum(weights)):
        chosen, index = choose(row)
        assert index == taken[chosen]
        taken[chosen] += 1
        for i, share in enumerate(shares):
            assert abs(taken[i] - share * (row + 1)) < i + 1
    assert taken == [3 * weight for weight in weights]
    assert choose(10**15 * sum(weights) - 1)[1] < 10**15 * max(weights)  # no run is too long to be exact


def test_a_mixture_of_files_trains_on_its_shares_and_is_evaluated_by_source(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i:03d}")  # 7 bytes and eod: a row
    names = [str(tmp_path / name) for name in ("one", "two")]
    config = DataConfig(source=f"{names[0]}=3 {names[1]}=1", tokenizer="bytes", seq=8, packed=True)
    data = open_dataset(config, cache=tmp_path / "cache")
    assert [one.name for one in data.sources] == names
    assert [one.share for one in data.sources] == [Fraction(3, 4), Fraction(1, 4)]

    def first_words(batches: object) -> Counter[str]:
        rows = [row for batch in batches for row, used in zip(batch.tokens, batch.weights, strict=True) if used.any()]
        return Counter(data.tokenizer.decode(row)[:3] for row in rows)

    read = first_words(itertools.islice(train_batches(data, batch=8), 10))
    assert read == {"one": 60, "two": 20}
    assert first_words(validation_batches(data, batch=3, source=names[1])) == {"two": 2}
    assert first_words(validation_batches(data, batch=3)) == {"one": 2, "two": 2}
    assert data.train.offsets[-1] == len(data.train.tokens) == sum(len(one.train.tokens) for one in data.sources)
    assert data.tokenizer.decode(data.validation.tokens[data.validation.offsets[-2] :]).startswith("two")
    with pytest.raises(ValueError, match=r"source='three' is not in this dataset; it has .*one, .*two"):
        validation_batches(data, batch=3, source="three")
