"""What the configs of the model families refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from models.gpt import GPTConfig
from models.llama import LlamaConfig

LLAMA = LlamaConfig(vocab=90, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=32)
GPT = GPTConfig(vocab=90, layers=2, embed=32, heads=4, max_seq=32)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        *(
            (config, {name: value})
            for config in (LLAMA, GPT)
            for name in ("vocab", "layers", "embed", "heads", "max_seq", "vocab_multiple")
            for value in (0, -5, 2**31)
        ),
        *((config, {"dropout": value}) for config in (LLAMA, GPT) for value in (-1.0, 1.0)),
        *((config, {name: -1.0}) for config in (LLAMA, GPT) for name in ("norm_eps", "init_std")),
        (GPT, {"mlp": -3}),
        *((LLAMA, {name: value}) for name in ("kv_heads", "mlp", "window") for value in (0, -3, 2**31)),
        (LLAMA, {"head_dim": -2}),
        (LLAMA, {"rope_theta": 0.0}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else type(value).__name__,
)
def test_a_size_out_of_range_is_one_sentence(config: Any, change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"^model\.{name}={value} must be "):
        dataclasses.replace(config, **change)


def test_what_a_zero_or_none_means_is_kept() -> None:
    assert GPT.mlp_size == 128
    assert LLAMA.head_size == 8
    assert dataclasses.replace(LLAMA, window=1).window == 1
