"""What one plan makes of the same batches: everything that must not depend on where a step runs, on the host.

Five programs: the drawing of the first parameters, a forward with its activations as outputs, the training step with
SGD, the evaluation, and the training step with the recipe's own optimizer. All but the second are those that train,
built by `train.build.build`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.forward import Forward
from meshpar.interfaces import Batch, PyTree
from meshpar.layout.context import placed
from meshpar.layout.resolve import path_name
from meshpar.layout.tape import Tape
from meshpar.mesh.devices import compiler_options
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.train.build import Training, build
from meshpar.train.state import TrainState, init_state
from meshpar.train.step import Metrics, Objective, loss_sums

Leaves = dict[str, np.ndarray]  # by path or name


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What is run: everything of a step but its plan."""

    model: Model
    tx: optax.GradientTransformation
    objective: Objective
    batches: Sequence[Batch]  # one a step, on the host
    seed: int = 0
    lr: float = 0.1  # of SGD

    def build(self, tx: optax.GradientTransformation, plan: Plan, objective: Objective) -> Training:
        """The step of a plan on the first devices that its mesh needs."""
        rows, seq = self.batches[0].tokens.shape
        devices = jax.devices()[: plan.mesh.product]
        return build(self.model, tx, plan, batch=rows, seq=seq, objective=objective, devices=devices)

    @functools.cached_property
    def drawn(self) -> PyTree:
        """The parameters that `Training.init` must draw on any mesh, on the host."""
        key, _ = jax.random.split(jax.random.key(self.seed))
        return jax.device_get(jax.jit(self.model.init)(key))

    @functools.cached_property
    def weights(self) -> PyTree:
        """The parameters that all plans start from, on the host: those that are drawn, with noise on each leaf that is
        the same number everywhere. Between zeros and ones, of biases and norms, no mix-up would show.
        """
        rng = np.random.default_rng(self.seed)

        def generic(leaf: np.ndarray) -> np.ndarray:
            noise = 0.1 * rng.standard_normal(leaf.shape)
            return leaf if np.ptp(leaf) else (leaf + noise).astype(leaf.dtype)

        return jax.tree.map(generic, self.drawn)

    def state(self, training: Training, tx: optax.GradientTransformation) -> TrainState:
        """A fresh state of a step, with these parameters."""
        model = dataclasses.replace(self.model, init=lambda key: jax.tree.map(jnp.asarray, self.weights))
        state = init_state(model, tx, training.plan, jax.random.key(self.seed))
        return jax.device_put(state, training.shardings)

    def trained(self, state: TrainState) -> PyTree:
        """What the optimizer updates: the trained part of the parameters, or the masters of it."""
        return self.model.trained(state.params) if state.master is None else state.master

    @functools.cached_property
    def update(self) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
        """(gradients, optimizer state, weights) -> weights and state after one update, whole on one device."""

        def update(gradients: PyTree, state: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
            with jax.numpy_dtype_promotion("standard"):
                updates, state = self.tx.update(gradients, state, weights)
                return optax.apply_updates(weights, updates), state

        return jax.jit(update)


class Recorded(NamedTuple):
    """Optimizer state that keeps the gradients of the last step."""

    gradients: PyTree
    inner: PyTree


def recorded(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, with the gradients that it was given in its state."""

    def init(params: PyTree) -> Recorded:
        return Recorded(jax.tree.map(jnp.zeros_like, params), tx.init(params))

    def update(gradients: PyTree, state: Recorded, params: PyTree | None = None) -> tuple[PyTree, Recorded]:
        updates, inner = tx.update(gradients, state.inner, params)
        return updates, Recorded(gradients, inner)

    return optax.GradientTransformation(init, update)


def observe_initial(subject: Subject, plan: Plan) -> Leaves:
    """The parameters that training begins with, drawn into their shards."""
    state = subject.build(optax.identity(), plan, subject.objective).init(subject.seed)
    return _leaves(subject.model.whole(state.params, subject.trained(state)))


def observe_evaluation(subject: Subject, plan: Plan) -> dict[str, float]:
    """The sums of the evaluation of the first batch, by name."""
    training = subject.build(optax.identity(), plan, subject.objective)
    params = subject.state(training, optax.identity()).params
    sums = training.evaluate(params, training.place(subject.batches[0]))
    return {name: float(value) for name, value in sums.items()}


def observe_activations(subject: Subject, plan: Plan) -> Leaves:
    """The activations of the first batch by name, in the order of computation.

    One forward of the whole batch, its layers written out; the loss in one piece.
    """
    plan = dataclasses.replace(plan, accumulate=1, loss_chunk=None)
    training = subject.build(optax.identity(), plan, subject.objective)
    plan, mesh = training.plan, training.mesh

    def run(params: PyTree, batch: Batch, key: jax.Array) -> dict[str, jax.Array]:
        tape = Tape(beside=batch.tokens)
        with placed(dataclasses.replace(plan.placement(mesh), tape=tape)):
            loss_sums(Forward(subject.model, plan, mesh), subject.objective, params, batch, key)
        order.extend(tape.taps)
        return tape.taps

    order: list[str] = []  # jit returns a dict sorted by its keys
    params = subject.state(training, optax.identity()).params
    compiled = jax.jit(
        run,
        in_shardings=(training.shardings.params, training.batch_sharding, None),
        compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )
    found = compiled(params, training.place(subject.batches[0]), jax.random.key(subject.seed))
    return {name: np.asarray(found[name]) for name in order[: len(found)]}


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Steps with SGD that clips nothing."""

    metrics: list[dict[str, float]]  # of each step, by name
    gradients: Leaves  # of the first step, raw
    before: Leaves  # the parameters that were drawn
    params: Leaves  # after the first step
    skipped: int  # steps whose gradients were not finite
    different_copies: list[str]  # leaves of the state that are not the same on two devices that hold the same part
    not_repeatable: list[str]  # what differed when the first step was run again
    same_dropout: bool  # whether the first batch had the same loss with the dropout of two steps
    alike_rows: list[tuple[int, int]]  # rows that drop alike


def observe_steps(subject: Subject, plan: Plan, *, dropout: bool = False) -> Steps:
    """Some steps of the training step itself, with SGD; `dropout` looks for rows that drop alike too."""
    objective = dataclasses.replace(subject.objective, clip_norm=None)
    tx = recorded(optax.sgd(subject.lr))
    training = subject.build(tx, plan, objective)
    first = training.place(subject.batches[0])

    def one_step(batch: Batch, number: int = 0) -> tuple[dict[str, float], Leaves]:
        state = subject.state(training, tx)
        step = jax.device_put(jnp.asarray(number, jnp.int32), state.step.sharding)
        state, found = training.step(dataclasses.replace(state, step=step), batch)
        return _numbers(found), _leaves(state.opt_state.gradients)

    loss_of_later = one_step(first, 1)[0]["loss"]
    again = one_step(first)
    rows = rows_to_tell_apart(training.batch) if dropout else []
    of_rows = [one_step(training.place(only_row(subject.batches[0], row)))[0] for row in rows]

    state = subject.state(training, tx)
    metrics: list[dict[str, float]] = []
    gradients: Leaves = {}
    before, params = _leaves(subject.trained(state)), {}
    for number, batch in enumerate(subject.batches):
        state, found = training.step(state, first if number == 0 else training.place(batch))
        metrics.append(_numbers(found))
        if number == 0:
            gradients, params = _leaves(state.opt_state.gradients), _leaves(subject.trained(state))
    return Steps(
        metrics=metrics,
        gradients=gradients,
        before=before,
        params=params,
        skipped=sum(int(found.get("skipped", 0)) for found in metrics),
        different_copies=different_copies(state),
        not_repeatable=["loss"] * (again[0]["loss"] != metrics[0]["loss"])
        + [path for path, leaf in gradients.items() if again[1][path].tobytes() != leaf.tobytes()],
        same_dropout=loss_of_later == metrics[0]["loss"],
        alike_rows=[(rows[i], rows[j]) for i, j in alike([(found["loss"], found["grad_norm"]) for found in of_rows])],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Updated:
    """Steps with the recipe's own optimizer, and what it makes of the same gradients whole, on one device."""

    gradients: Leaves  # of the first step, as the optimizer was given them: clipped
    before: Leaves  # the weights: masters where there are some
    weights: Leaves  # after the first update
    expected: Leaves
    state: Leaves  # of the optimizer, after all steps
    expected_state: Leaves
    different_copies: list[str]  # leaves of its state that are not the same on two devices that hold the same part
    stale: list[str]  # parameters that are not what their master says after the first update


def observe_update(subject: Subject, plan: Plan, clip_norm: float | None) -> Updated:
    """Some steps with the recipe's own optimizer and this clipping, and the same updates on one device."""
    tx = recorded(subject.tx)
    training = subject.build(tx, plan, dataclasses.replace(subject.objective, clip_norm=clip_norm))
    state = subject.state(training, tx)
    whole = jax.device_get(subject.trained(state))
    whole_state = jax.jit(subject.tx.init)(subject.model.trained(subject.weights))
    before, found = _leaves(whole), {}
    for number, batch in enumerate(subject.batches):
        state, _ = training.step(state, training.place(batch))
        gradients = jax.device_get(state.opt_state.gradients)
        whole, whole_state = subject.update(gradients, whole_state, whole)
        if number == 0:
            weights, params = _leaves(subject.trained(state)), _leaves(subject.model.trained(state.params))
            stale = [p for p, leaf in params.items() if not np.array_equal(leaf, weights[p].astype(leaf.dtype))]
            found = {"gradients": _leaves(gradients), "weights": weights, "expected": _leaves(whole)}
    return Updated(
        **found,
        before=before,
        state=_leaves(state.opt_state.inner),
        expected_state=_leaves(whole_state),
        different_copies=different_copies(state.opt_state.inner),
        stale=stale,
    )


def different_copies(tree: PyTree) -> list[str]:
    """Paths of leaves of which two devices hold the same part with different bits."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        first: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            part = np.asarray(shard.data).tobytes()
            if first.setdefault(str(shard.index), part) != part:
                found.append(path_name(path))
                break
    return found


def rows_to_tell_apart(rows: int) -> list[int]:
    """Rows of a batch that must drop differently: neighbours, which lie in different microbatches, and up to eight
    spread over the devices.
    """
    return sorted({*range(min(rows, 4)), *(i * rows // 8 for i in range(8))})


def only_row(batch: Batch, row: int) -> Batch:
    """A batch whose rows are all its first, with every target of one row counting and no other."""
    same = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), batch)
    weights = np.zeros(same.weights.shape, np.float32)
    weights[row] = same.weights[0]
    return dataclasses.replace(same, weights=weights)


def alike(found: Sequence[tuple[float, ...]]) -> list[tuple[int, int]]:
    """Pairs of tuples that are the same to rounding."""

    def same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other, strict=True))

    return [(i, j) for j in range(len(found)) for i in range(j) if same(found[i], found[j])]


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _leaves(tree: Any) -> Leaves:
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
