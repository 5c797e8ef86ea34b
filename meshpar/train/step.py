"""One training step: a pure function of (state, batch), the same for every plan.

    loss = sum over tokens of weight * loss / sum of weights of the global batch
    gradients of the stored parameters, reduced into the gradient layout; clipped by their global norm; one optimizer
    update in the optimizer's layout, which a norm that is not finite undoes where the loss is scaled

The plan shows only in layout constraints; GSPMD adds the communication.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from meshpar.forward import Forward
from meshpar.interfaces import Axes, Batch, PyTree
from meshpar.layout.constrain import split_as
from meshpar.layout.context import placed
from meshpar.layout.resolve import dims_over, map_leaves, place, split_over
from meshpar.layout.rules import Layout
from meshpar.losses.cross_entropy import chunked_cross_entropy
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.precision.loss_scale import next_scale
from meshpar.train.accumulate import accumulate
from meshpar.train.state import TrainState

Metrics = dict[str, jax.Array]
# beside loss, nll, z and tokens
STEP_METRICS = ("grad_norm", "updates", "data", "loss_scale", "skipped", "skipped_in_a_row")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised: cross-entropy with options, gradients clipped at a global norm."""

    z_loss: float = 0.0  # times log(sum of exp)^2 a token; 1e-4 keeps logits from drifting in long bf16 runs
    label_smoothing: float = 0.0  # share of the target spread evenly over the vocabulary
    clip_norm: float | None = 1.0  # gradients of a larger global norm are scaled down to it; None never clips

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"objective.clip_norm={self.clip_norm} must be above 0; 1.0 is usual, none never clips")
        if not self.z_loss >= 0:
            raise ValueError(f"objective.z_loss={self.z_loss} must not be negative; 1e-4 is usual, 0 turns it off")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"objective.label_smoothing={self.label_smoothing} must be at least 0 and below 1; 0.1 is usual"
            )


def loss_sums(forward: Forward, objective: Objective, params: PyTree, batch: Batch, key: jax.Array | None) -> Metrics:
    """Sums over a (micro)batch: `loss` with all its extras, `nll` without, `tokens` (the weights), each auxiliary
    loss by name. fp32 scalars.
    """
    lm, x, aux = forward(params, batch, key)
    with jax.named_scope("loss"):
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
    sums = {"loss": loss, "tokens": tokens, **parts}
    for name, value in aux.items():
        if name in (*sums, *STEP_METRICS):
            raise ValueError(
                f"the model returns an auxiliary loss called {name!r}, which is a metric of every step; "
                f"rename it, to {name}_extra for example"
            )
        sums["loss"] = sums["loss"] + value
    return {**sums, **aux}


def gradients(
    forward: Forward,
    objective: Objective,
    params: PyTree,
    batch: Batch,
    key: jax.Array | None,
    scale: jax.Array | None = None,
) -> tuple[PyTree, Metrics]:
    """Raw gradients of the mean loss per token of the global batch for the trained parameters, times `scale`, in the
    gradient layout, and the sums of `loss_sums`.

    Over the axes of `Plan.reduced_apart` each device first computes what its own rows give, all microbatches of them.
    """
    plan, mesh, model = forward.plan, forward.mesh, forward.model
    tokens = jnp.sum(batch.weights)
    divisor = jnp.where(tokens > 0, tokens, 1.0)  # a batch without a target has loss 0 and gradients 0
    if scale is not None:
        divisor = divisor / scale
    apart = tuple(axis for axis in plan.reduced_apart if mesh.shape[axis] > 1)
    if not apart:
        return _of_rows(forward, objective, params, batch, divisor, key)
    manual, whole, own = frozenset(apart), PartitionSpec(), PartitionSpec(apart)
    blocks = map_leaves(  # a weight that ZeRO 3 splits comes as a block, and its gradient leaves as one
        lambda path, leaf, axes: split_over(
            place(plan.layouts().params, axes, leaf.shape, mesh, path=path).spec, only=manual
        ),
        model.shapes,
        model.axes,
    )
    left = jax.tree.map(  # what the gradient of a weight is still to be summed over
        lambda block: tuple(axis for axis in apart if not dims_over(block, frozenset({axis}))), model.trained(blocks)
    )

    def of_own_rows(params: PyTree, batch: Batch, divisor: jax.Array, key: jax.Array | None) -> PyTree:
        with placed(dataclasses.replace(plan.placement(mesh), manual_axes=manual)):
            found = _of_rows(dataclasses.replace(forward, manual_axes=manual), objective, params, batch, divisor, key)
        return jax.tree.map(lambda x: x[None], found)

    each = jax.shard_map(
        of_own_rows,
        mesh=mesh,
        in_specs=(blocks, own, whole, whole),
        out_specs=(
            jax.tree.map(lambda block, axes: PartitionSpec(axes or None, *block), model.trained(blocks), left),
            own,
        ),
        axis_names=set(apart),
        check_vma=False,  # else the gradient of a whole parameter is summed over the axes in each microbatch
    )(params, batch, divisor, key)
    with jax.named_scope("gradients"):
        grads = jax.tree.map(lambda x: x.astype(jnp.float32).sum(axis=0), each[0])
    return _into("gradients", plan.layouts().grads, model, mesh, grads), jax.tree.map(lambda x: x.sum(axis=0), each[1])


