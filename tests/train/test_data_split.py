"""Documents are split by a hash of their text, without a leak and within the fraction; repeats are dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.train.corpus import Corpus
from meshpar.train.split import Survey, choose, cut_in_two, documents, survey

texts = st.lists(st.text("aé漢\n", min_size=2, max_size=20).filter(str.strip), min_size=1, max_size=12, unique=True)


def surveyed(content: Sequence[str], fraction: float) -> Survey:
    return survey(Corpus(name="mine", version="", files=(), read=lambda files: iter(content)), fraction)


def split(content: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    found = list(documents(surveyed(content, fraction)))
    return [text for text, held_out in found if not held_out], [text for text, held_out in found if held_out]


def size(content: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in content)


@given(content=texts, fraction=st.floats(0.01, 0.9))
def test_every_document_is_on_one_side_and_at_most_one_is_cut_in_two(content: list[str], fraction: float) -> None:
    train, validation = split(content, fraction)
    assert train and validation
    found = surveyed(content, fraction)
    expected: tuple[list[str], list[str]] = ([], [])
    for i, text in enumerate(content):
        if i != found.cut:
            expected[int(found.validation[i])].append(text)
        else:
            head, tail = train[len(expected[0])], validation[len(expected[1])]
            assert head + tail == text and head and tail
            expected[0].append(head)
            expected[1].append(tail)
    assert (train, validation) == expected


@given(
    content=st.lists(st.text("ab\n", min_size=40, max_size=90).filter(str.strip), min_size=1, max_size=9, unique=True)
)
def test_validation_stays_within_the_fraction_and_is_never_far_below(content: list[str]) -> None:
    train, validation = split(content, 0.3)
    assert 0.3 * size(content) / 4 - 2 <= size(validation) <= 0.3 * size(content) + 1
    assert size(train) + size(validation) == size(content)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=40), fraction=st.floats(0.01, 0.95), data=st.data())
def test_documents_are_taken_one_by_one_as_they_fit(sizes: list[int], fraction: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    left, expected = fraction * sum(sizes), set()
    for i in order:
        if sizes[i] <= left:
            expected.add(i)
            left -= sizes[i]
    chosen, cut, tail = choose(np.array(order), np.array(sizes), fraction)
    assert set(np.flatnonzero(chosen)) == expected
    assert (cut >= 0) == (left > fraction * sum(sizes) / 2)
    if cut >= 0:
        assert cut not in expected and sizes[cut] == max(size for i, size in enumerate(sizes) if i not in expected)
        assert tail * sizes[cut] == pytest.approx(left)


def test_a_document_that_fits_exactly_is_taken() -> None:
    chosen, cut, _ = choose(np.array([1, 0, 2]), np.array([2, 6, 12]), 0.5)
    assert (chosen.tolist(), cut) == ([True, True, False], -1)


@given(content=texts, data=st.data())
def test_the_split_does_not_depend_on_the_order_of_documents(content: list[str], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(content))
    found, other = surveyed(content, 0.3), surveyed(shuffled, 0.3)
    held_out = {text for text, one in zip(content, found.validation, strict=True) if one}
    assert held_out == {text for text, one in zip(shuffled, other.validation, strict=True) if one}
    assert found.cut < 0 or content[found.cut] == shuffled[other.cut]
    order = [text for text, _ in documents(found) if text in content]
    assert order == [text for text in content if text in order]  # both sides keep the order of the corpus


def test_repeats_and_blanks_are_dropped_and_the_first_stays() -> None:
    content = ["two", " \n", "one", "two", "", "three", "one"]
    found = surveyed(content, 0.4)
    assert found.kept.tolist() == [True, True, False, True, False]
    assert sorted(text for text, _ in documents(found)) == ["one", "three", "two"]
    assert found.size == 11


def test_the_identity_changes_with_text_order_and_split() -> None:
    content = [f"document {i}" for i in range(20)]
    same = surveyed([*content, content[0], " "], 0.2).identity()  # what is dropped decides nothing
    assert same == surveyed(content, 0.2).identity()
    others = [(content[::-1], 0.2), (content, 0.5), (content[1:], 0.2), (["documents 0", *content[1:]], 0.2)]
    assert len({same, *(surveyed(*other).identity() for other in others)}) == 5


def test_a_single_document_is_cut_at_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    (train,), (validation,) = split([text], 0.1)
    assert train + validation == text
    assert train.endswith("\n")
    assert 0.05 * len(text) < len(validation) <= 0.1 * len(text)
    assert cut_in_two("ab", 0.5) == ("a", "b")
    assert cut_in_two("abcdefgh", 0.25) == ("abcdef", "gh")
    with pytest.raises(ValueError, match="the longest document is 'a', and 1 character cannot be split in two"):
        split(["a"], 0.5)


def test_of_two_long_documents_the_longer_one_is_cut() -> None:
    short, long = "".join(f"{i}\n" for i in range(1000)), "".join(f"{i}\n" for i in range(2000))
    train, (validation,) = split([long, short], 0.05)
    assert train[1] == short and train[0] + validation == long
    assert 0.02 * len(short + long) < len(validation) <= 0.05 * len(short + long)


def test_only_blank_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"source='mine' holds only blank text \(0 files\)"):
        surveyed([" \n", ""], 0.1)


def test_bytes_are_reported_while_a_corpus_is_read() -> None:
    seen: list[int] = []
    corpus = Corpus(name="mine", version="", files=(), read=lambda files: iter(["é", "ab"]))
    survey(corpus, 0.5, seen.append)
    assert seen == [2, 4]
