"""Rotary position embedding and its extensions to longer contexts.

Pairs (i, i + head_dim/2) of a head turn by position * frequency_i (half-split order, as Hugging Face's weights expect).
Tables are fp32.
Sources: RoPE, Su et al. 2021; linear, Chen et al. 2023; YaRN, Peng et al. 2023, section 3; llama3, the rule of Llama
  3.1's release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies change for contexts beyond the trained one; `factor` is new length over `original_seq`."""

    kind: Kind = "none"
    factor: float = 1.0
    original_seq: int = 8192
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_seq / low are slowed by the whole factor
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_seq / high are left alone
    beta_fast: float = 32.0  # yarn: dims that turn more often than this over original_seq are left alone
    beta_slow: float = 1.0  # yarn: dims that turn less often than this are slowed by the whole factor
    attention_factor: float | None = None  # yarn: scale of the tables; None is 0.1 ln(factor) + 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"rope scaling kind={self.kind!r} is not one of {', '.join(get_args(Kind))}; choose one of them"
            )
        if self.factor < 1:
            raise ValueError(f"rope scaling factor={self.factor} is below 1; give the new length over the original one")


def frequencies(head_dim: int, theta: float, scaling: RopeScaling = RopeScaling()) -> tuple[np.ndarray, float]:
    """Radians a position for each pair, float64 `[head_dim/2]`, and the factor that cos and sin are multiplied by."""
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.kind == "linear":
        return freq / scaling.factor, 1.0
    if scaling.kind == "llama3":
        turns = scaling.original_seq * freq / (2 * math.pi)  # over the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return freq * (kept + (1 - kept) / scaling.factor), 1.0
    if scaling.kind == "yarn":

        def dim_that_turns(times: float) -> float:
            return head_dim * math.log(scaling.original_seq / (times * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(dim_that_turns(scaling.beta_fast)), 0)
        last = min(math.ceil(dim_that_turns(scaling.beta_slow)), head_dim - 1)
        slowed = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
        factor = scaling.attention_factor
        return freq * ((1 - slowed) + slowed / scaling.factor), 0.1 * math.log(
            scaling.factor
        ) + 1.0 if factor is None else factor
    return freq, 1.0


def tables(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling = RopeScaling()
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, fp32 `[..., seq, head_dim/2]`, for int32 positions `[..., seq]`."""
    freq, factor = frequencies(head_dim, theta, scaling)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(freq, jnp.float32)
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`x` `[batch, seq, heads, head_dim]` turned by the tables `[batch or 1, seq, head_dim/2]`; fp32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
