"""What one row of a batch is: a window of the token stream, or whole documents packed together.

A row is known by its number alone, so a batch is a list of row numbers and can be made anywhere, in any order. A number
at or past the end is a row of padding. Targets are shifted here, before a row is split over anything.

- windows: row r predicts stream tokens r·seq + 1 ... (r + 1)·seq from their predecessors. Every token but the very
  first is a target exactly once. A row may hold the end of one document and the beginning of the next, with `eod`
  between them (`segments` and `positions` are None). The last row may be short; its rest is padding.
- packed: documents longer than `seq` are cut into pieces of `seq` tokens and a rest. Each piece, in document order,
  goes to the row with the least room that still fits it (best fit) or opens a row; so the pieces of a row stand side by
  side, numbered 1, 2, ... in `segments`, and `positions` restart in each. A piece sees no other, so a long document is
  read as several short ones. Every token of every document appears exactly once. The last token of a document, its
  `eod`, has weight 0 and target `eod`: what follows is another document. The last token of a piece that was cut keeps
  its target, which is of the same document. Where a stream says which tokens are to be learned, all other targets have
  weight 0.

Padding is token and target `eod`, weight 0, segment 0, position 0.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from meshpar.interfaces import Batch
from meshpar.train.token_cache import TokenStream


class Rows(Protocol):
    """A finite list of rows of one split."""

    def __len__(self) -> int:
        """Number of rows with at least one token."""
        ...

    def batch(self, rows: np.ndarray) -> Batch:
        """Row numbers, int `[batch]`, to a Batch of numpy arrays `[batch, seq]`; numbers >= `len(self)` are padding."""
        ...


def make_rows(stream: TokenStream, *, seq: int, packed: bool) -> Rows:
    """The rows of a stream in one of the two forms above, `seq` tokens each."""
    if packed:
        return _Packed(stream=stream, seq=seq, packing=pack(stream.offsets, seq))
    return _Windows(stream=stream, seq=seq)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several streams of one tokenizer, one stream after another, as one list."""
    if len(parts) == 1:
        return parts[0]
    return _Joined(parts=tuple(parts), first=np.cumsum([0, *map(len, parts)], dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Which piece of the stream stands where; pieces are sorted by row, then by column. All int64."""

    starts: np.ndarray  # [pieces]: first token in the stream
    lengths: np.ndarray  # [pieces]: 1 .. seq
    columns: np.ndarray  # [pieces]: first column in the row
    segments: np.ndarray  # [pieces]: 1, 2, ... in each row
    first: np.ndarray  # [rows + 1]: row r holds pieces first[r] .. first[r + 1] - 1


def pack(offsets: np.ndarray, seq: int) -> Packing:
    """Packs documents into rows of `seq` tokens by best fit; about 1 microsecond a piece.

    Args:
      offsets: int64 [documents + 1], as in `TokenStream`; no document is empty.
      seq: tokens in a row.
    """
    sizes = np.diff(offsets)
    pieces = -(-sizes // seq)  # of each document
    ends = np.repeat(offsets[1:], pieces)
    starts = _ranges(np.zeros_like(pieces), pieces) * seq + np.repeat(offsets[:-1], pieces)
    lengths = np.minimum(seq, ends - starts)

    with_room: list[list[int]] = [[] for _ in range(seq)]  # by room left: the rows that have just so much
    mask = 0  # bit f is set where with_room[f] has a row: the tightest fit is then one shift and the lowest set bit
    row_of, columns, segments = (array.array("q") for _ in range(3))  # 8 bytes a piece, where a list takes 40
    count = array.array("q")  # by row: its pieces so far
    for length in map(int, lengths):
        fits = mask >> length
        if fits:
            room = length + (fits & -fits).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                mask ^= 1 << room
        else:
            room, row = seq, len(count)
            count.append(0)
        count[row] += 1
        row_of.append(row)
        columns.append(seq - room)
        segments.append(count[row])
        if room > length:
            with_room[room - length].append(row)
            mask |= 1 << (room - length)

    order = np.argsort(np.array(row_of), kind="stable")  # stable: a row's pieces came in the order of their columns
    first = np.append(0, np.cumsum(np.array(count), dtype=np.int64))
    return Packing(
        starts=starts[order],
        lengths=lengths[order],
        columns=np.array(columns)[order],
        segments=np.array(segments)[order],
        first=first,
    )


@dataclass(frozen=True, kw_only=True)
class _Windows:
    stream: TokenStream
    seq: int

    def __len__(self) -> int:
        return -(-(len(self.stream.tokens) - 1) // self.seq)

    def batch(self, rows: np.ndarray) -> Batch:
        last = len(self.stream.tokens) - 1
        places = rows.astype(np.int64)[:, None] * self.seq + np.arange(self.seq + 1)
        window = self.stream.tokens[np.minimum(places, last)].astype(np.int32)
        valid = places[:, :-1] < last
        eod = np.int32(self.stream.eod)
        return _batch(
            tokens=np.where(valid, window[:, :-1], eod),
            targets=np.where(valid, window[:, 1:], eod),
            weights=valid.astype(np.float32),
        )


@dataclass(frozen=True, kw_only=True)
class _Packed:
    stream: TokenStream
    seq: int
    packing: Packing

    def __len__(self) -> int:
        return len(self.packing.first) - 1

    def batch(self, rows: np.ndarray) -> Batch:
        p, stream, eod = self.packing, self.stream, self.stream.eod
        begin, end = (p.first[np.minimum(rows + k, len(self))] for k in (0, 1))  # a row of padding has no piece
        piece = _ranges(begin, end - begin)
        lengths = p.lengths[piece]
        positions = _ranges(np.zeros_like(lengths), lengths)
        places = np.repeat(p.starts[piece], lengths) + positions
        row = np.repeat(np.repeat(np.arange(len(rows)), end - begin), lengths)
        column = np.repeat(p.columns[piece], lengths) + positions

        def fill(values: np.ndarray, padding: int, dtype: type) -> np.ndarray:
            array: np.ndarray = np.full((len(rows), self.seq), padding, dtype)
            array[row, column] = values
            return array

        tokens = stream.tokens[places]
        following = np.minimum(places + 1, len(stream.tokens) - 1)
        if stream.learned is None:
            ends_document = tokens == eod  # no text has this token
            counts = ~ends_document
        else:
            ends_document = np.isin(places + 1, stream.offsets)
            counts = stream.learned[following] & ~ends_document
        targets = np.where(ends_document, eod, stream.tokens[following])
        return _batch(
            tokens=fill(tokens, eod, np.int32),
            targets=fill(targets, eod, np.int32),
            weights=fill(counts, 0, np.float32),
            segments=fill(np.repeat(p.segments[piece], lengths), 0, np.int32),
            positions=fill(positions, 0, np.int32),
        )


@dataclass(frozen=True, kw_only=True)
class _Joined:
    parts: tuple[Rows, ...]
    first: np.ndarray  # int64 [parts + 1]: part i has rows first[i] .. first[i + 1] - 1

    def __len__(self) -> int:
        return int(self.first[-1])

    def batch(self, rows: np.ndarray) -> Batch:
        part = np.searchsorted(self.first[1:-1], rows, side="right")  # the last one has the padding
        present = np.unique(part)
        batches = [self.parts[i].batch(rows[part == i] - self.first[i]) for i in present]
        back = np.argsort(np.argsort(part, kind="stable"), kind="stable")  # undoes sorting by part
        return jax.tree.map(lambda *arrays: np.concatenate(arrays)[back], *batches)


def _batch(**arrays: Any) -> Batch:
    """A Batch on the host: its annotations name device arrays, which these become when they are placed."""
    return Batch(**arrays)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates `arange(start, start + length)` over all pairs."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
