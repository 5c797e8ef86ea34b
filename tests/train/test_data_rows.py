"""Rows: windows read every target once; packed rows hold every token once and never look into another document."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.interfaces import Batch
from meshpar.train.rows import make_rows, pack
from meshpar.train.token_cache import TokenStream

EOD = 0
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def stream_of(lengths: list[int]) -> TokenStream:
    """Documents of these lengths, eod included; every other token is unique: its place in the stream, plus 1."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(1, offsets[-1] + 1).astype(np.uint16)
    tokens[offsets[1:] - 1] = EOD
    return TokenStream(tokens=tokens, offsets=offsets, eod=EOD)


def all_rows(stream: TokenStream, seq: int, packed: bool) -> Batch:
    rows = make_rows(stream, seq=seq, packed=packed)
    return rows.batch(np.arange(len(rows)))


@given(lengths=sizes.filter(lambda s: sum(s) > 1), seq=st.integers(1, 24))
def test_windows_read_every_target_once_after_its_predecessor(lengths: list[int], seq: int) -> None:
    stream = stream_of(lengths)
    batch = all_rows(stream, seq, packed=False)
    used = batch.weights == 1
    np.testing.assert_array_equal(batch.tokens[used], stream.tokens[:-1])
    np.testing.assert_array_equal(batch.targets[used], stream.tokens[1:])
    assert (batch.weights[:-1] == 1).all()  # only the last row may be short
    assert batch.segments is None and batch.positions is None


@given(lengths=sizes, seq=st.integers(1, 24))
def test_packed_rows_hold_every_token_of_every_document_once(lengths: list[int], seq: int) -> None:
    stream = stream_of(lengths)
    batch = all_rows(stream, seq, packed=True)
    held = batch.tokens[batch.segments > 0]
    assert sorted(held) == sorted(stream.tokens)


@given(lengths=sizes, seq=st.integers(1, 24))
def test_packed_targets_stay_in_their_document(lengths: list[int], seq: int) -> None:
    stream = stream_of(lengths)
    batch = all_rows(stream, seq, packed=True)
    used = batch.weights == 1
    tokens, targets = batch.tokens[used], batch.targets[used]
    assert (tokens != EOD).all()
    document = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(targets, stream.tokens[tokens])  # a token is its place plus 1: the next token
    np.testing.assert_array_equal(document[tokens - 1], document[tokens])
    assert used.sum() == sum(lengths) - len(lengths)  # every target but the one after an eod
    unused = batch.weights == 0
    assert (used | unused).all()
    assert (batch.targets[unused] == EOD).all() and (batch.tokens[unused] == EOD).all()


@given(lengths=sizes, seq=st.integers(1, 24))
def test_segments_count_up_and_positions_restart_in_each(lengths: list[int], seq: int) -> None:
    stream = stream_of(lengths)
    batch = all_rows(stream, seq, packed=True)
    document = np.repeat(np.arange(len(lengths)), lengths)
    for tokens, segments, positions in zip(batch.tokens, batch.segments, batch.positions, strict=True):
        count = int((segments > 0).sum())
        assert (segments[count:] == 0).all() and (positions[count:] == 0).all()  # padding is at the end
        assert list(dict.fromkeys(segments[:count])) == list(range(1, segments.max() + 1))
        for segment in range(1, segments.max() + 1):
            at = segments == segment
            np.testing.assert_array_equal(positions[at], np.arange(at.sum()))
            inside = tokens[at][tokens[at] != EOD]
            assert (np.diff(inside) == 1).all()  # one run of the stream
            assert len(set(document[inside - 1])) <= 1


@given(lengths=sizes, seq=st.integers(1, 24))
def test_packing_leaves_no_two_rows_that_would_fit_in_one(lengths: list[int], seq: int) -> None:
    packing = pack(stream_of(lengths).offsets, seq)
    filled = np.add.reduceat(packing.lengths, packing.first[:-1])
    assert (filled <= seq).all()
    assert (filled * 2 <= seq).sum() <= 1


def test_best_fit_fills_the_tightest_gap() -> None:
    batch = all_rows(stream_of([5, 6, 2, 3, 10]), 8, packed=True)
    np.testing.assert_array_equal(batch.segments[0], [1, 1, 1, 1, 1, 2, 2, 2])  # 5 + 3: the 2 before went below
    np.testing.assert_array_equal(batch.segments[1], [1, 1, 1, 1, 1, 1, 2, 2])  # 6 + 2
    np.testing.assert_array_equal((batch.segments > 0).sum(1), [8, 8, 8, 2])  # 10 was cut into 8 + 2


def test_pieces_are_sorted_by_row_and_column() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 3000).tolist()
    packing = pack(stream_of(lengths).offsets, 64)
    row = np.repeat(np.arange(len(packing.first) - 1), np.diff(packing.first))
    assert (np.diff(row * 64 + packing.columns) > 0).all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_is_the_same_in_any_batch_and_rows_past_the_end_are_padding(packed: bool) -> None:
    stream = stream_of([5, 17, 2, 9, 1, 30])
    rows = make_rows(stream, seq=8, packed=packed)
    whole = all_rows(stream, 8, packed)
    some = rows.batch(np.array([3, len(rows), 0, len(rows) + 7]))
    for name in ("tokens", "targets", "weights", *(["segments", "positions"] if packed else [])):
        got, expected = getattr(some, name), getattr(whole, name)
        np.testing.assert_array_equal(got[[0, 2]], expected[[3, 0]])
        assert (got[[1, 3]] == 0).all()  # EOD is 0 here
        assert got.dtype == (np.float32 if name == "weights" else np.int32)


def test_uint32_tokens_arrive_whole() -> None:
    tokens = np.array([70_000, 80_000, 90_000], np.uint32)
    stream = TokenStream(tokens=tokens, offsets=np.array([0, 3]), eod=90_000)
    for packed in (False, True):
        batch = all_rows(stream, 4, packed)
        assert batch.tokens[0, 0] == 70_000 and batch.targets[0, 0] == 80_000
