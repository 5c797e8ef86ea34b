"""One line says where a parameter lies: any block of it is read as it would be cut from the whole, and written back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.hf.mapping import Entry, Weights, read_block

SIZES = {"vocab": 10, "embed": 6, "heads": 4, "head_dim": 2, "mlp": 5}
PADDED = {**SIZES, "vocab": 12}
# their dims -> ours, and the same by hand
ENTRIES = {
    "vocab embed -> vocab embed": lambda t: np.pad(t, ((0, 2), (0, 0))),
    "vocab embed -> embed vocab": lambda t: np.pad(t, ((0, 2), (0, 0))).T,
    "mlp embed -> embed mlp": lambda t: t.T,
    "(heads head_dim) embed -> embed heads head_dim": lambda t: t.T.reshape(6, 4, 2),
    "embed (heads head_dim) -> heads head_dim embed": lambda t: t.T.reshape(4, 2, 6),
    "embed (1/3 heads head_dim) -> embed heads head_dim": lambda t: t[:, 8:16].reshape(6, 4, 2),
    "(2/3 heads head_dim) -> heads head_dim": lambda t: t[16:].reshape(4, 2),
    "embed -> embed": lambda t: t,
}


@dataclass
class InMemory:
    """A tensor that notes how much of it is read."""

    array: np.ndarray
    name: str = "tensor"
    file: Path = Path("file")
    seen: list[int] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def read(self, index: Any = ()) -> np.ndarray:
        assert all(isinstance(part, slice) and part.step is None for part in index)
        self.seen.append(self.array[index].size)
        return self.array[index].copy()


def case(dims: str) -> tuple[Entry, InMemory, np.ndarray]:
    entry = Entry("ours", "theirs", dims)
    shape = entry.their_shape(SIZES)
    tensor = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    return entry, InMemory(tensor), ENTRIES[dims](tensor)


@pytest.mark.parametrize("dims", ENTRIES)
@given(data=st.data())
def test_a_block_is_what_would_be_cut_from_the_whole(dims: str, data: st.DataObject) -> None:
    entry, tensor, whole = case(dims)
    block = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size))
        block.append(slice(start, data.draw(st.integers(start, size))))
    weights = Weights(entries=(entry,), sizes={"vocab": 10})
    found = read_block(weights, entry, tensor, whole.shape, tuple(block), np.float32)
    np.testing.assert_array_equal(found, whole[tuple(block)])


@pytest.mark.parametrize("dims", ENTRIES)
def test_a_view_of_the_tensor_is_ours_both_ways(dims: str) -> None:
    entry, tensor, whole = case(dims)
    real = whole[tuple(slice(0, SIZES[name]) for name in dims.partition("-> ")[2].split())]
    np.testing.assert_array_equal(entry.view(tensor.array, SIZES), real)
    written = np.zeros_like(tensor.array)
    entry.view(written, SIZES)[...] = real
    assert np.count_nonzero(written) == real.size
    assert set(written[written != 0]) == set(real.flat)


@pytest.mark.parametrize(
    ("dims", "block", "most"),
    [
        ("mlp embed -> embed mlp", (slice(0, 3), slice(0, 5)), 15),  # columns
        ("mlp embed -> embed mlp", (slice(0, 6), slice(2, 3)), 6),  # a row
        ("(heads head_dim) embed -> embed heads head_dim", (slice(0, 6), slice(1, 2), slice(0, 2)), 12),  # a head
        ("(heads head_dim) embed -> embed heads head_dim", (slice(0, 6), slice(1, 2), slice(1, 2)), 6),  # half of it
        ("embed (1/3 heads head_dim) -> embed heads head_dim", (slice(0, 6), slice(2, 4), slice(0, 2)), 24),
        ("vocab embed -> vocab embed", (slice(9, 12), slice(0, 6)), 6),  # the rest is padding
    ],
)
def test_no_more_is_read_than_the_block_spans(dims: str, block: tuple[slice, ...], most: int) -> None:
    entry, tensor, whole = case(dims)
    read_block(Weights(entries=(entry,), sizes={"vocab": 10}), entry, tensor, whole.shape, block, np.float32)
    assert tensor.seen == [most]
