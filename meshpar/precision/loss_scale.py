"""Loss scaling: what fp16 gradients need, which live between 6e-8 and 65504.

The loss is multiplied before the backward and its gradients are divided in fp32 after it. Dynamic scaling halves the
scale when a gradient is not finite, skips that update, and doubles it after `period` finite steps in a row. The scale
is one replicated number; where it is a power of two, multiplying and dividing change no bit of a gradient that fits.

Source: Micikevicius et al. 2018, Mixed Precision Training, sections 3.2 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Kind = Literal["auto", "none", "static", "dynamic"]


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss is scaled, and how many skipped steps in a row end a run."""

    # auto: dynamic for fp16, none for the others. static keeps the scale and only skips; with initial=1 bf16 skips too.
    kind: Kind = "auto"
    initial: float = 2.0**16  # a few skips at the start, no long climb
    factor: float = 2.0  # of one change; powers of two round nothing
    period: int = 2000  # finite steps in a row before the scale grows
    floor: float = 1.0  # dynamic: the scale does not fall below
    ceiling: float = 2.0**24  # dynamic: the scale does not grow above
    max_skips: int = 50  # skipped steps in a row that end a run; 2^24 falls to 1 in 24

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"loss_scale.kind={self.kind!r} is not one of {', '.join(get_args(Kind))}; choose one of them"
            )
        if not 0.0 < self.floor <= self.initial <= self.ceiling < float("inf"):
            raise ValueError(
                f"loss_scale.initial={self.initial} must lie between floor={self.floor} and ceiling={self.ceiling}, "
                "all above 0; 65536 is usual"
            )
        if not 1.0 < self.factor < float("inf"):
            raise ValueError(f"loss_scale.factor={self.factor} must be above 1; 2 is usual")
        for name in ("period", "max_skips"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"loss_scale.{name}={getattr(self, name)} must be at least 1 and below 2^31")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ScaleState:
    """What scaling carries from step to step: scalars."""

    scale: jax.Array  # float32
    finite_in_a_row: jax.Array  # int32: finite steps since the scale last changed
    skipped_in_a_row: jax.Array  # int32


def initial_scale(config: LossScaling) -> ScaleState:
    """The state before the first step."""
    return ScaleState(
        scale=jnp.asarray(config.initial, jnp.float32),
        finite_in_a_row=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


def next_scale(config: LossScaling, state: ScaleState, finite: jax.Array, *, dynamic: bool) -> ScaleState:
    """The state after a step; `finite` (bool scalar) says whether its gradients all were."""
    finite_in_a_row = jnp.where(finite, state.finite_in_a_row + 1, 0)
    scale = state.scale
    if dynamic:
        grows = finite_in_a_row >= config.period
        higher = jnp.minimum(scale * config.factor, config.ceiling)
        lower = jnp.maximum(scale / config.factor, config.floor)
        scale = jnp.where(finite, jnp.where(grows, higher, scale), lower)
        finite_in_a_row = jnp.where(grows, 0, finite_in_a_row)
    return ScaleState(
        scale=scale,
        finite_in_a_row=finite_in_a_row,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
    )
