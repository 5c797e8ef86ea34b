"""Unigram and bigram baselines: what a model must beat before its loss says anything about attention.

Both are fit on the training tokens and scored on the validation tokens in nats per token, over the same targets as a
model that reads windows (`rows.py`): every token but the first, document separators included.

- unigram: add-one smoothing, p(b) = (c(b) + 1) / (N + V).
- bigram: p(b | a) = (c(a, b) + k · p(b)) / (c(a) + k): interpolated with the unigram, whose weight k / (c(a) + k)
  shrinks with the count of the context. k is the best of a grid on the last tenth of the *training* tokens, with counts
  of the first nine tenths; then the counts are taken over all of them. Validation tokens choose nothing.

Source: MacKay and Peto 1995, "A hierarchical Dirichlet language model".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_STRENGTHS = tuple(float(2**i) for i in range(-2, 15))  # the grid for k, in tokens


def unigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """Cross-entropy of the unigram model on `validation[1:]`, in nats per token.

    Args:
      train, validation: integer ids `[tokens]`, each below vocab; at least 2 of each.
      vocab: number of ids.
    Raises:
      ValueError: fewer than 2 tokens on either side.
    """
    _check(train, validation)
    return float(-np.log(_unigram(train, vocab)[validation[1:]]).mean())


def bigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """Cross-entropy of the smoothed bigram model on `validation[1:]` given `validation[:-1]`, in nats per token.

    Args, Raises: as in `unigram_loss`. Counts are sparse: memory follows the number of tokens, not vocab².
    """
    _check(train, validation)
    cut = max(len(train) - max(len(train) // 10, 1), 1)  # a held-out token needs its predecessor, which is counted
    fitted, held_out = _Counts.of(train[:cut], vocab), train[cut - 1 :]
    looked_up = fitted.look_up(held_out)
    strength = min(_STRENGTHS, key=lambda k: _loss(looked_up, k))
    return _loss(_Counts.of(train, vocab).look_up(validation), strength)


@dataclass(frozen=True, kw_only=True)
class _Counts:
    unigram: np.ndarray  # float64 [vocab]: p(b)
    context: np.ndarray  # int64 [vocab]: c(a), as a first token of a pair
    pairs: np.ndarray  # int64 [distinct pairs], sorted: a * vocab + b
    counts: np.ndarray  # int64 [distinct pairs]
    vocab: int

    @classmethod
    def of(cls, tokens: np.ndarray, vocab: int) -> _Counts:
        pairs, counts = np.unique(_pairs(tokens, vocab), return_counts=True)
        context = np.bincount(tokens[:-1], minlength=vocab)
        return cls(unigram=_unigram(tokens, vocab), context=context, pairs=pairs, counts=counts, vocab=vocab)

    def look_up(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """c(a, b), c(a) and p(b) of each pair of neighbours."""
        asked = _pairs(tokens, self.vocab)
        place = np.searchsorted(self.pairs, asked)
        place[place == len(self.pairs)] = 0
        joint = np.zeros(len(asked), np.int64)
        if len(self.pairs):
            joint = np.where(self.pairs[place] == asked, self.counts[place], 0)
        return joint, self.context[tokens[:-1]], self.unigram[tokens[1:]]


def _loss(looked_up: tuple[np.ndarray, np.ndarray, np.ndarray], strength: float) -> float:
    joint, context, unigram = looked_up
    return float(-np.log((joint + strength * unigram) / (context + strength)).mean())


def _unigram(tokens: np.ndarray, vocab: int) -> np.ndarray:
    return (np.bincount(tokens, minlength=vocab) + 1) / (len(tokens) + vocab)


def _pairs(tokens: np.ndarray, vocab: int) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * vocab + tokens[1:]


def _check(train: np.ndarray, validation: np.ndarray) -> None:
    for name, tokens in (("train", train), ("validation", validation)):
        if len(tokens) < 2:
            raise ValueError(f"{name} has {len(tokens)} tokens and a pair needs 2; use more text")
