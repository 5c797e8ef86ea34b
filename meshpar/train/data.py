"""Text data: a config opens a dataset, a dataset gives batches, and batch k depends on nothing but k.

The rows of the training split are shuffled (a new permutation each epoch), repeated without end and cut into global
batches by Grain, as a function of the global step. So a run that resumes at step k, with another number of processes or
another prefetch depth, reads exactly what it would have read. A batch may straddle two epochs.
Source: Grain, https://google-grain.readthedocs.io (MapDataset: random access by index).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.interfaces import Batch
from meshpar.train.rows import Rows, make_rows
from meshpar.train.token_cache import TokenStream, cached_tokens, default_root, load_stream
from meshpar.train.tokenizer import Tokenizer, check_tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What text a run reads and how."""

    source: str = "stdlib"  # "stdlib", "botocore", or the path of a .txt, .md or .py file or of a folder of them
    tokenizer: str = "bpe:4096"  # "bytes", "bpe:N" (trained on the training split) or the path of a tokenizer.json
    seq: int = 256  # tokens in a row; every one of them predicts the next
    packed: bool = False  # False: windows over the stream of documents; True: whole documents, told apart (see rows.py)
    seed: int = 0  # of the shuffle
    shuffle: bool = True  # a new permutation of the rows each epoch; False: rows in corpus order, every epoch alike
    validation_fraction: float = 0.05  # at most this share of the bytes, by whole documents, is never trained on
    prefetch: int = 2  # batches that a background thread prepares ahead; 0: each one is made when asked for

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer)
        _at_least("seq", self.seq, 1)
        _at_least("seed", self.seed, 0)
        _at_least("prefetch", self.prefetch, 0)
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must lie between 0 and 1; try 0.05")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """An opened dataset: token ids on disk, mapped into memory, and the tokenizer that made them."""

    config: DataConfig
    folder: Path  # where the tokens, tokenizer.json and meta.json (counts of documents, tokens, bytes) are cached
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream

    @property
    def vocab(self) -> int:
        """Number of token ids; what `bpe:N` really reached."""
        return self.tokenizer.vocab


def open_dataset(config: DataConfig, *, cache: Path | None = None, progress: bool | None = None) -> Dataset:
    """Opens a dataset, which is tokenised first when the cache does not have it.

    Args:
      config: source, tokenizer and validation_fraction decide the tokens; the rest how batches are made.
      cache: the cache folder; None: `$MESHPAR_CACHE/data`, or `~/.cache/meshpar/data`.
      progress: show a progress bar while tokenising; None: only on a terminal.
    Raises:
      ValueError: the source or tokenizer is not known, or there is no text.
    """
    folder = cached_tokens(
        config.source,
        config.tokenizer,
        validation=config.validation_fraction,
        root=cache or default_root(),
        progress=progress,
    )
    tokenizer = load_tokenizer(folder)
    train, validation = (load_stream(folder, split, tokenizer.eod) for split in ("train", "validation"))
    return Dataset(config=config, folder=folder, tokenizer=tokenizer, train=train, validation=validation)


def train_batches(
    dataset: Dataset,
    *,
    batch: int,
    seq: int | None = None,
    start_step: int = 0,
    seed: int | None = None,
    own_rows: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Batches of steps start_step, start_step + 1, ... without end, on the host.

    Args:
      dataset: whose config says whether rows are packed and shuffled and how many batches are prepared ahead.
      batch: rows in the global batch, over all processes.
      seq: tokens in a row; None: the config's.
      start_step: the global step of the first batch.
      seed: of the shuffle; None: the config's.
      own_rows: which rows of each global batch to make, int [rows], as `Training.own_rows` names those of a process;
        None: all.
    Returns:
      An iterator of `Batch` with numpy arrays `[rows, seq]`.
    Raises:
      ValueError: the split has fewer rows than one batch, or a number is out of range.
    """
    config = dataset.config
    seq = config.seq if seq is None else seq
    seed = config.seed if seed is None else seed
    _at_least("seq", seq, 1)
    _at_least("seed", seed, 0)
    _at_least("start_step", start_step, 0)
    mine = _own_rows(batch, own_rows)
    rows = make_rows(dataset.train, seq=seq, packed=config.packed)
    if len(rows) < batch:
        raise ValueError(
            f"source={config.source!r} has {len(rows)} training rows of seq={seq} tokens and one batch needs {batch}; "
            f"use more text, a shorter seq or a smaller batch"
        )
    return _shuffled(rows, config, batch=batch, start_step=start_step, seed=seed, mine=mine)


def _shuffled(
    rows: Rows, config: DataConfig, *, batch: int, start_step: int, seed: int, mine: np.ndarray
) -> Iterator[Batch]:
    import grain  # costs over half a second, so only when the first batch is asked for

    order = grain.MapDataset.range(len(rows))
    if config.shuffle:
        # Grain permutes epoch e by seed + e; hashing keeps seed=1 from being seed=0 one epoch later.
        order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    steps = order.repeat().batch(batch).map(lambda numbers: rows.batch(numbers[mine]))
    options = grain.ReadOptions(num_threads=min(config.prefetch, 1), prefetch_buffer_size=config.prefetch)
    yield from steps[start_step:].to_iter_dataset(options)


def validation_batches(
    dataset: Dataset,
    *,
    batch: int,
    seq: int | None = None,
    limit: int | None = None,
    own_rows: np.ndarray | None = None,
) -> Iterator[Batch]:
    """The validation split once, in a fixed order; rows that are missing in the last batch are padding with weight 0.

    Args:
      dataset, batch, seq, own_rows: as in `train_batches`.
      limit: at most so many batches, their rows evenly spread over the split, so that their loss estimates that of
        all; None: all. There is always at least one.
    Raises:
      ValueError: a number is out of range.
    """
    seq = dataset.config.seq if seq is None else seq
    _at_least("seq", seq, 1)
    if limit is not None:
        _at_least("limit", limit, 1)
    mine = _own_rows(batch, own_rows)
    rows = make_rows(dataset.validation, seq=seq, packed=dataset.config.packed)
    picked = -(-len(rows) // batch) * batch  # the last numbers are padding
    numbers = np.arange(picked)
    if limit is not None and limit * batch < len(rows):
        picked = limit * batch
        numbers = np.arange(picked) * len(rows) // picked
    return (rows.batch(numbers[begin : begin + batch][mine]) for begin in range(0, picked, batch))


def _own_rows(batch: int, own_rows: np.ndarray | None) -> np.ndarray:
    _at_least("batch", batch, 1)
    if own_rows is None:
        return np.arange(batch)
    if len(own_rows) == 0 or not 0 <= np.min(own_rows) <= np.max(own_rows) < batch:
        raise ValueError(f"own_rows={own_rows} are not rows of a batch of {batch}; use Training.own_rows of that batch")
    return own_rows


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}; use {name}={least} or more")
