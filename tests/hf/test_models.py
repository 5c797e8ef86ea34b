"""Models of transformers give the same logits and gradients here, on any mesh, and are written back byte for byte."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from meshpar.hf.folder import open_hf, save_hf
from meshpar.hf.mapping import load as load_tensors
from meshpar.hf.safetensors import read_file
from meshpar.hf.values import Values
from meshpar.interfaces import Batch
from meshpar.module import abstract
from meshpar.testing.compare import assert_trees_close
from meshpar.train.build import build
from meshpar.train.step import Objective
from models.nn.rope import frequencies
from models.nn.rope_hf import read_rope
from tests.conformance.runs import recording_sgd
from tests.hf.fixtures import FOLDER, NAMES, load, loaded, logits, outputs

OF_EACH_KIND = ("gpt2", "llama_tied", "qwen3", "gemma2", "gemma3")  # the others differ from these in rope, bias, window
FREQUENCIES: dict[str, Any] = json.loads((FOLDER / "frequencies.json").read_text())


def test_every_architecture_has_a_fixture() -> None:
    kinds = {json.loads((FOLDER / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert kinds == {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"}


# fp32 sums of 32 products in another order; the logits are of the order of 1
@pytest.mark.parametrize("mesh", [pytest.param("data=1", marks=pytest.mark.slow), "data=2 tensor=2"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, mesh: str) -> None:
    expected = outputs(name)
    found = logits(loaded(name, mesh), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)


# c47: a wrong scale or a term left out may hardly move logits, and gradients many times over
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OF_EACH_KIND)) for n in NAMES])
def test_gradients_are_those_of_transformers(name: str) -> None:
    tokens = outputs(name)["tokens"]
    source, ours = open_hf(FOLDER / name), loaded(name, "data=2 tensor=2")
    config = dataclasses.replace(ours.config, dropout=0.0) if name == "gpt2" else ours.config
    training = build(
        abstract(config.build, config),
        recording_sgd(0.1),
        ours.plan,
        batch=len(tokens),
        seq=tokens.shape[1],
        objective=Objective(clip_norm=None),
        devices=list(ours.mesh.devices.flat),
    )
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    batch = Batch(tokens=tokens, targets=np.roll(tokens, -1, axis=1), weights=weights)
    state, _ = training.step(training.start(source.load(training.abstract_weights())), training.place(batch))
    theirs = load_tensors(
        source.weights, read_file(FOLDER / name / "gradients.safetensors"), jax.tree.map(describe, state.opt_state)
    )
    assert_trees_close(jax.device_get(state.opt_state), jax.device_get(theirs))


def describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


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
