"""One token after another from a cache, in a batch of unequal prompts, gives the logits of whole rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.forward import Forward
from meshpar.generate.decode import next_logits, read_prompts
from meshpar.precision.policy import Policy
from tests.conformance.runs import LLAMA, model_of
from tests.generate.runs import CONFIGS, VOCAB, params_of, plan_on, whole

ROWS, SEQ, LENGTH = 4, 12, 16
ENDS = np.array([3, 1, 12, 7], np.int32)
STEPS = 4  # the longest row ends at the last place of the cache
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)


def stepwise(config: Any, mesh: str, **plan: Any) -> np.ndarray:
    """Logits `[rows, 1 + STEPS, vocab]` after each prompt and after each of the tokens that follow it in `TOKENS`.

    A prompt is padded with other tokens than those that follow it.
    """
    made, built = plan_on(mesh, **plan)
    forward = Forward(model_of(config), made, built)
    read = jax.jit(functools.partial(read_prompts, forward, length=LENGTH))
    follow = jax.jit(functools.partial(next_logits, forward), donate_argnums=3)
    params = params_of(config)
    padded = np.where(np.arange(SEQ) < ENDS[:, None], TOKENS[:, :SEQ], VOCAB - 1)
    logits, caches = read(params, padded, ENDS)
    found = [logits]
    for step in range(STEPS):
        at = ENDS + step
        logits, caches = follow(params, TOKENS[np.arange(ROWS), at], at, caches)
        found.append(logits)
    stacked = np.stack([np.asarray(x) for x in found], axis=1)
    assert np.all(np.isneginf(stacked[..., VOCAB:]))  # the padding of the vocabulary
    return stacked[..., :VOCAB]


def expected(config: Any) -> np.ndarray:
    at = ENDS[:, None] - 1 + np.arange(1 + STEPS)
    return np.take_along_axis(whole(config, TOKENS), at[..., None], axis=1)


@pytest.mark.parametrize(
    "family, mesh, plan",
    [
        ("llama", "data=1", {}),
        ("llama", "data=1", {"unroll": 0, "attention": "reference"}),
        ("llama", "data=2 tensor=2", {}),
        ("llama", "fsdp=4", {}),
        ("llama", "tensor=4", {}),  # kv heads are fewer
        ("llama", "data=2 tensor=4", {"sequence_parallel": True, "remat": "full"}),
        ("llama", "data=2 fsdp=2", {"rules": {"batch": ("data",), "seq": ("fsdp",)}, "zero": 0}),
        ("mistral", "data=1", {}),
        ("mistral", "data=2 tensor=2", {"unroll": 2}),
        ("gpt", "data=1", {}),
        ("gpt", "fsdp=2 tensor=4", {"sequence_parallel": True}),
        ("own", "data=1", {}),
        ("own", "fsdp=2 tensor=4", {}),
    ],
)
def test_decoding_with_a_cache_is_the_forward_of_whole_rows(family: str, mesh: str, plan: dict[str, Any]) -> None:
    """To 1e-5 in fp32: the sums are the same up to their order, over some tens of terms of size 1."""
    found, wanted = stepwise(CONFIGS[family], mesh, **plan), expected(CONFIGS[family])
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_a_cache_is_in_the_compute_dtype_and_split_over_rows_and_kv_heads() -> None:
    made, built = plan_on("data=2 tensor=2", precision=Policy(compute="bf16"))
    read = jax.jit(functools.partial(read_prompts, Forward(model_of(LLAMA), made, built), length=LENGTH))
    _, (cache,) = read(params_of(LLAMA), TOKENS[:, :SEQ], ENDS)
    for x in (cache.k, cache.v):
        assert x.dtype == jnp.bfloat16
        assert x.shape == (LLAMA.layers, ROWS, LENGTH, LLAMA.kv_heads, LLAMA.head_size)
        assert x.addressable_shards[0].data.shape == (LLAMA.layers, ROWS // 2, LENGTH, 1, LLAMA.head_size)


def test_a_step_of_decode_moves_no_cache_between_devices() -> None:
    made, built = plan_on("data=2 tensor=2")
    forward, length = Forward(model_of(LLAMA), made, built), 1023  # a size that nothing else has
    read = jax.jit(functools.partial(read_prompts, forward, length=length))
    follow = jax.jit(functools.partial(next_logits, forward), donate_argnums=3)
    _, caches = read(params_of(LLAMA), TOKENS[:, :SEQ], ENDS)
    compiled = follow.lower(params_of(LLAMA), ENDS, ENDS, caches).compile()
    text = compiled.as_text()
    kinds = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")
    collectives = [line for line in text.splitlines() if any(f" {kind}(" in line for kind in kinds)]
    assert collectives
    assert [line for line in collectives if str(length) in line] == []
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(caches))
    assert compiled.memory_analysis().alias_size_in_bytes >= held  # and written in place


def test_attention_of_ones_own_is_refused_since_there_is_nothing_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    made, built = plan_on("data=1")
    monkeypatch.setattr("models.nn.attention.attend", lambda q, k, v, **options: q)
    forward = Forward(model_of(LLAMA), made, built)
    with pytest.raises(ValueError, match="the blocks of Llama never call attend"):
        jax.eval_shape(functools.partial(read_prompts, forward, length=LENGTH), params_of(LLAMA), TOKENS, ENDS)
