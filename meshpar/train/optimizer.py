"""Optimizers and learning-rate schedules as values: `OptimizerConfig` makes an optax transformation.

`build` takes any `optax.GradientTransformation`; this is the choice that recipes and the command line can write down.
Each is made of optax's parts, so that three things hold for all: schedules count optimizer updates, never microbatches
or skipped steps; weight decay is decoupled, `lr * weight_decay * w`, and skips norms and biases by name, so that
stacking layers changes nothing.

Sources: AdamW (Loshchilov and Hutter 2019), Adafactor (Shazeer and Stern 2018; here with external rates and no scaling
by the parameter), Lion (Chen et al. 2023), Muon (Jordan 2024; with the update size of Liu et al. 2025, section 2.2);
warmup-stable-decay (Hu et al. 2024, MiniCPM, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax

from meshpar.interfaces import Axes, PyTree
from meshpar.layout.resolve import map_leaves, path_name
from meshpar.layout.rules import did_you_mean
from meshpar.module import Model, is_norm_or_bias

Name = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
Schedule = Literal["cosine", "wsd", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its schedule."""

    # muon orthogonalises the matrices of the layers and gives all else to Adam, with rates that suit adamw; lion wants
    # lr 3 to 10 times smaller than adamw and weight_decay as much larger
    name: Name = "adamw"
    lr: float = 3e-4  # the peak; 6e-4 is usual at 125M, 2e-4 at 1.3B, 1e-3 to 3e-3 for a few million parameters
    # after the warm-up: cosine, linear, wsd (at the peak, then linear over the last `decay` of the run) or constant
    schedule: Schedule = "cosine"
    warmup: int = 100  # updates from 0 to the peak; 1-2% of the run is usual
    decay: float = 0.2  # wsd: this share of the run at its end
    final_lr: float = 0.1  # of the peak, where cosine, linear and wsd end
    b1: float = 0.9  # b1 and b2 are of adamw, lion and muon's Adam, eps of adamw and muon; adafactor has its own
    b2: float = 0.95  # 0.95 for language models; 0.999 reacts too slowly to their gradient spikes
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices and tables; norms and biases never decay; sgd has none
    momentum: float = 0.0  # sgd; 0.95 is muon's, whatever stands here

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
            ("decay", 0 < self.decay <= 1, "above 0 and at most 1, a share of the run; 0.2 is usual"),
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
        warmup, after = optax.linear_schedule(0.0, self.lr, max(self.warmup, 1)), max(steps - self.warmup, 1)
        if self.schedule == "constant":
            return optax.join_schedules([warmup, optax.constant_schedule(self.lr)], [self.warmup])
        if self.schedule == "cosine":
            falls = optax.cosine_decay_schedule(self.lr, after, alpha=self.final_lr)
            return optax.join_schedules([warmup, falls], [self.warmup])
        falling = after if self.schedule == "linear" else min(max(round(self.decay * steps), 1), after)
        falls = optax.linear_schedule(self.lr, self.lr * self.final_lr, falling)
        begin = self.warmup + after - falling
        return optax.join_schedules([warmup, optax.constant_schedule(self.lr), falls], [self.warmup, begin])

    def rates(self, steps: int) -> np.ndarray:
        """The learning rate of each update of a run, fp32 `[steps]` on the host."""
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes where a strict caller may not
            return np.asarray(jax.jit(jax.vmap(self.learning_rate(steps)))(np.arange(steps, dtype=np.int32)))

    def make(self, steps: int, model: Model | None = None) -> optax.GradientTransformation:
        """The transformation for a run of `steps` updates.

        Raises:
          ValueError: muon without the `model` whose matrices it is to find.
        """
        rate = self.learning_rate(steps)
        if self.name == "sgd":
            return optax.sgd(rate, momentum=self.momentum or None)
        decay = optax.add_decayed_weights(self.weight_decay, mask=decayed)
        return optax.chain(*self._directions(model), decay, optax.scale_by_learning_rate(rate))

    def _directions(self, model: Model | None) -> list[optax.GradientTransformation]:
        """Gradients to update directions, before weight decay and rate."""
        if self.name == "adamw":
            return [optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps)]
        if self.name == "lion":
            return [optax.scale_by_lion(b1=self.b1, b2=self.b2)]
        # An update of root mean square above 1 is scaled down, a leaf at a time. Second moments are kept as rows and
        # columns where the two largest dims of a leaf have 128 or more elements, and whole elsewhere.
        if self.name == "adafactor":
            return [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)]
        if model is None:
            raise ValueError("optimizer.name=muon needs the model to find its matrices; call make(steps, model)")
        muon = optax.contrib.muon(
            -1.0,  # the rate is applied after the decay; this only turns the sign back
            adam_b1=self.b1,
            adam_b2=self.b2,
            eps=self.eps,
            muon_weight_dimension_numbers=matrices(model),
            consistent_rms=0.2,  # as large as AdamW's updates, so that its learning rates fit
        )
        return [muon]


def decayed(params: PyTree) -> PyTree:
    """For each leaf whether weight decay applies: everything but norms and biases, by name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_norm_or_bias(path_name(path)), params)


def matrices(model: Model) -> PyTree:
    """For each trained parameter of `model` the dims of the matrix that Muon orthogonalises, each layer and expert by
    itself: `embed` (of an adapter's half without it: `rank`) against all others; None for what is no matrix of a layer
    (tables, head, norms, biases).
    """

    def one(path: str, leaf: Any, axes: Axes) -> optax.contrib.MuonDimensionNumbers | None:
        side = "embed" if "embed" in axes else "rank"
        others = tuple(dim for dim, axis in enumerate(axes) if axis not in ("layers", "experts", side))
        if not path.startswith("blocks/") or axes.count(side) != 1 or not others:
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=(axes.index(side),), output_axis=others)

    return map_leaves(one, model.trained(model.shapes), model.trained(model.axes))
