"""`check`: a case and its reference are run and compared, stage by stage.

References are kept, so that shrinking and fuzzing run one of the two only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np
import optax

from meshpar.check.batches import batches_of, wrong_targets
from meshpar.check.case import Case, Precision
from meshpar.check.compare import (
    STAGES,
    Difference,
    Tolerance,
    clipped,
    compare_leaves,
    compare_loss,
    compare_norm,
    compare_number,
    different_copies_found,
    global_norm,
    not_repeatable_found,
    repeated_masks,
    stale_parameters,
    tolerance_of,
)
from meshpar.check.observe import (
    Leaves,
    Steps,
    Subject,
    observe_activations,
    observe_evaluation,
    observe_initial,
    observe_steps,
    observe_update,
)
from meshpar.check.shrink import shrink
from meshpar.interfaces import Batch
from meshpar.layout.resolve import path_name
from meshpar.mesh.spec import MeshSpec
from meshpar.plan import Plan
from meshpar.train.run import Recipe

Say = Callable[[str], None]

# The stages of the two programs that show several.
SGD: Final = (
    *("loss", "other metrics", "gradients", "gradient norm", "parameters after SGD", "later steps"),
    *("copies", "determinism"),
)
OPTIMIZER: Final = ("clipped gradients", "parameters after the optimizer", "optimizer state")
# Metrics that have a stage of their own, or that no reference has.
_APART: Final = {"loss", "grad_norm", "loss_scale", "skipped", "skipped_in_a_row"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one stage compared."""

    stage: str
    compared: int  # tensors, or steps
    worst: float  # times what is allowed, or nan where a stage has no tolerance
    differences: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a check."""

    case: Case
    tolerance: Tolerance
    rows: list[Row]
    differences: list[Difference]  # in the order of computation
    cause: list[str] = field(default_factory=list)  # what a failure needs, after shrinking
    smallest: Case | None = None
    there: Difference | None = None  # the first difference of the smallest case

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs, in the order of computation."""
        return self.differences[0] if self.differences else None

    @property
    def worst(self) -> float:
        """The largest difference of any tensor, in parts of what is allowed."""
        return max((row.worst for row in self.rows if not math.isnan(row.worst)), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """JSON values; None where a number is not finite."""
        return {
            "ok": self.ok,
            "command": self.case.command(),
            "mesh": str(self.case.mesh),
            "against": str(self.case.against),
            "tolerance": str(self.tolerance),
            "stages": [_json(row) for row in self.rows],
            "differences": [_json(difference) for difference in self.differences],
            "cause": self.cause,
            "smallest": None if self.smallest is None else self.smallest.command(),
            "there": None if self.there is None else _json(self.there),
        }


def _json(found: Row | Difference) -> dict[str, Any]:
    fields = dataclasses.asdict(found).items()
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields}


