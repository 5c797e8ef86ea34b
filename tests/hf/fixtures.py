"""The models of transformers in tests/fixtures/hf, and what ours makes of the same tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from meshpar.forward import Forward
from meshpar.hf.folder import Loaded, load_hf
from meshpar.interfaces import Batch
from meshpar.layout.context import placed
from meshpar.plan import Plan
from meshpar.precision.policy import Policy

FOLDER = Path(__file__).parents[1] / "fixtures" / "hf"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
FP32 = Policy(compute="fp32")


def load(path: Path, mesh: str = "data=1", **plan: Any) -> Loaded:
    return load_hf(path, Plan(**{"mesh": mesh, "precision": FP32, **plan}))


@functools.cache
def loaded(name: str, mesh: str = "data=1") -> Loaded:
    return load(FOLDER / name, mesh)


def outputs(name: str) -> dict[str, np.ndarray]:
    """Tokens `[2, 64]` and the logits of transformers `[2, 64, vocab]`, fp32."""
    return load_file(FOLDER / name / "outputs.safetensors")


def logits(loaded: Loaded, tokens: np.ndarray) -> np.ndarray:
    """Ours for the same tokens, without the padding of the vocabulary."""
    forward = Forward(loaded.model, loaded.plan, loaded.mesh)

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        with placed(loaded.plan.placement(loaded.mesh)):
            batch = Batch(tokens=tokens, targets=tokens, weights=jnp.ones(tokens.shape, jnp.float32))
            lm, x, _ = forward(params, batch, None)
            return lm.head(x)

    return np.asarray(run(loaded.params, tokens))[..., : loaded.config.vocab]
