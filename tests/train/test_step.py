"""What a step refuses, what it keeps for its backward, and how near bf16 gradients are to fp32 ones."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.interfaces import Batch
from meshpar.module import abstract, stack
from meshpar.precision.policy import Policy
from meshpar.train.step import Objective, checksum
from tests.conformance.runs import GPT, LLAMA, batch_of, train

# Sizes that occur nowhere else, so that a stack of whole kernels is known by its shape in a program's text.
WIDE = dataclasses.replace(LLAMA, layers=3, mlp=72)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"clip_norm": -1.0}, "objective.clip_norm=-1.0 must be above 0"),
        ({"clip_norm": 0.0}, "objective.clip_norm=0.0 must be above 0"),
        ({"clip_norm": float("nan")}, "objective.clip_norm=nan must be above 0"),
        ({"z_loss": -1.0}, "objective.z_loss=-1.0 must not be negative"),
        ({"label_smoothing": 1.0}, "objective.label_smoothing=1.0 must be at least 0 and below 1"),
    ],
)
def test_an_objective_that_cannot_train_is_refused(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Objective(**values)


class _Named(nnx.Module):
    """A model whose block returns an auxiliary loss of the class's name."""

    name = "loss"

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.ones((8, 4)), axes=("vocab", "embed"))
        self.blocks = stack(lambda rngs: _Nothing(), 1, rngs)

    def embed(self, batch: Batch, key: jax.Array | None) -> jax.Array:
        return self.table[...][batch.tokens]

    def block(self, block: Any, x: jax.Array, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, dict]:
        return x, {self.name: jnp.zeros(())}

    def head(self, x: jax.Array) -> jax.Array:
        return x @ self.table[...].T


class _Nothing(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones((4,)), axes=("embed",))


@dataclasses.dataclass(frozen=True)
class _Config:
    name: str
    vocab: int = 8

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        model = _Named(rngs)
        model.name = self.name
        return model


@pytest.mark.parametrize("name", ["loss", "tokens", "nll", "z", "grad_norm"])
def test_an_auxiliary_loss_cannot_replace_a_metric(name: str) -> None:
    config = _Config(name)
    batch = Batch(
        tokens=np.zeros((1, 4), np.int32), targets=np.zeros((1, 4), np.int32), weights=np.ones((1, 4), np.float32)
    )
    assert abstract(config.build, config).size == 36
    with pytest.raises(ValueError, match=f"auxiliary loss called '{name}', which is a metric of every step"):
        train("data=1", config=config, batches=[batch])


@pytest.mark.parametrize("unroll", [1, 0], ids=["loop", "asked to write out"])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_zero_3_gathers_the_weights_of_a_layer_again_and_keeps_none(unroll: int, compute: str) -> None:
    run = train("fsdp=4", config=WIDE, steps=1, unroll=unroll, precision=Policy(compute=compute))  # type: ignore[arg-type]
    text = run.training.compile().as_text()
    kernels = 7
    assert len(re.findall(r" all-gather\(", text)) >= 2 * kernels
    assert not re.findall(rf"\[{WIDE.layers},(?:32,72|72,32)\]", text)


def test_full_rematerialisation_of_layers_gathers_as_often() -> None:
    counts = [
        len(re.findall(r" all-gather\(", train("fsdp=4", config=WIDE, steps=1, **plan).training.compile().as_text()))
        for plan in ({}, {"remat": "full"})
    ]
    assert counts[0] <= counts[1]


@pytest.mark.parametrize("config", [LLAMA, GPT, dataclasses.replace(LLAMA, tied=True)], ids=["llama", "gpt", "tied"])
@pytest.mark.parametrize("plan", [{}, {"loss_chunk": 1}], ids=["whole", "in pieces"])
def test_bf16_gradients_are_near_fp32_ones_also_for_a_token_that_is_half_of_the_text(
    config: Any, plan: dict[str, Any]
) -> None:
    batch = batch_of(0, packed=True, batch=32, seq=64)
    tokens = np.where(np.random.default_rng(1).random(batch.tokens.shape) < 0.5, 5, batch.tokens)
    batch = dataclasses.replace(batch, tokens=tokens)
    exact = train("data=1", config=config, batches=[batch]).gradients
    half = train("data=1", config=config, batches=[batch], precision=Policy(compute="bf16"), **plan).gradients

    whole = float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(exact))))

    def error(a: np.ndarray, b: np.ndarray) -> float:
        if np.linalg.norm(b) < 1e-4 * whole:  # a key's bias has no gradient in exact arithmetic
            return 0.0
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    errors = jax.tree.map(error, half, exact)
    assert 0 < max(jax.tree.leaves(errors)) < 0.025, errors
    assert error(half["embedding"]["table"][5], exact["embedding"]["table"][5]) < 0.025


def test_the_checksum_tells_tokens_and_their_places_apart_and_no_split() -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, (8, 16), dtype=np.int32)
    one = int(checksum(jnp.asarray(tokens)))
    swapped = tokens[[1, 0, *range(2, 8)]]
    changed = tokens.copy()
    changed[3, 4] += 1
    assert len({one, int(checksum(jnp.asarray(swapped))), int(checksum(jnp.asarray(changed)))}) == 3
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    split = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data", "tensor")))
    assert int(jax.jit(checksum)(split)) == one