class Checker:
    """Runs cases; keeps what references gave.

    Args:
      say: is told what is being run.
      tx: an optax transformation instead of the recipe's optimizer.
      batches: host batches instead of the case's, as many as it has steps.
    """

    def __init__(
        self,
        *,
        say: Say = lambda text: None,
        tx: optax.GradientTransformation | None = None,
        batches: Sequence[Batch] | None = None,
    ):
        self._say, self._tx, self._batches = say, tx, batches
        self._references: dict[Any, Any] = {}
        self._data: dict[Any, list[Batch]] = {}
        self._subjects: dict[Any, Subject] = {}

    def check(self, case: Case, stages: Sequence[str] = STAGES) -> Findings:
        """Compares a case with its reference.

        Args:
          stages: which comparisons to make; programs that none of them needs are not compiled.

        Raises:
          ValueError: the plan does not fit the model, the batch or the devices, or a skipped step leaves nothing to
            compare.
        """
        recipe, wanted = case.recipe, set(stages)
        subject = self._subject(case)
        notes = _Notes(
            tolerance=tolerance_of(subject, str(recipe.plan.precision.compute_dtype)),
            sizes={**recipe.plan.mesh.sizes, "microbatches": recipe.plan.accumulate},
        )
        if "targets" in wanted and self._batches is None:
            notes.add("targets", len(subject.batches), _wrong_targets(subject.batches))
        if "initial parameters" in wanted:
            self._compare_initial(case, subject, notes)
        if "activations" in wanted:
            self._compare_activations(case, subject, notes)
        if wanted & {*SGD, "dropout"}:
            self._compare_steps(case, subject, notes, dropout="dropout" in wanted)
        if wanted & set(OPTIMIZER):
            self._compare_update(case, subject, notes)
        if "evaluation" in wanted:
            self._compare_evaluation(case, subject, notes)
        order = {stage: index for index, stage in enumerate(STAGES)}
        return Findings(
            case=case,
            tolerance=notes.tolerance,
            rows=sorted((row for row in notes.rows if row.stage in wanted), key=lambda row: order[row.stage]),
            differences=[
                difference for stage in STAGES if stage in wanted for difference in notes.found.get(stage, [])
            ],
        )

    def _compare_initial(self, case: Case, subject: Subject, notes: _Notes) -> None:
        stage = "initial parameters"
        here = observe_initial(subject, case.recipe.plan)
        drawn = jax.tree.leaves_with_path(subject.drawn)
        there = {path_name(path): leaf.astype(here[path_name(path)].dtype) for path, leaf in drawn}
        notes.add(stage, len(there), *compare_leaves(stage, here, there, **notes.options))

    def _compare_evaluation(self, case: Case, subject: Subject, notes: _Notes) -> None:
        self._say(f"the evaluation on {case.mesh}")
        here = observe_evaluation(subject, case.recipe.plan)
        there: dict[str, float] = self._reference("evaluation", case, observe_evaluation)
        compared = [compare_number("evaluation", name, here[name], there[name], **notes.options) for name in there]
        notes.add("evaluation", len(there), [d for found, _ in compared for d in found], max(e for _, e in compared))

    def _compare_activations(self, case: Case, subject: Subject, notes: _Notes) -> None:
        self._say(f"activations on {case.mesh}")
        here = observe_activations(subject, case.recipe.plan)
        there: Leaves = self._reference("activations", case, observe_activations)
        found, worst = compare_leaves("activations", here, there, **notes.options)
        notes.add("activations", len(there), found + repeated_masks(here), worst)

    def _compare_steps(self, case: Case, subject: Subject, notes: _Notes, *, dropout: bool) -> None:
        self._say(f"{case.steps} steps with SGD on {case.mesh}")
        dropout = dropout and bool(getattr(case.recipe.model, "dropout", False))
        here, options = observe_steps(subject, case.recipe.plan, dropout=dropout), notes.options
        there = self._reference_steps(case)
        if (skipped := here.skipped) and case.recipe.plan.precision.compute == "fp16":  # elsewhere it is a fault
            raise ValueError(
                f"{skipped} of {case.steps} steps had gradients that are not finite, so there is nothing to compare; "
                "lower precision.loss_scale.initial"
            )
        first, expected = here.metrics[0], there.metrics[0]
        notes.add("loss", 1, *compare_loss("loss", 1, first["loss"], expected["loss"], **options))
        stage, others = "other metrics", [name for name in expected if name not in _APART]
        compared = [compare_number(stage, name, first[name], expected[name], **options) for name in others]
        notes.add(stage, len(others), [d for found, _ in compared for d in found], max(e for _, e in compared))
        noise = notes.tolerance.of_norm * global_norm(there.gradients)
        gradients = compare_leaves("gradients", here.gradients, there.gradients, besides=noise, **options)
        notes.add("gradients", len(there.gradients), *gradients)
        norms = first["grad_norm"], expected["grad_norm"]
        notes.add("gradient norm", 1, *compare_norm("gradient norm", 1, *norms, **options))
        stage = "parameters after SGD"
        options_of_update = {**options, "besides": subject.lr * noise, "before": there.before}
        params = compare_leaves(stage, here.params, there.params, **options_of_update)
        notes.add(stage, len(there.params), *params)
        later: list[Difference] = []
        worst = 0.0
        for step in range(2, case.steps + 1):
            ours, theirs = here.metrics[step - 1], there.metrics[step - 1]
            for compare, name in ((compare_loss, "loss"), (compare_norm, "grad_norm")):
                found, excess = compare("later steps", step, ours[name], theirs[name], **options)
                later, worst = later + found, max(worst, excess)
            for name in others:
                path = f"{name} of step {step}"
                found, excess = compare_number("later steps", path, ours[name], theirs[name], **options)
                later, worst = later + found, max(worst, excess)
        if case.steps > 1:
            notes.add("later steps", (len(others) + 2) * (case.steps - 1), later, worst)
        notes.add("copies", len(here.params), different_copies_found("copies", here.different_copies))
        notes.add("determinism", len(here.params), not_repeatable_found(here))
        if dropout:
            notes.add("dropout", len(subject.batches[0].tokens), _wrong_dropout(here))

    def _compare_update(self, case: Case, subject: Subject, notes: _Notes) -> None:
        name = case.recipe.optimizer.name if self._tx is None else "the optimizer"
        self._say(f"{case.steps} steps with {name} on {case.mesh}")
        raw, clip_norm = self._reference_steps(case).gradients, subject.objective.clip_norm
        if clip_norm is not None:
            clip_norm = min(clip_norm, global_norm(raw) / 2)  # else nothing might be clipped
        here, options = observe_update(subject, case.recipe.plan, clip_norm), notes.options
        expected = clipped(raw, clip_norm)
        noise = notes.tolerance.of_norm * global_norm(expected)
        gradients = compare_leaves("clipped gradients", here.gradients, expected, besides=noise, **options)
        notes.add("clipped gradients", len(expected), *gradients)
        stage = "parameters after the optimizer"
        weights, worst = compare_leaves(stage, here.weights, here.expected, before=here.before, **options)
        notes.add(stage, len(here.weights), weights + stale_parameters(here), worst)
        stage = "optimizer state"
        states, worst = compare_leaves(stage, here.state, here.expected_state, **options)
        notes.add(stage, len(here.state), states + different_copies_found(stage, here.different_copies), worst)

    def _subject(self, case: Case) -> Subject:
        recipe = case.recipe
        data = (recipe.data, recipe.train.batch, case.masked, case.random_data, case.steps)
        key = (recipe.model, recipe.lora, recipe.optimizer, recipe.objective, recipe.train.seed, data)
        if key not in self._subjects:
            if self._batches is None and (data_key := (data, recipe.model.vocab)) not in self._data:
                self._data[data_key] = batches_of(case)
            self._subjects[key] = Subject(
                model=case.model,
                # the first rate of a warm-up is 0, and an update by nothing shows nothing
                tx=dataclasses.replace(recipe.optimizer, warmup=0).make(max(recipe.train.steps, 2), case.model)
                if self._tx is None
                else self._tx,
                objective=recipe.objective,
                batches=self._batches if self._batches is not None else self._data[data, recipe.model.vocab],
                seed=recipe.train.seed,
            )
        return self._subjects[key]

    def _reference_steps(self, case: Case) -> Steps:
        steps: Steps = self._reference("steps", case, observe_steps)
        return steps

    def _reference(self, what: str, case: Case, observe: Callable[[Subject, Plan], Any]) -> Any:
        plan, subject = case.reference, self._subject(case)
        objective = dataclasses.replace(subject.objective, clip_norm=None)  # which no reference applies
        key = (what, str(plan.to_json()), subject.model, objective, subject.seed, id(subject.batches))
        if key not in self._references:
            self._say(f"the reference on {plan.mesh}")
            self._references[key] = observe(subject, plan)
        return self._references[key]


