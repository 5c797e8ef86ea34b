"""How the next token is chosen: the most likely one, or drawn at a temperature from the top k or the top p.

All numbers are arguments of the compiled program, so no choice of them compiles again. A token is drawn by the
Gumbel-max trick, with noise that depends on seed, row and position alone: neither the mesh nor the other rows matter.
Sources: top-k, Fan et al. 2018; top-p, Holtzman et al. 2020, section 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How text is continued. First the temperature, then top-k, then top-p of what is left."""

    temperature: float = 0.8  # logits are divided by it; 0 takes the most likely token
    top_k: int | None = None  # draw from so many of the most likely tokens
    top_p: float = 1.0  # draw from the fewest most likely tokens whose probabilities reach this sum
    seed: int = 0  # 0 to 2^32 - 1
    stop: tuple[int, ...] = ()  # a row ends with the first of these tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", tuple(int(token) for token in self.stop))
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature={self.temperature} must be finite and at least 0; 0 takes the likeliest token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; use 1 for the likeliest token, None for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; use 1.0 for all tokens")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be at least 0 and below 2^32; choose one in between")

    def check(self, vocab: int) -> None:
        """Raises ValueError for a stop token that the model cannot produce."""
        for token in self.stop:
            if not 0 <= token < vocab:
                raise ValueError(
                    f"the stop token {token} is outside of the model's vocab={vocab}; use one of 0 to {vocab - 1}"
                )

    def arrays(self, vocab: int) -> Choice:
        """The same as arguments of a compiled program, on the host."""
        stops = np.zeros(vocab, np.bool_)
        stops[list(self.stop)] = True
        values: dict[str, Any] = {
            "temperature": np.float32(self.temperature),
            "top_k": np.int32(min(self.top_k or vocab, vocab)),
            "top_p": np.float32(self.top_p),
            "seed": np.uint32(self.seed),
            "stops": stops,
        }
        return Choice(**values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Choice:
    """A `Sampling` as arrays."""

    temperature: jax.Array  # float32 scalar
    top_k: jax.Array  # int32 scalar, the vocabulary for all
    top_p: jax.Array  # float32 scalar
    seed: jax.Array  # uint32 scalar
    stops: jax.Array  # bool [vocab]


def choose(logits: jax.Array, positions: jax.Array, choice: Choice) -> jax.Array:
    """The next token of each row, int32 `[rows]`.

    Args:
      logits: fp32 `[rows, vocab]`, -inf for what must not be chosen.
      positions: int32 `[rows]`, where the token will stand.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / choice.temperature  # never above 0: no overflow
        cuts = (choice.top_k < choice.stops.shape[0]) | (choice.top_p < 1)
        kept = jax.lax.cond(cuts, lambda: keep_top(scaled, choice.top_k, choice.top_p), lambda: scaled)
        return jnp.argmax(kept + _noise(kept.shape, positions, choice.seed), axis=-1).astype(jnp.int32)

    return jax.lax.cond(choice.temperature > 0, draw, lambda: greedy)


def keep_top(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """`logits` fp32 `[rows, vocab]` with -inf for all but the `top_k` largest, and of those for all but the fewest
    whose probabilities, renormalised, sum up to `top_p`. Tokens as likely as the last one that is kept are kept too.
    """
    ranked = -jnp.sort(-logits, axis=-1)
    places = jnp.arange(ranked.shape[-1])
    probabilities = jax.nn.softmax(jnp.where(places < top_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    last = jnp.sum((before < top_p) & (places < top_k), axis=-1, keepdims=True) - 1
    return jnp.where(logits >= jnp.take_along_axis(ranked, last, axis=-1), logits, -jnp.inf)


def _noise(shape: tuple[int, ...], positions: jax.Array, seed: jax.Array) -> jax.Array:
    """Gumbel noise fp32 `[rows, vocab]`, each row from a key of its own."""
    key = jax.random.key(seed)

    def of_row(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, row), position), shape[1:], jnp.float32)

    return jax.vmap(of_row)(jnp.arange(shape[0]), positions)
