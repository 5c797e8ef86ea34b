"""Models of transformers give the same logits here, on any mesh, and are the same bytes when they are written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshpar.hf.folder import save_hf
from meshpar.hf.values import Values
from models.nn.rope import frequencies
from models.nn.rope_hf import read_rope
from tests.hf.fixtures import FOLDER, NAMES, load, loaded, logits, outputs

FREQUENCIES: dict[str, Any] = json.loads((FOLDER / "frequencies.json").read_text())


def test_every_architecture_has_a_fixture() -> None:
    kinds = {json.loads((FOLDER / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert kinds == {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"}


# fp32 sums of 32 products in another order; the logits are of the order of 1
@pytest.mark.parametrize("mesh", ["data=1", "data=2 tensor=2"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, mesh: str) -> None:
    expected = outputs(name)
    found = logits(loaded(name, mesh), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_back_is_the_same_bytes(name: str, tmp_path: Path) -> None:
    ours = loaded(name, "data=2 tensor=2")
    save_hf(tmp_path / "out", ours.config, ours.params)
    before, after = (load_file(folder / "model.safetensors") for folder in (FOLDER / name, tmp_path / "out"))
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert (array.dtype, array.shape, array.tobytes()) == (
            after[key].dtype,
            after[key].shape,
            after[key].tobytes(),
        ), key
    again = load(tmp_path / "out")
    assert again.config == ours.config


# c56: one factor for all Llama 3.x is seen here
@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    case = FREQUENCIES[name]
    values = {"max_position_embeddings": 128, **case["values"]}
    found, factor = frequencies(32, *read_rope(Values(values=values, file="config.json")))
    np.testing.assert_allclose(found, case["frequencies"], rtol=1e-6)
    assert factor == pytest.approx(case["factor"], rel=1e-6)