@dataclass(kw_only=True)
class _Notes:
    """What has been compared so far."""

    tolerance: Tolerance
    sizes: dict[str, int]
    rows: list[Row] = field(default_factory=list)
    found: dict[str, list[Difference]] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance, "sizes": self.sizes}

    def add(self, stage: str, compared: int, differences: list[Difference], worst: float = np.nan) -> None:
        self.rows.append(Row(stage=stage, compared=compared, worst=worst, differences=len(differences)))
        self.found[stage] = differences


def _wrong_dropout(steps: Steps) -> list[Difference]:
    """Dropout as promised: another mask for each row and each step."""
    found = []
    if steps.same_dropout:
        text = "two steps have the same loss on one batch: the same mask"
        found.append(Difference(stage="dropout", path="steps", text=text))
    if pairs := steps.alike_rows:
        text = f"{len(pairs)} pairs of rows drop alike, the first is rows {pairs[0][0]} and {pairs[0][1]}"
        found.append(Difference(stage="dropout", path="rows", text=text))
    return found


def _wrong_targets(batches: Sequence[Batch]) -> list[Difference]:
    wrong = [(step, wrong_targets(batch)) for step, batch in enumerate(batches, start=1)]
    return [
        Difference(
            stage="targets",
            path=f"batch {step}",
            text=f"{count} targets are not the token that follows",
            meaning="targets must be shifted before a row is split",
        )
        for step, count in wrong
        if count
    ]