def _of_rows(
    forward: Forward, objective: Objective, params: PyTree, batch: Batch, divisor: jax.Array, key: jax.Array | None
) -> tuple[PyTree, Metrics]:
    """Gradients and sums of some rows; `divisor` is the tokens of the global batch over the loss scale."""

    model = forward.model

    def of_microbatch(microbatch: Batch, index: Any) -> tuple[PyTree, Metrics]:
        micro_key = None if key is None else jax.random.fold_in(key, index)

        def mean_loss(trained: PyTree) -> tuple[jax.Array, Metrics]:
            sums = loss_sums(forward, objective, model.whole(params, trained), microbatch, micro_key)
            return sums["loss"] / divisor, sums

        return jax.grad(mean_loss, has_aux=True)(model.trained(params))

    into_layout = functools.partial(
        _into, "gradients", forward.plan.layouts().grads, forward.model, forward.mesh, manual_axes=forward.manual_axes
    )
    return accumulate(of_microbatch, batch, forward.plan.accumulate, into_layout)


def make_step(
    model: Model, tx: optax.GradientTransformation, plan: Plan, mesh: Mesh, objective: Objective
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step as a function to jit. Metrics are scalars: loss and nll a token, grad_norm before clipping, tokens,
    `data`, a checksum of the batch, and `updates` after the step; where the loss is scaled also the `loss_scale` of
    this step, whether it was `skipped` (0 or 1), and `skipped_in_a_row`.
    """
    forward = Forward(model, plan, mesh)
    layouts, scaling = plan.layouts(), plan.precision.loss_scale

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = None if state.scale is None else state.scale.scale
        key = jax.random.fold_in(state.key, state.step)
        with placed(plan.placement(mesh)):
            grads, sums = gradients(forward, objective, state.params, batch, key, scale)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if scale is not None:
            grads = jax.tree.map(lambda g: g / scale, grads)
        with jax.named_scope("gradient_norm"):
            norm = optax.tree_utils.tree_norm(grads)
        if objective.clip_norm is not None:
            factor = jnp.minimum(1.0, objective.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * factor, grads)
        # The update runs where the moments lie: with ZeRO 1-3 each device updates its part, then the parameters go back
        # to their own layout.
        weights = model.trained(state.params) if state.master is None else state.master
        # optax mixes dtypes where a strict caller may not
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, state.opt_state, weights)
            weights = optax.apply_updates(weights, updates)
        weights = _into("optimizer", layouts.optimizer, model, mesh, weights)
        cast = jax.tree.map(lambda w: w.astype(plan.precision.param_dtype), weights)
        params = model.whole(state.params, _into("parameters", layouts.params, model, mesh, cast))
        tokens = jnp.where(sums["tokens"] > 0, sums["tokens"], 1.0)
        metrics = {name: value / tokens for name, value in sums.items() if name != "tokens"}
        metrics |= {"tokens": sums["tokens"], "grad_norm": norm, "data": checksum(batch.tokens)}
        new = dataclasses.replace(
            state,
            updates=state.updates + 1,
            params=params,
            master=None if state.master is None else weights,
            opt_state=opt_state,
        )
        if state.scale is not None:
            finite = jnp.isfinite(norm)  # of all gradients on all devices: one number, so that all decide alike
            new = jax.tree.map(functools.partial(jnp.where, finite), new, state)
            new_scale = next_scale(scaling, state.scale, finite, dynamic=plan.precision.scales_dynamically)
            new = dataclasses.replace(new, scale=new_scale)
            metrics |= {
                "loss_scale": state.scale.scale,
                "skipped": 1.0 - finite.astype(jnp.float32),
                "skipped_in_a_row": new_scale.skipped_in_a_row,
            }
        return dataclasses.replace(new, step=state.step + 1), {**metrics, "updates": new.updates}

    return step


def checksum(tokens: jax.Array) -> jax.Array:
    """A uint32 that tells batches apart by their tokens and places, int32 `[batch, seq]`, and is the same for every
    split: two runs that log the same numbers were trained on the same data.
    """
    place = jnp.arange(tokens.size, dtype=jnp.uint32).reshape(tokens.shape)
    mixed = (tokens.astype(jnp.uint32) + 1) * (2 * place + 1) * jnp.uint32(2654435761)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)  # wraps around, so the order of the sum does not matter


def _into(
    scope: str, layout: Layout, model: Model, mesh: Mesh, tree: PyTree, manual_axes: frozenset[str] = frozenset()
) -> PyTree:
    """A tree of the trained parameters' shapes in a layout; `scope` names what moves for that, before the path of the
    leaf.
    """

    def one(path: str, leaf: jax.Array, axes: Axes) -> jax.Array:
        spec = place(layout, axes, leaf.shape, mesh, path=path, manual_axes=manual_axes).spec
        with jax.named_scope(f"{scope}/{path}"):
            return split_as(leaf, spec, mesh, manual_axes)

    return map_leaves(one, tree, model.trained(model.axes))
