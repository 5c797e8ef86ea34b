"""What one plan makes of the same batches: everything that must not depend on where a step runs, on the host.

Three programs: a forward with its activations as outputs, the training step with SGD, and the training step with the
recipe's own optimizer. The last two are the steps that train, built by `train.build.build`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
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
from meshpar.train.step import Objective, loss_sums

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
    def weights(self) -> PyTree:
        """The parameters of `Training.init`, on the host: drawn once, for all meshes."""
        key, _ = jax.random.split(jax.random.key(self.seed))
        return jax.device_get(jax.jit(self.model.init)(key))

    def state(self, training: Training, tx: optax.GradientTransformation) -> TrainState:
        """A fresh state of a step, with these parameters."""
        model = dataclasses.replace(self.model, init=lambda key: jax.tree.map(jnp.asarray, self.weights))
        state = init_state(model, tx, training.plan, jax.random.key(self.seed))
        return jax.device_put(state, training.shardings)

    @functools.cached_property
    def update(self) -> Callable[[PyTree, PyTree], PyTree]:
        """(gradients, weights) -> the weights after the first update, whole on one device."""

        def update(gradients: PyTree, weights: PyTree) -> PyTree:
            with jax.numpy_dtype_promotion("standard"):
                updates, _ = self.tx.update(gradients, self.tx.init(weights), weights)
                return optax.apply_updates(weights, updates)

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


def observe_activations(subject: Subject, plan: Plan) -> tuple[Callable[[Batch, int], Leaves], Leaves]:
    """The activations of the first batch by name, in the order of computation, and a function (batch, step) that makes
    those of another batch or step with the same program.

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

    def again(batch: Batch, step: int) -> Leaves:
        key = jax.random.fold_in(jax.random.key(subject.seed), step)
        found = compiled(params, training.place(batch), key)
        return {name: np.asarray(found[name]) for name in order[: len(found)]}

    return again, again(subject.batches[0], 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Steps with SGD that clips nothing."""

    losses: list[float]
    norms: list[float]
    gradients: Leaves  # of the first step, raw
    before: Leaves  # the parameters that were drawn
    params: Leaves  # after the first step
    skipped: int  # steps whose gradients were not finite
    different_copies: list[str]  # leaves of the state that are not the same on two devices that hold the same part
    not_repeatable: list[str]  # what differed when the first step was run again
    same_dropout: bool  # whether the first batch had the same loss with the dropout of two steps


def observe_steps(subject: Subject, plan: Plan) -> Steps:
    """Some steps of the training step itself, with SGD."""
    objective = dataclasses.replace(subject.objective, clip_norm=None)
    tx = recorded(optax.sgd(subject.lr))
    training = subject.build(tx, plan, objective)
    first = training.place(subject.batches[0])

    def one_step(state: TrainState) -> tuple[float, Leaves]:
        state, metrics = training.step(state, first)
        return float(metrics["loss"]), _leaves(state.opt_state.gradients)

    fresh = subject.state(training, tx)
    later = dataclasses.replace(fresh, step=jax.device_put(jnp.ones((), jnp.int32), fresh.step.sharding))
    loss_of_later, _ = one_step(later)
    again = one_step(subject.state(training, tx))

    state = subject.state(training, tx)
    losses, norms, skipped = [], [], 0
    gradients: Leaves = {}
    before, params = _leaves(_weights(state)), {}
    for number, batch in enumerate(subject.batches):
        state, metrics = training.step(state, first if number == 0 else training.place(batch))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        skipped += int(metrics.get("skipped", 0))
        if number == 0:
            gradients, params = _leaves(state.opt_state.gradients), _leaves(_weights(state))
    return Steps(
        losses=losses,
        norms=norms,
        gradients=gradients,
        before=before,
        params=params,
        skipped=skipped,
        different_copies=different_copies(state),
        not_repeatable=["loss"] * (again[0] != losses[0])
        + [path for path, leaf in gradients.items() if again[1][path].tobytes() != leaf.tobytes()],
        same_dropout=loss_of_later == losses[0],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Updated:
    """One step with the recipe's own optimizer."""

    gradients: Leaves  # as the optimizer was given them: clipped
    weights: Leaves  # after the update: the masters where there are some
    expected: Leaves  # what the optimizer makes of the same gradients, whole, on one device
    stale: list[str]  # parameters that are not what their master says


def observe_update(subject: Subject, plan: Plan) -> Updated:
    """The first step with the recipe's own optimizer and clipping, and the same update on one device."""
    tx = recorded(subject.tx)
    training = subject.build(tx, plan, subject.objective)
    state = subject.state(training, tx)
    before = jax.device_get(_weights(state))
    state, _ = training.step(state, training.place(subject.batches[0]))
    gradients = jax.device_get(state.opt_state.gradients)
    weights = _leaves(_weights(state))
    params = _leaves(state.params)
    return Updated(
        gradients=_leaves(gradients),
        weights=weights,
        expected=_leaves(subject.update(gradients, before)),
        stale=[path for path, leaf in params.items() if not np.array_equal(leaf, weights[path].astype(leaf.dtype))],
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


def alike_rows(activations: Iterable[np.ndarray]) -> list[tuple[int, int]]:
    """Pairs of rows that are equal to the bit in all of some `[batch, ...]` arrays: of equal rows of tokens, pairs that
    had the same dropout.
    """
    arrays = [array for array in activations if array.ndim > 1 and array.shape[0] > 1]
    rows = [b"".join(array[row].tobytes() for array in arrays) for row in range(arrays[0].shape[0])] if arrays else []
    return [(i, j) for j in range(len(rows)) for i in range(j) if rows[i] == rows[j]]


def _weights(state: TrainState) -> PyTree:
    return state.params if state.master is None else state.master


def _leaves(tree: Any) -> Leaves:
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