def check_recipe(
    recipe: Recipe,
    mesh: str,
    against: str = "data=1",
    *,
    precision: Precision = "fp32",
    steps: int = 2,
    masked: bool = True,
    random_data: bool = False,
    tx: optax.GradientTransformation | None = None,
    batches: Sequence[Batch] | None = None,
    say: Say = lambda text: None,
) -> Findings:
    """Compares a recipe on one mesh with its plain form on another; on CPU emulate the devices of the larger first.

    Args:
      recipe: model, plan, objective and data; its plan's mesh is replaced.
      mesh, against: such as "data=2 tensor=4".
      precision: "fp32" computes in fp32, where few faults hide behind rounding; "plan" as the plan says.
      steps: how many; gradients are compared in the first, metrics in all.
      masked: take a fifth of the targets out; not of `batches`.
      random_data: random tokens instead of the recipe's text.
      tx: an optax transformation instead of the recipe's optimizer.
      batches: host batches instead of the recipe's, one for each step.

    Returns:
      Findings: `ok`, the differences in the order of computation, and what was compared.

    Raises:
      ValueError: a mesh that the plan, the model, the batch or the devices do not fit.

    Example: `assert mp.check_recipe(recipe, "data=2 tensor=2").ok`.
    """
    if batches is not None and len(batches) != steps:
        raise ValueError(f"{len(batches)} batches for steps={steps}; give one batch for each step")
    case = Case(
        name="RECIPE",
        base=recipe,
        mesh=MeshSpec.parse(mesh),
        against=MeshSpec.parse(against),
        precision=precision,
        steps=steps,
        masked=masked,
        random_data=random_data,
    )
    return Checker(say=say, tx=tx, batches=batches).check(case)


def find_cause(checker: Checker, findings: Findings, say: Say = lambda text: None) -> Findings:
    """Findings that differ, with the smallest case that first differs in the same stage, and what it needs."""
    assert findings.first is not None
    stage, stages = findings.first.stage, stages_of(findings.first)

    def first(case: Case) -> Difference | None:
        try:
            return checker.check(case, stages).first
        except ValueError:  # a layout that shows only in the trace that it does not fit
            return None

    def fails(case: Case) -> bool:
        found = first(case)
        return found is not None and found.stage == stage

    smallest, cause = shrink(findings.case, fails, say=say)
    there = first(smallest)
    return dataclasses.replace(findings, smallest=smallest, cause=cause, there=there)


def stages_of(difference: Difference) -> tuple[str, ...]:
    """The stages to compare again where one difference is looked for: those that its own program shows."""
    return next((group for group in (SGD, OPTIMIZER) if difference.stage in group), (difference.stage,))
