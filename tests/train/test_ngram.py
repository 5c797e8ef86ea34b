"""The n-gram baselines are probabilities, learn what they can learn, and choose nothing by validation."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from meshpar.train import ngram
from meshpar.train.corpus import find_corpus
from meshpar.train.ngram import bigram_loss, unigram_loss
from meshpar.train.tokenizer import ByteTokenizer


def random_tokens(count: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.uint16)


def test_unigram_equals_the_formula_by_hand() -> None:
    train, validation = np.array([0, 0, 0, 1], np.uint16), np.array([1, 0, 2], np.uint16)
    # add-one over 3 ids: p = 4/7, 2/7, 1/7; the first validation token is no target
    assert unigram_loss(train, validation, 3) == pytest.approx(-(math.log(4 / 7) + math.log(1 / 7)) / 2)


def test_bigram_equals_the_formula_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_STRENGTHS", (2.0,))
    train, validation = np.array([0, 1, 0, 1, 0, 0], np.uint16), np.array([0, 1, 1], np.uint16)
    # p(1) = 3/8; pair (0, 1) was seen 2 of 3 times, context 1 was seen twice and never before 1
    expected = -(math.log((2 + 2 * 3 / 8) / (3 + 2)) + math.log((0 + 2 * 3 / 8) / (2 + 2))) / 2
    assert bigram_loss(train, validation, 2) == pytest.approx(expected)


def test_both_are_distributions_over_the_vocabulary() -> None:
    vocab, train = 7, random_tokens(200, 5)  # two ids are never seen
    for context in range(vocab):
        following = [np.array([context, b], np.uint16) for b in range(vocab)]
        for loss in (unigram_loss, bigram_loss):
            assert sum(math.exp(-loss(train, pair, vocab)) for pair in following) == pytest.approx(1, abs=1e-12)


def test_bigram_finds_a_cycle_that_unigram_cannot() -> None:
    cycle = np.tile(np.arange(16, dtype=np.uint16), 200)
    assert unigram_loss(cycle, cycle[:320], 16) == pytest.approx(math.log(16), rel=1e-2)
    assert bigram_loss(cycle, cycle[:320], 16) < 0.01


def test_smoothing_costs_nothing_on_noise() -> None:
    train, validation = random_tokens(20_000, 64), random_tokens(5_000, 64, seed=1)
    assert bigram_loss(train, validation, 64) == pytest.approx(math.log(64), rel=5e-3)


def test_bigram_beats_unigram_on_real_text() -> None:
    tokenizer = ByteTokenizer()
    corpus = find_corpus("stdlib")
    texts = list(corpus.read(corpus.files[:60]))
    train, validation = (np.concatenate(tokenizer.encode_documents(part)) for part in (texts[6:], texts[:6]))
    unigram, bigram = (loss(train, validation, tokenizer.vocab) for loss in (unigram_loss, bigram_loss))
    assert bigram < 0.85 * unigram < unigram < math.log(tokenizer.vocab)


def test_three_million_tokens_of_4096_ids_take_seconds() -> None:
    train = (np.random.default_rng(0).zipf(1.3, 3_000_000) % 4096).astype(np.uint16)
    begin = time.process_time()
    bigram_loss(train, train[:150_000], 4096)
    assert time.process_time() - begin < 5  # under 1 on an idle core; a dense table or a Python loop takes far longer


def test_fewer_than_two_tokens_are_refused() -> None:
    for train, validation, name in ((1, 9, "train"), (9, 1, "validation")):
        with pytest.raises(ValueError, match=f"{name} has 1 tokens"):
            bigram_loss(random_tokens(train, 4), random_tokens(validation, 4), 4)
