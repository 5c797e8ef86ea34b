"""Cases that the tests of the checker share, on random tokens, and one checker that keeps their references."""

from __future__ import annotations

import functools
from typing import Any

from meshpar.check.case import Case
from meshpar.check.invariance import Checker
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.data import DataConfig
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.run import Recipe, RunConfig
from models.gpt import GPTConfig
from models.llama import LlamaConfig

LLAMA = LlamaConfig(vocab=97, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_seq=32, init_std=0.1)
GPT = GPTConfig(vocab=97, layers=2, embed=32, heads=4, max_seq=32, init_std=0.1)


def recipe(model: Any = LLAMA, source: str = "none") -> Recipe:
    """A micro recipe; `source` is read only where a case wants the recipe's own text."""
    return Recipe(
        model=model,
        plan=Plan(precision=Policy(compute="fp32")),
        data=DataConfig(source=source, tokenizer="bytes", seq=16),
        optimizer=OptimizerConfig(lr=3e-3, warmup=2),
        train=RunConfig(steps=20, batch=16),
    )


def case(mesh: str, model: Any = LLAMA, **fields: Any) -> Case:
    """A case of the micro recipe on random tokens."""
    base = recipe(model)
    return Case(**{"name": "micro", "base": base, "mesh": MeshSpec.parse(mesh), "random_data": True, **fields})


@functools.cache
def checker() -> Checker:
    """One for all tests: references are made once."""
    return Checker()
