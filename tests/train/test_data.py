"""Batches depend on the step alone: resumes, other numbers of processes and prefetch depths read the same stream."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

from meshpar.interfaces import Batch
from meshpar.train.data import DataConfig, Dataset, Source, open_dataset, train_batches, validation_batches
from meshpar.train.token_cache import TokenStream

SEQ = 4


def dataset(rows: int = 100, **config) -> Dataset:
    """A dataset of `rows` windows, or packed rows, that say which they are: row r holds tokens r · SEQ and on."""
    tokens = np.arange(rows * SEQ + 1).astype(np.uint16)
    offsets = np.arange(0, rows * SEQ + 1, SEQ) if config.get("packed") else np.array([0, len(tokens)])
    # eod=60000 never occurs: a packed document is then just its tokens
    stream = TokenStream(tokens=tokens, offsets=offsets, eod=60_000)
    source = Source(name="stdlib", share=Fraction(1), folder=Path(), train=stream, validation=stream)
    return Dataset(config=DataConfig(seq=SEQ, **config), tokenizer=None, sources=(source,))


def ids(batch: Batch) -> list[int]:
    assert (batch.tokens[:, 0] % SEQ == 0).all()
    return (batch.tokens[:, 0] // SEQ).tolist()


def take(batches: Iterator[Batch], count: int) -> list[list[int]]:
    return [ids(batch) for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("own_rows", [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [1, 4, 9], list(range(10))])
def test_a_process_reads_its_own_rows_of_each_global_batch(own_rows: list[int]) -> None:
    data = dataset(rows=33)  # a batch straddles epochs
    whole = take(train_batches(data, batch=10), 9)
    mine = take(train_batches(data, batch=10, start_step=2, own_rows=np.array(own_rows)), 7)
    assert mine == [[rows[row] for row in own_rows] for rows in whole[2:]]


def test_epochs_are_permutations_when_batches_straddle_them() -> None:
    rows = list(itertools.chain.from_iterable(take(train_batches(dataset(rows=13), batch=5), 13)))
    assert all(sorted(rows[i : i + 13]) == list(range(13)) for i in range(0, 65, 13))


def test_seeds_give_unrelated_orders() -> None:
    data = dataset(seed=0)
    first = list(itertools.chain.from_iterable(take(train_batches(data, batch=100), 2)))
    second = list(itertools.chain.from_iterable(take(train_batches(data, batch=100, seed=1), 2)))
    assert len({tuple(first[:100]), tuple(first[100:]), tuple(second[:100]), tuple(second[100:])}) == 4
    assert take(train_batches(dataset(seed=1), batch=100), 2) == [second[:100], second[100:]]  # the config's seed


def test_no_shuffle_is_the_order_of_the_corpus_every_epoch() -> None:
    batches = take(train_batches(dataset(rows=6, shuffle=False), batch=2), 6)
    assert batches == [[0, 1], [2, 3], [4, 5]] * 2


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_is_numpy_of_the_documented_shapes_and_goes_to_devices(packed: bool) -> None:
    batch = next(train_batches(dataset(packed=packed), batch=8))
    assert isinstance(batch, Batch)
    leaves = jax.tree.leaves(batch)
    assert len(leaves) == (5 if packed else 3)
    assert all(type(leaf) is np.ndarray and leaf.shape == (8, SEQ) for leaf in leaves)
    np.testing.assert_array_equal(batch.targets[:, :-1], batch.tokens[:, 1:])
    np.testing.assert_array_equal(jax.device_put(batch).tokens, batch.tokens)


def test_seq_of_the_call_goes_before_that_of_the_config() -> None:
    batch = next(train_batches(dataset(), batch=2, seq=2 * SEQ))
    assert batch.tokens.shape == (2, 2 * SEQ)


@pytest.mark.parametrize("packed", [False, True])
def test_validation_is_read_once_in_order_and_the_last_batch_is_padded(packed: bool) -> None:
    data = dataset(rows=11, packed=packed)
    batches = list(validation_batches(data, batch=4))
    assert [batch.tokens.shape for batch in batches] == [(4, SEQ)] * 3
    weights = np.concatenate([batch.weights for batch in batches])
    assert list(itertools.chain.from_iterable(map(ids, batches)))[:11] == list(range(11))
    assert (weights[:11] == 1).all() and (weights[11:] == 0).all()
    spread = [ids(batch) for batch in validation_batches(data, batch=4, limit=2)]
    assert spread == [[0, 1, 2, 4], [5, 6, 8, 9]]
    assert (
        list(validation_batches(data, batch=1, limit=11)) and len(list(validation_batches(data, batch=4, limit=9))) == 3
    )
    own = np.array([1, 3])
    for whole, mine in zip(batches, validation_batches(data, batch=4, own_rows=own), strict=True):
        np.testing.assert_array_equal(mine.tokens, whole.tokens[own])
        np.testing.assert_array_equal(mine.weights, whole.weights[own])


def test_validation_has_a_batch_even_when_it_is_smaller_than_one() -> None:
    (batch,) = validation_batches(dataset(rows=1), batch=8, seq=64)
    assert batch.weights.sum() == SEQ and batch.weights.shape == (8, 64)


def test_text_trains_end_to_end_from_files_to_batches(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"{i}: the quick brown fox jumps over the lazy dog\n")
    config = DataConfig(source=str(tmp_path), tokenizer="bytes", seq=64, packed=True)
    data = open_dataset(config, cache=tmp_path / "cache")
    batch = next(train_batches(data, batch=4))
    text = data.tokenizer.decode(batch.tokens[0][batch.segments[0] == 1])
    assert text.endswith(": the quick brown fox jumps over the lazy dog\n")


def test_importing_the_package_loads_no_package_that_takes_long() -> None:
    program = (
        "import sys; import meshpar.train.data, meshpar.train.ngram; "
        "print(sorted({'grain', 'tokenizers', 'rich', 'absl', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_iterator_that_is_left_open_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"{i}: some text\n")
    program = (
        "from meshpar.train.data import *; from pathlib import Path; "
        f"data = open_dataset(DataConfig(source={str(tmp_path)!r}, tokenizer='bytes', seq=8)); "
        "it = train_batches(data, batch=2); print(next(it).tokens.shape)"
    )
    environment = {**os.environ, "MESHPAR_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert done.stdout.strip() == "(2, 8)" and done.stderr == ""


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seq", 0, "seq=0 must be at least 1"),
        ("seed", -1, "seed=-1 must be at least 0"),
        ("prefetch", -1, "prefetch=-1 must be at least 0"),
        ("validation_fraction", 0.0, "validation_fraction=0.0 must lie between 0 and 1"),
        ("validation_fraction", 1.0, "validation_fraction=1.0 must lie between 0 and 1"),
        ("tokenizer", "byts", "did you mean 'bytes'"),
        ("source", "stdlib=0.7 botocore=0", "weighs botocore by '0'"),
    ],
)
def test_a_bad_config_is_refused_when_it_is_made(field: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig(**{field: value})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda d: train_batches(d, batch=101), "has 100 training rows of seq=4 tokens and one batch needs 101"),
        (lambda d: train_batches(d, batch=2, seq=999), "has 1 training rows of seq=999 tokens and one batch needs 2"),
        (lambda d: train_batches(d, batch=0), "batch=0 must be at least 1"),
        (lambda d: train_batches(d, batch=2, seq=0), "seq=0 must be at least 1"),
        (lambda d: train_batches(d, batch=2, start_step=-1), "start_step=-1 must be at least 0"),
        (
            lambda d: train_batches(d, batch=8, own_rows=np.array([7, 8])),
            r"own_rows=\[7 8\] are not rows of a batch of 8",
        ),
        (
            lambda d: train_batches(d, batch=8, own_rows=np.array([], int)),
            r"own_rows=\[\] are not rows of a batch of 8",
        ),
        (lambda d: validation_batches(d, batch=8, own_rows=np.array([-1])), r"own_rows=\[-1\] are not rows"),
        (lambda d: validation_batches(d, batch=2, limit=0), "limit=0 must be at least 1"),
        (lambda d: validation_batches(d, batch=2, seq=0), "seq=0 must be at least 1"),
    ],
)
def test_a_bad_number_is_refused_before_the_first_batch(call: Callable[[Dataset], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(dataset())
