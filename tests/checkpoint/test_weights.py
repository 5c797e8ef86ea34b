"""Weights written on one mesh are read on another, and a file that does not fit is one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.checkpoint.weights import load_weights, save_weights
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import Training, build
from tests.conformance.runs import BATCH, LLAMA, SEQ, model_of


def training_of(mesh: str, config: Any = LLAMA, **policy: Any) -> Training:
    plan = Plan(mesh=MeshSpec.parse(mesh), precision=Policy(**policy))
    devices = jax.devices()[: plan.mesh.product]
    return build(model_of(config), optax.sgd(0.1), plan, batch=BATCH, seq=SEQ, devices=devices)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def test_weights_go_from_mesh_to_mesh_and_to_another_dtype(tmp_path: Path) -> None:
    params = training_of("data=2 fsdp=2 tensor=2").init(0).params
    save_weights(tmp_path / "weights", params, metadata={"steps": 3})
    for target in (training_of("fsdp=4"), training_of("data=1")):
        wanted = target.abstract_state().params
        read = load_weights(tmp_path / "weights", wanted)
        assert bits(read) == bits(params)
        assert jax.tree.map(lambda leaf: leaf.sharding, read) == jax.tree.map(lambda leaf: leaf.sharding, wanted)
    half = load_weights(tmp_path / "weights", training_of("fsdp=4", storage="copy").abstract_state().params)
    assert bits(half) == bits(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    save_weights(tmp_path / "half", params, dtype="bfloat16")
    assert bits(load_weights(tmp_path / "half", training_of("data=1", storage="copy").abstract_state().params)) == bits(
        half
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "weights"]


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    params = training_of("data=1").init(0).params
    save_weights(tmp_path / "weights", params)
    wider = training_of("data=1", dataclasses.replace(LLAMA, mlp=128)).abstract_state().params
    with pytest.raises(ValueError, match=r"blocks/mlp/down/kernel is \(2, 64, 32\) in .* and \(2, 128, 32\) here"):
        load_weights(tmp_path / "weights", wider)
    normed = training_of("data=1", dataclasses.replace(LLAMA, qk_norm=True)).abstract_state().params
    with pytest.raises(ValueError, match=r"has no blocks/attention/k_norm/scale; use the model"):
        load_weights(tmp_path / "weights", normed)
    (tmp_path / "text").write_text("no weights")
    for name in ("text", "missing"):
        with pytest.raises(ValueError, match=r"cannot be read \(.*\); name a file that save_weights wrote"):
            load_weights(tmp_path / name, wider)
