"""Optimizers and learning-rate schedules as values: `OptimizerConfig` makes an optax transformation.

`build` takes any `optax.GradientTransformation`; this is the choice that recipes and the command line can write down.
Schedules count optimizer updates, never microbatches, and weight decay skips norms and biases by name, so that stacking
layers changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import numpy as np
import optax

from meshpar.interfaces import PyTree
from meshpar.layout.resolve import path_name
from meshpar.layout.rules import did_you_mean
from meshpar.module import is_norm_or_bias

Name = Literal["adamw", "sgd"]
Schedule = Literal["cosine", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its schedule."""

    name: Name = "adamw"
    lr: float = 3e-4  # the peak; 6e-4 is usual at 125M, 2e-4 at 1.3B, 1e-3 to 3e-3 for a few million parameters
    schedule: Schedule = "cosine"
    warmup: int = 100  # updates from 0 to the peak; 1-2% of the run is usual
    final_lr: float = 0.1  # of the peak, at the end of the cosine
    b1: float = 0.9
    b2: float = 0.95  # 0.95 for language models; 0.999 reacts too slowly to their gradient spikes
    eps: float = 1e-8
    weight_decay: float = 0.1  # adamw: of matrices and tables; norms and biases never decay
    momentum: float = 0.0  # sgd

    def __post_init__(self) -> None:
        for field, known in (("name", get_args(Name)), ("schedule", get_args(Schedule))):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(
                    f"optimizer.{field}={value!r} is not one of {', '.join(known)}{did_you_mean(value, known)}; "
                    "choose one of them"
                )
        for field, fine, rule in (
            ("lr", self.lr > 0, "above 0; 3e-4 is usual"),
            ("warmup", 0 <= self.warmup < 2**31, "at least 0 and below 2^31; use 0 for none"),
            ("final_lr", 0 <= self.final_lr <= 1, "from 0 to 1, a share of the peak; 0.1 is usual"),
            ("b1", 0 <= self.b1 < 1, "at least 0 and below 1; 0.9 is usual"),
            ("b2", 0 <= self.b2 < 1, "at least 0 and below 1; 0.95 is usual"),
            ("eps", self.eps > 0, "above 0; 1e-8 is usual"),
            ("weight_decay", self.weight_decay >= 0, "at least 0; use 0 for none"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1; use 0 for none"),
        ):
            if not fine:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be {rule}")

    def learning_rate(self, steps: int) -> optax.Schedule:
        """Update number (from 0) to learning rate, for a run of `steps` updates; the peak is reached at update
        `warmup`.
        """
        if self.schedule == "constant":
            return optax.join_schedules(
                [optax.linear_schedule(0.0, self.lr, self.warmup), optax.constant_schedule(self.lr)], [self.warmup]
            )
        decay = max(steps - self.warmup, 1)
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.lr, max(self.warmup, 1)),
                optax.cosine_decay_schedule(self.lr, decay, alpha=self.final_lr),
            ],
            [self.warmup],
        )

    def rates(self, steps: int) -> np.ndarray:
        """The learning rate of each update of a run, fp32 `[steps]` on the host."""
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes where a strict caller may not
            return np.asarray(jax.jit(jax.vmap(self.learning_rate(steps)))(np.arange(steps, dtype=np.int32)))

    def make(self, steps: int) -> optax.GradientTransformation:
        """The transformation for a run of `steps` updates."""
        if self.name == "sgd":
            return optax.sgd(self.learning_rate(steps), momentum=self.momentum or None)
        return optax.adamw(
            self.learning_rate(steps),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decayed,
        )


def decayed(params: PyTree) -> PyTree:
    """For each leaf whether weight decay applies: everything but norms and biases, by name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_norm_or_bias(path_name(path)), params)
