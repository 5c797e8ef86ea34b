"""Sampling continues a prompt as the model itself would, under any plan that trains."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshpar.generate.sample import sample

from meshpar.interfaces import Batch
from meshpar.mesh.build import build_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from tests.conformance.runs import LLAMA, model_of

PROMPTS = [[5, 3, 7], [1], [80, 2, 2, 9, 11]]
NEW = 4
MODEL = model_of(LLAMA)


@functools.cache
def params() -> Any:
    return jax.jit(MODEL.init)(jax.random.key(3))


@jax.jit
def logits(params: Any, row: jax.Array) -> jax.Array:
    """fp32 [seq, vocab] of one row [seq], by the model alone."""
    lm, tokens = MODEL.bind(params), row[None]
    batch = Batch(tokens=tokens, targets=tokens, weights=jnp.ones(tokens.shape, jnp.float32))
    x = lm.embed(batch, None)
    for layer in range(LLAMA.layers):
        block = MODEL.bind_block(jax.tree.map(lambda w, layer=layer: w[layer], params["blocks"]))
        x, _ = lm.block(block, x, batch, None)
    return lm.head(x)[0, :, : LLAMA.vocab]


@functools.cache
def one_by_one(prompt: tuple[int, ...]) -> list[int]:
    """The most likely continuation, a whole forward for each token."""
    row = np.zeros(16, np.int32)  # what follows a token does not change its logits, so one program serves all lengths
    row[: len(prompt)] = prompt
    end = len(prompt) + NEW
    for place in range(len(prompt), end):
        row[place] = np.argmax(logits(params(), row)[place - 1])
    return row[:end].tolist()


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ("data=1", {}),
        ("data=2 fsdp=2 tensor=2", {}),
        ("tensor=4", {"sequence_parallel": True}),
        ("data=2 fsdp=2", {"rules": {"batch": ("data",), "seq": ("fsdp",)}, "zero": 0}),
        (
            "data=2 tensor=2",
            {"rules": {"batch": ("data", "tensor"), "heads": (), "kv_heads": (), "mlp": (), "vocab": ()}},
        ),
    ],
)
def test_the_most_likely_tokens_are_those_of_the_model_alone(mesh: str, plan: dict[str, Any]) -> None:
    made = Plan(mesh=MeshSpec.parse(mesh), precision=Policy(compute="fp32"), **plan)
    built = build_mesh(made.mesh, jax.devices()[: made.mesh.product])
    texts = sample(MODEL, made, built, params(), PROMPTS, new_tokens=NEW, temperature=0.0)
    assert texts == [one_by_one(tuple(prompt)) for prompt in PROMPTS]


def test_a_seed_repeats_and_padding_of_the_vocabulary_is_never_drawn() -> None:
    built = build_mesh(MeshSpec(), jax.devices()[:1])
    plan = Plan(precision=Policy(compute="fp32"))

    def draw(seed: int) -> list[list[int]]:
        return sample(MODEL, plan, built, params(), [[1]] * 16, new_tokens=8, temperature=100.0, seed=seed)

    first = draw(0)
    assert first == draw(0) != draw(1)
    assert max(map(max, first)) < LLAMA.vocab
    assert len({tuple(row) for row in first}) == 16


@pytest.mark.parametrize(
    ("prompts", "new", "sentence"), [([[1], []], 1, "a prompt is empty"), ([[1] * 60], 5, "65 tokens and the model's")]
)
def test_a_prompt_that_does_not_fit_is_refused(prompts: list[list[int]], new: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sample(MODEL, Plan(), build_mesh(MeshSpec(), jax.devices()[:1]), params(), prompts, new_tokens=new)
