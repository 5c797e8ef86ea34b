"""`Recipe`: everything that a run is, as one frozen tree of values. A recipe is made by a function; variants by
`dataclasses.replace` or overrides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshpar.module import Model, abstract
from meshpar.plan import Plan
from meshpar.train.data import DataConfig
from meshpar.train.lora import Lora, adapt
from meshpar.train.optimizer import OptimizerConfig
from meshpar.train.profile import parse_steps
from meshpar.train.step import Objective

Export = Literal["fp32", "bf16", "none"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long a run is and what it does along the way; all counts in steps."""

    steps: int  # batches that are trained on; with loss scaling some of them may be skipped
    batch: int  # rows of the global batch, over all devices and microbatches
    seed: int = 0  # 0 to 2^32 - 1, of the initial parameters and of dropout
    eval_every: int = 100  # 0: only at the end
    eval_batches: int = 16  # at most so many validation batches; a full pass at the end
    checkpoint_every: int = 0  # 0: only at the end
    final_eval_batches: int = 0  # validation batches at the end; 0: all of them
    keep: int = 2  # newest checkpoints that stay
    # checkpoints with the lowest validation loss that stay besides; checkpoint_every is then a multiple of eval_every
    keep_best: int = 0
    sample_tokens: int = 96  # of each sampled text at the end; 0 samples nothing
    export: Export = "fp32"  # weights.safetensors at the end, in this dtype; "none" writes none
    tensorboard: bool = True  # the metrics for TensorBoard, beside metrics.jsonl
    profile: str = ""  # steps to trace: "12", or "12:15"
    # name the first tensor that is not finite, where the run would end; costs a copy of the parameters in each step
    nan_report: bool = False
    stall: float = 600.0  # seconds of silence after which the watchdog says which step hangs; 0: never

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("batch", 1),
            ("seed", 0),
            ("eval_every", 0),
            ("eval_batches", 1),
            ("final_eval_batches", 0),
            ("checkpoint_every", 0),
            ("keep", 1),
            ("keep_best", 0),
            ("sample_tokens", 0),
        ):
            value, most = getattr(self, name), 2**32 - 1 if name == "seed" else 2**31 - 1  # uint32 and int32 on devices
            if value < least:
                raise ValueError(f"train.{name}={value} must be at least {least}; use {least} or more")
            if value > most:
                raise ValueError(f"train.{name}={value} must be at most {most}; use {most} or less")
        if self.export not in get_args(Export):
            raise ValueError(f"train.export={self.export!r} is not one of {', '.join(get_args(Export))}; choose one")
        if not self.stall >= 0:
            raise ValueError(f"train.stall={self.stall} must be at least 0 seconds; 0 turns the watchdog off")
        if self.keep_best and not self.eval_every:
            raise ValueError(f"train.keep_best={self.keep_best} needs losses to compare; set train.eval_every")
        if self.keep_best and self.checkpoint_every % self.eval_every:
            raise ValueError(
                f"train.keep_best={self.keep_best} needs a loss with each checkpoint; make "
                f"train.checkpoint_every={self.checkpoint_every} a multiple of train.eval_every={self.eval_every}"
            )
        traced = parse_steps(self.profile)
        if traced and traced[-1] > self.steps:
            raise ValueError(f"train.profile={self.profile} ends after train.steps={self.steps}; name earlier steps")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run. `model` is a family's config: a frozen dataclass with `build(rngs)`, `vocab` and `max_seq`."""

    model: Any
    plan: Plan
    data: DataConfig
    optimizer: OptimizerConfig
    train: RunConfig
    objective: Objective = Objective()
    # what training starts from: a folder of Hugging Face or a GGUF file; none: parameters drawn from train.seed
    weights: str | None = None
    # adapters to train instead of the weights; none: the weights themselves
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.lora is not None and self.weights is None:
            raise ValueError(
                f"lora.rank={self.lora.rank} adapts weights, and weights is none; set weights to a folder of theirs"
            )

    def abstract_model(self) -> Model:
        """Shapes and axes of what is trained: the model, with its adapters where there are some.

        Raises:
          ValueError: a target of `lora` names no kernel.
        """
        model = abstract(self.model.build, self.model)
        return model if self.lora is None else adapt(model, self.lora)
