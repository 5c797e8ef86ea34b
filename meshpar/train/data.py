"""Text data: a config opens a dataset, a dataset gives batches, and batch k depends on nothing but k.

A mixture is a function from the number of a row, counted over the whole run, to a source and a number within it. Each
source's rows are repeated without end, in a new permutation each epoch, by Grain. Batch k is rows k·batch and on. So a
run that resumes at step k, with another number of processes or another prefetch depth, reads exactly what it would have
read, and a process finds its own rows without the others'. A batch may straddle two epochs.
Source: Grain, https://google-grain.readthedocs.io (MapDataset: random access by index).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from meshpar.interfaces import Batch
from meshpar.layout.rules import did_you_mean
from meshpar.train.chat import open_chat
from meshpar.train.corpus import parse_sources
from meshpar.train.rows import Rows, join_rows, make_rows
from meshpar.train.token_cache import TokenStream, cached_tokens, default_root, join_streams, load_stream
from meshpar.train.tokenizer import Tokenizer, check_tokenizer, is_trained, load_tokenizer

# Grain finds a row's place without the others', in 5 microseconds; of so few that takes up to a thousand times as long.
_FEW = 4096


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What text a run reads and how."""

    # "stdlib", "botocore", a file, folder or pattern of .txt, .md, .py, .jsonl or .parquet ("data/*.jsonl"), or several
    # with the weights of their rows: "stdlib=0.7 data/a.jsonl=0.3".
    source: str = "stdlib"
    text_key: str = "text"  # where .jsonl and .parquet hold the text: a key or a column
    tokenizer: str = "bpe:4096"  # "bytes", "bpe:N" (trained on the training split) or the path of a tokenizer.json
    seq: int = 256  # tokens in a row; every one of them predicts the next
    packed: bool = False  # False: windows over the stream of documents; True: whole documents, told apart (see rows.py)
    # the source is conversations (see chat.py), written by a chat template, and only answers are learned
    chat: bool = False
    chat_template: str = ""  # a file of Jinja; empty: what stands beside the tokenizer
    seed: int = 0  # of the shuffle
    shuffle: bool = True  # a new permutation of the rows each epoch; False: rows in corpus order, every epoch alike
    validation_fraction: float = 0.05  # at most this share of the bytes, by whole documents, is never trained on
    prefetch: int = 2  # batches that a background thread prepares ahead; 0: each one is made when asked for

    def __post_init__(self) -> None:
        parse_sources(self.source)
        check_tokenizer(self.tokenizer)
        _at_least("seq", self.seq, 1)
        _at_least("seed", self.seed, 0)
        _at_least("prefetch", self.prefetch, 0)
        if self.chat and not self.packed:
            raise ValueError("data.chat=true keeps conversations apart, which windows do not; set data.packed=true too")
        if self.chat and is_trained(self.tokenizer):
            raise ValueError(
                f"data.chat=true with data.tokenizer={self.tokenizer} has no template; name a model's tokenizer.json"
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must lie between 0 and 1; try 0.05")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of a dataset: token ids on disk, mapped into memory."""

    name: str  # as in the config
    share: Fraction  # of the rows that are trained on
    folder: Path  # where the tokens, tokenizer.json and meta.json (counts of documents, tokens, bytes) are cached
    train: TokenStream
    validation: TokenStream


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """An opened dataset: its sources, and the tokenizer that made their tokens."""

    config: DataConfig
    tokenizer: Tokenizer
    sources: tuple[Source, ...]  # at least one
    notes: tuple[str, ...] = ()  # what a user should know about them

    @property
    def vocab(self) -> int:
        """Number of token ids; what `bpe:N` really reached."""
        return self.tokenizer.vocab

    @property
    def train(self) -> TokenStream:
        """The training split of all sources, one after another; of several, a copy in memory, whatever their shares."""
        return join_streams([source.train for source in self.sources])

    @property
    def validation(self) -> TokenStream:
        """The validation split of all sources, as in `train`."""
        return join_streams([source.validation for source in self.sources])


def open_dataset(config: DataConfig, *, cache: Path | None = None, progress: bool | None = None) -> Dataset:
    """Opens a dataset, which is tokenised first when the cache does not have it.

    The sources of a mixture are split one by one: a text that two of them have may be held out of one and trained on in
    the other.

    Args:
      config: source, text_key, tokenizer and validation_fraction decide the tokens; the rest how batches are made.
      cache: the cache folder; None: `$MESHPAR_CACHE/data`, or `~/.cache/meshpar/data`.
      progress: show a progress bar while tokenising; None: only on a terminal.
    Raises:
      ValueError: a source or the tokenizer is not known, or there is no text.
    """
    if config.chat:
        return open_chat(config)
    shares = parse_sources(config.source)
    folders = cached_tokens(
        list(shares),
        config.tokenizer,
        text_key=config.text_key,
        validation=config.validation_fraction,
        root=cache or default_root(),
        progress=progress,
    )
    tokenizer = load_tokenizer(folders[0])
    sources = []
    for (name, share), folder in zip(shares.items(), folders, strict=True):
        train, validation = (load_stream(folder, split, tokenizer.eod) for split in ("train", "validation"))
        sources.append(Source(name=name, share=share, folder=folder, train=train, validation=validation))
    return Dataset(config=config, tokenizer=tokenizer, sources=tuple(sources))


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
    parts = [make_rows(source.train, seq=seq, packed=config.packed) for source in dataset.sources]
    rows = join_rows(parts)
    if len(rows) < batch:
        raise ValueError(
            f"source={config.source!r} has {len(rows)} training rows of seq={seq} tokens and one batch needs {batch}; "
            f"use more text, a shorter seq or a smaller batch"
        )
    shares = [source.share for source in dataset.sources]
    return _batches(rows, [len(part) for part in parts], shares, config, batch, start_step, seed, mine)


def _batches(
    rows: Rows,
    sizes: Sequence[int],
    shares: Sequence[Fraction],
    config: DataConfig,
    batch: int,
    start_step: int,
    seed: int,
    mine: np.ndarray,
) -> Iterator[Batch]:
    import grain  # costs over half a second, so only when the first batch is asked for

    # Hashing keeps seed=1 from being seed=0 one epoch later.
    seeds = np.random.SeedSequence(seed).generate_state(len(sizes))
    orders = [_order(size, int(own) if config.shuffle else None) for size, own in zip(sizes, seeds, strict=True)]
    first = np.cumsum([0, *sizes]).tolist()
    chosen = mixture(shares)
    own = [int(row) for row in mine]

    def row_number(position: int) -> int:
        source, index = chosen(position)
        return first[source] + orders[source](index)

    def make(step: int) -> Batch:
        return rows.batch(np.array([row_number(step * batch + row) for row in own], np.int64))

    steps = grain.MapDataset.range(start_step, sys.maxsize).map(make)
    options = grain.ReadOptions(num_threads=min(config.prefetch, 1), prefetch_buffer_size=config.prefetch)
    yield from steps.to_iter_dataset(options)


def _order(size: int, seed: int | None) -> Callable[[int], int]:
    """From the number of a row in an endless reading of `size` rows to the row; no seed: in order."""
    import grain

    if seed is None:
        return lambda index: index % size
    if size >= _FEW:
        rows = grain.MapDataset.range(size).shuffle(seed=seed).repeat()  # it permutes epoch e by seed + e
        return lambda index: int(rows[index])

    @functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
    def permutation(epoch: int) -> np.ndarray:
        return np.random.RandomState([seed, epoch]).permutation(size)  # RandomState: numpy will not change its numbers

    return lambda index: int(permutation(index // size)[index % size])


def mixture(shares: Sequence[Fraction]) -> Callable[[int], tuple[int, int]]:
    """From the number of a row in a mixture to its source and its number within that source.

    Sources take turns evenly: of the first n rows source i has share_i · n, give or take one for each source before it,
    and exactly that where n is a multiple of the common denominator. The rows of a source come without gap or repeat.

    Args:
      shares: of each source; they add up to 1.
    """
    unit = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * unit) for share in shares]
    left = [sum(weights[i:]) for i in range(len(weights))]

    def choose(row: int) -> tuple[int, int]:
        for source, (weight, total) in enumerate(zip(weights, left, strict=True)):
            before = row * weight // total  # rows of this source so far, of those that earlier sources left
            if (row + 1) * weight // total > before:
                return source, before
            row -= before
        raise AssertionError("the last source takes what is left")

    return choose


def validation_batches(
    dataset: Dataset,
    *,
    batch: int,
    seq: int | None = None,
    limit: int | None = None,
    own_rows: np.ndarray | None = None,
    source: str | None = None,
) -> Iterator[Batch]:
    """The validation split once, in a fixed order; rows that are missing in the last batch are padding with weight 0.

    Of a mixture: all sources, one after another, whatever their shares.

    Args:
      dataset, batch, seq, own_rows: as in `train_batches`.
      limit: at most so many batches, their rows evenly spread over the split, so that their loss estimates that of
        all; None: all. There is always at least one.
      source: the name of one of `dataset.sources`, to read that one alone; None: all.
    Raises:
      ValueError: a number is out of range, or no source has that name.
    """
    seq = dataset.config.seq if seq is None else seq
    _at_least("seq", seq, 1)
    if limit is not None:
        _at_least("limit", limit, 1)
    mine = _own_rows(batch, own_rows)
    read = [one for one in dataset.sources if source in (None, one.name)]
    if not read:
        names = [one.name for one in dataset.sources]
        hint = did_you_mean(str(source), names) or ";"
        raise ValueError(f"source={source!r} is not in this dataset{hint} it has {', '.join(names)}")
    rows = join_rows([make_rows(one.validation, seq=seq, packed=dataset.config.packed) for one in read])
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
