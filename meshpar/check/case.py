"""`Case`: what is checked, spelled as a recipe and `--set` keys, and the reference that it must equal.

A case is data, so that a failure can be shrunk key by key and printed as a command that somebody else can run.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model, abstract
from meshpar.plan import Plan
from meshpar.precision.loss_scale import LossScaling
from meshpar.precision.policy import Policy
from meshpar.train.lora import Lora, adapt
from meshpar.train.recipe import apply_overrides
from meshpar.train.run import Recipe

Precision = Literal["fp32", "plan"]

# What a feature is where it is off, by its key. Shrinking turns these off one after another.
OFF: Final = {
    "sequence_parallel": "false",
    "zero": "0",
    "zero_axes": "none",
    "rules": "",
    "accumulate": "1",
    "remat": "none",
    "loss_chunk": "none",
    "unroll": "1",
    "attention": "auto",
    "precision.storage": "cast",
    "precision.reduce": "compute",
    "precision.loss_scale.kind": "none",
    "objective.z_loss": "0",
    "objective.label_smoothing": "0",
    "objective.clip_norm": "none",
    "data.packed": "false",
    "model.dropout": "0",
    "model.tied": "false",
    "model.window": "none",
    "model.qk_norm": "false",
    "model.attention_bias": "false",
    "model.attention_softcap": "none",
    "model.final_softcap": "none",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on a mesh, against its reference on another."""

    name: str  # of the recipe, as on the command line
    base: Recipe
    mesh: MeshSpec  # without a free axis
    against: MeshSpec = MeshSpec()
    changes: Mapping[str, str] = field(default_factory=dict)  # key -> value, as --set takes them
    precision: Precision = "fp32"  # "plan" keeps the dtypes of the recipe
    masked: bool = True  # a fifth of the targets, and all of the last row, do not count
    random_data: bool = False  # random tokens instead of the recipe's text
    steps: int = 2
    planted: str | None = None  # the fault that the command plants

    @property
    def recipe(self) -> Recipe:
        """The recipe as it runs on `mesh`.

        Raises:
          ValueError: a change that does not fit, one sentence.
        """
        changed = self._changed(self.changes)
        policy = changed.plan.precision
        if self.precision == "fp32":
            kind = "dynamic" if policy.scales_dynamically else policy.loss_scale.kind
            scaling = dataclasses.replace(policy.loss_scale, kind=kind)
            policy = dataclasses.replace(policy, compute="fp32", loss_scale=scaling)
        plan = dataclasses.replace(changed.plan, mesh=self.mesh, precision=policy)
        return dataclasses.replace(changed, plan=plan)

    @property
    def reference(self) -> Plan:
        """The plan of the reference: the mesh `against` and nothing that may not change a number. fp16 has fp32 beside
        it, since without a loss scale it would lose gradients.
        """
        recipe = self.recipe
        policy = recipe.plan.precision
        compute = "fp32" if policy.compute == "fp16" else policy.compute
        return Plan(
            mesh=self.against,
            precision=Policy(compute=compute, loss_scale=LossScaling(kind="none")),
            # dropout draws for each microbatch, so there it is part of what is computed
            accumulate=recipe.plan.accumulate if getattr(recipe.model, "dropout", 0.0) else 1,
        )

    def command(self) -> str:
        """The command line that runs this case."""
        words = ["python", "-m", "meshpar", "check", self.name, "--mesh", str(self.mesh)]
        if self.against != MeshSpec():
            words += ["--against", str(self.against)]
        for key, value in self.changes.items():
            words += ["--set", f"{key}={value}"]
        if self.precision != "fp32":
            words += ["--precision", self.precision]
        words += ["--no-masks"] * (not self.masked) + ["--random-data"] * self.random_data
        words += ["--steps", str(self.steps)] if self.steps != 2 else []
        words += [] if self.planted is None else ["--plant", self.planted]
        return shlex.join(words)

    def smaller(self) -> Iterator[tuple[str, Case]]:
        """What a smaller case lacks, and that case: each mesh axis left out, then halved; each feature off; no masks.
        Only those that can run.
        """
        candidates: list[tuple[str, Any]] = []
        sizes = {axis: size for axis, size in self.mesh.sizes.items() if size > 1}
        for axis, size in sizes.items():
            for less in dict.fromkeys((1, *(divisor for divisor in range(2, size) if size % divisor == 0))):
                candidates.append((f"{axis}={size}", self._with_axis(axis, less)))
        recipe = self.recipe
        for key, off in OFF.items():
            if (changed := self._turned_off(recipe, key, off)) is not None:
                value = recipe.plan.zero_stage if key == "zero" else _value(recipe, key)
                candidates.append((f"{key}={value}", changed))
        if self.masked:
            candidates.append(("masks", dataclasses.replace(self, masked=False)))
        for what, case in candidates:
            if case.runs():
                yield what, case

    def runs(self) -> bool:
        """Whether the plan can spread the model."""
        try:
            self.check()
        except ValueError:
            return False
        return True

    def check(self) -> None:
        """Raises ValueError, one sentence, where the plan or its reference cannot spread the model and its batch."""
        recipe = self.recipe
        for plan in (recipe.plan, self.reference):
            plan.check(self.model, batch=recipe.train.batch, seq=recipe.data.seq)

    @property
    def model(self) -> Model:
        """The model of the recipe, without its arrays."""
        return _model(self.recipe.model, self.recipe.lora)

    def _with_axis(self, axis: str, size: int) -> Case:
        changes = dict(self.changes)
        if axis == "tensor" and size == 1:  # which needs the axis
            changes["sequence_parallel"] = "false"
        smaller = dataclasses.replace(self, mesh=dataclasses.replace(self.mesh, **{axis: size}))
        return dataclasses.replace(smaller, changes=smaller._without_defaults(changes))

    def _turned_off(self, recipe: Recipe, key: str, off: str) -> Case | None:
        """This case with a feature off; None where it is off or a default, or where the recipe has no such key."""
        changes = {**self.changes, key: off}
        if key == "zero":  # which zero_axes needs
            changes["zero_axes"] = "none"
        try:
            changed = self._changed(changes)
        except ValueError:
            return None
        if _value(recipe, key) == _value(changed, key) or (key == "zero" and recipe.plan.zero_stage == 0):
            return None
        if key not in self.changes and key != "zero" and _value(recipe, key) == _default(recipe, key):
            return None  # not a feature of this recipe
        return dataclasses.replace(self, changes=self._without_defaults(changes))

    def _changed(self, changes: Mapping[str, str]) -> Recipe:
        return apply_overrides(self.base, [*(f"{key}={value}" for key, value in changes.items()), f"mesh={self.mesh}"])

    def _without_defaults(self, changes: Mapping[str, str]) -> dict[str, str]:
        """The changes that change something of the recipe: a shorter command."""
        changed = self._changed(changes)
        return {key: value for key, value in changes.items() if _value(changed, key) != _value(self.base, key)}


@functools.cache
def _model(config: Any, lora: Lora | None) -> Model:
    model = abstract(config.build, config)
    return model if lora is None else adapt(model, lora)


def _value(recipe: Recipe, key: str) -> Any:
    part, name = _part(recipe, key)
    return getattr(part, name)


def _default(recipe: Recipe, key: str) -> Any:
    part, name = _part(recipe, key)
    return next(f.default for f in dataclasses.fields(part) if f.name == name)


def _part(recipe: Recipe, key: str) -> tuple[Any, str]:
    """The dataclass that holds a key, and the field's name; keys of the plan have no "plan." in front."""
    part: Any = recipe
    *names, last = key.split(".")
    for name in names if names and hasattr(recipe, names[0]) else ["plan", *names]:
        part = getattr(part, name)
    return part, last
