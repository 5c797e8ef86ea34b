"""One training step: a pure function of (state, batch), the same for every plan.

    loss = sum over tokens of weight * loss / sum of weights of the global batch
    gradients of the stored parameters, reduced into the gradient layout; clipped by their global norm; one optimizer
    update in the optimizer's layout

The plan shows only in layout constraints; GSPMD adds the communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from meshpar.forward import Forward
from meshpar.interfaces import Batch, PyTree
from meshpar.layout.context import placed
from meshpar.layout.resolve import shardings
from meshpar.layout.rules import Layout
from meshpar.losses.cross_entropy import chunked_cross_entropy
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.train.accumulate import accumulate
from meshpar.train.state import TrainState

Metrics = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised: cross-entropy with options, gradients clipped at a global norm."""

    z_loss: float = 0.0  # times log(sum of exp)^2 a token; 1e-4 keeps logits from drifting in long bf16 runs
    label_smoothing: float = 0.0  # share of the target spread evenly over the vocabulary
    clip_norm: float | None = 1.0  # gradients of a larger global norm are scaled down to it; None never clips


def loss_sums(forward: Forward, objective: Objective, params: PyTree, batch: Batch, key: jax.Array | None) -> Metrics:
    """Sums over a (micro)batch: `loss` with all its extras, `nll` without, `tokens` (the weights), each auxiliary
    loss by name. fp32 scalars.
    """
    lm, x, aux = forward(params, batch, key)
    loss, parts, tokens = chunked_cross_entropy(
        lm.head,
        x,
        batch.targets,
        batch.weights,
        vocab=forward.model.config.vocab,
        chunk=forward.plan.loss_chunk,
        z_loss=objective.z_loss,
        label_smoothing=objective.label_smoothing,
    )
    for value in aux.values():
        loss = loss + value
    return {"loss": loss, "tokens": tokens, **parts, **aux}


def gradients(
    forward: Forward, objective: Objective, params: PyTree, batch: Batch, key: jax.Array | None
) -> tuple[PyTree, Metrics]:
    """Raw gradients of the mean loss per token of the global batch, in the gradient layout, and the sums of
    `loss_sums`.
    """
    tokens = jnp.sum(batch.weights)
    tokens = jnp.where(tokens > 0, tokens, 1.0)  # a batch without a target has loss 0 and gradients 0

    def of_microbatch(microbatch: Batch, index: Any) -> tuple[PyTree, Metrics]:
        micro_key = None if key is None else jax.random.fold_in(key, index)

        def mean_loss(params: PyTree) -> tuple[jax.Array, Metrics]:
            sums = loss_sums(forward, objective, params, microbatch, micro_key)
            return sums["loss"] / tokens, sums

        return jax.grad(mean_loss, has_aux=True)(params)

    layout = forward.plan.layouts().grads
    return accumulate(
        of_microbatch, batch, forward.plan.accumulate, lambda tree: _into(layout, forward.model, forward.mesh, tree)
    )


def make_step(
    model: Model, tx: optax.GradientTransformation, plan: Plan, mesh: Mesh, objective: Objective
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step as a function to jit. Metrics are fp32 scalars: loss and nll a token, grad_norm before clipping,
    tokens.
    """
    forward = Forward(model, plan, mesh)
    layouts = plan.layouts()

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with placed(plan.placement(mesh)):
            grads, sums = gradients(forward, objective, state.params, batch, jax.random.fold_in(state.key, state.step))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = optax.tree_utils.tree_norm(grads)
        if objective.clip_norm is not None:
            factor = jnp.minimum(1.0, objective.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * factor, grads)
        # The update runs where the moments lie: with ZeRO 1-3 each device updates its part, then the parameters go back
        # to their own layout.
        grads = _into(layouts.optimizer, model, mesh, grads)
        weights = _into(layouts.optimizer, model, mesh, state.params if state.master is None else state.master)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes where a strict caller may not
            updates, opt_state = tx.update(grads, state.opt_state, weights)
        weights = _into(layouts.optimizer, model, mesh, optax.apply_updates(weights, updates))
        cast = jax.tree.map(lambda w: w.astype(plan.precision.param_dtype), weights)
        params = _into(layouts.params, model, mesh, cast)
        tokens = jnp.where(sums["tokens"] > 0, sums["tokens"], 1.0)
        metrics = {name: value / tokens for name, value in sums.items() if name != "tokens"}
        new = TrainState(
            step=state.step + 1,
            params=params,
            master=None if state.master is None else weights,
            opt_state=opt_state,
            key=state.key,
        )
        return new, {**metrics, "tokens": sums["tokens"], "grad_norm": norm}

    return step


def _into(layout: Layout, model: Model, mesh: Mesh, tree: PyTree) -> PyTree:
    if mesh.size == 1:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings(layout, model.axes, model.shapes, mesh))
