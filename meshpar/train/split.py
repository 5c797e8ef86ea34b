"""Which documents are kept, and which of them are never trained on: decided from hashes and sizes.

A corpus is read more than once and never held: the first reading keeps 24 bytes a document, from which `survey` drops
repeats (the first one stays) and draws the split; `documents` reads again and says of each document where it goes.

The split is by whole documents, which are visited in the order of a hash of their text, so the choice does not depend
on where they stand. Each goes to validation if validation stays within its fraction of the bytes. Where that leaves
more than half of the fraction open (few documents, or one), the longest document that is trained on is cut in two, and
its end fills the rest.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from meshpar.train.corpus import Corpus

_DIGEST = 16  # bytes of a document's SHA-256: two of a billion documents agree by chance once in 10^20


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one reading of a corpus found. Documents are numbered as they are read, blank ones left out."""

    corpus: Corpus
    digests: np.ndarray  # uint8 [documents, 16]
    kept: np.ndarray  # bool [documents]: False for a repeat
    validation: np.ndarray  # bool [documents]
    cut: int  # the document whose end goes to validation; -1: none
    tail: float  # how much of it, in (0, 1)
    size: int  # bytes of all kept documents

    def identity(self) -> str:
        """Hash of the kept documents, their order and their split."""
        kept = self.kept
        digest = hashlib.sha256(self.digests[kept].tobytes())
        digest.update(np.packbits(self.validation[kept]).tobytes())
        digest.update(f"{self.digests[self.cut].tobytes().hex()} {self.tail!r}".encode() if self.cut >= 0 else b"")
        return digest.hexdigest()


def survey(corpus: Corpus, fraction: float, report: Callable[[int], None] = lambda size: None) -> Survey:
    """Reads a corpus once.

    Args:
      corpus: see `corpus.find_corpus`.
      fraction: upper bound of the validation share of the bytes, in (0, 1).
      report: is told the bytes of text so far.
    Raises:
      ValueError: there is no text, or a file cannot be read.
    """
    digests, sizes, total = bytearray(), array.array("q"), 0
    for text in _texts(corpus):
        data = text.encode()
        digests += _digest(data)
        sizes.append(len(data))
        total += len(data)
        report(total)
    if not sizes:
        count = len(corpus.files)
        raise ValueError(f"source={corpus.name!r} holds only blank text ({count} files); use one with text")
    table, lengths = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST), np.frombuffer(sizes, np.int64)
    words = table.view(">u8")
    order = np.lexsort((words[:, 1], words[:, 0]))  # by digest; stable, so of equal ones the first read is first
    first = np.append(True, (words[order[1:]] != words[order[:-1]]).any(1))
    order = order[first]
    kept = np.zeros(len(table), bool)
    kept[order] = True
    validation, cut, tail = choose(order, lengths, fraction)
    return Survey(
        corpus=corpus,
        digests=table,
        kept=kept,
        validation=validation,
        cut=cut,
        tail=tail,
        size=int(lengths[kept].sum()),
    )


def choose(order: np.ndarray, sizes: np.ndarray, fraction: float) -> tuple[np.ndarray, int, float]:
    """The split of documents by their sizes.

    Args:
      order: int [kept documents], in which they are visited.
      sizes: int64 [documents], in bytes, at least 1.
      fraction: upper bound of the validation share of the bytes.
    Returns:
      bool [documents], True in validation; the document to cut, -1 for none; how much of its end to cut off.
    """
    wanted = left = fraction * float(sizes[order].sum())
    chosen = np.zeros(len(sizes), bool)
    remaining = order
    while len(remaining := remaining[sizes[remaining] <= left]):
        ends = np.cumsum(sizes[remaining])
        fit = int(np.searchsorted(ends, left, side="right"))
        chosen[remaining[:fit]] = True
        left -= float(ends[fit - 1])
        remaining = remaining[fit + 1 :]  # the one at `fit` is larger than what is left
    if left <= wanted / 2:
        return chosen, -1, 0.0
    trained = order[~chosen[order]]
    cut = int(trained[np.argmax(sizes[trained])])
    return chosen, cut, left / float(sizes[cut])


def documents(found: Survey) -> Iterator[tuple[str, bool]]:
    """Reads the corpus again: each kept document, or part of one, and whether it is of validation.

    Raises:
      ValueError: the text is not what the survey found, or one character would have to be cut in two.
    """
    count = 0
    for text in _texts(found.corpus):
        if count == len(found.kept) or _digest(text.encode()) != found.digests[count].tobytes():
            raise ValueError(_changed(found))
        if count == found.cut:
            head, tail = cut_in_two(text, found.tail)
            yield head, False
            yield tail, True
        elif found.kept[count]:
            yield text, bool(found.validation[count])
        count += 1
    if count < len(found.kept):
        raise ValueError(_changed(found))


def cut_in_two(text: str, tail: float) -> tuple[str, str]:
    """A text before and after the beginning of its last `tail`, or after the line that ends in the half behind it.

    Raises:
      ValueError: it has fewer than 2 characters.
    """
    if len(text) < 2:
        raise ValueError(f"the longest document is {text!r}, and 1 character cannot be split in two; use more text")
    begin = min(max(int(len(text) * (1 - tail)), 1), len(text) - 1)
    cut = text.find("\n", begin, begin + (len(text) - begin) // 2) + 1 or begin
    return text[:cut], text[cut:]


def _texts(corpus: Corpus) -> Iterator[str]:
    return (text for text in corpus.read(corpus.files) if text and not text.isspace())


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST]


def _changed(found: Survey) -> str:
    return f"source={found.corpus.name!r} changed while it was read; run again when nothing writes to it"
