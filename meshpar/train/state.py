"""`TrainState`: all that one step reads and writes, one pytree, donated to each step.

Two counters: `step` counts batches, and data and dropout follow it; `updates` counts optimizer updates, and learning
rates follow it. They differ by the steps that loss scaling skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.interfaces import PyTree
from meshpar.layout.resolve import path_name, shardings
from meshpar.module import Model, is_norm_or_bias
from meshpar.plan import Plan
from meshpar.precision.loss_scale import ScaleState, initial_scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What is trained and how far it is.

    `params` are fp32, or in the compute dtype with precision.storage=copy or pure, or where a model does not train
    them; `master` and `opt_state` are of those that are trained. `key` never changes: each step folds
    its number in.
    """

    step: jax.Array  # int32 scalar: batches so far
    updates: jax.Array  # int32 scalar: optimizer updates so far
    params: PyTree
    master: PyTree | None  # fp32, in the optimizer's layout; None when params are the master weights
    opt_state: PyTree
    key: jax.Array  # typed PRNG key: dropout
    scale: ScaleState | None  # None where the policy does not scale the loss


def init_state(model: Model, tx: optax.GradientTransformation, plan: Plan, key: jax.Array) -> TrainState:
    """A fresh state; pure, for `jax.jit` with `state_shardings` or `jax.eval_shape`."""
    params_key, dropout_key = jax.random.split(key)
    return start_state(model, tx, plan, model.init(params_key), dropout_key)


def start_state(
    model: Model, tx: optax.GradientTransformation, plan: Plan, weights: PyTree, key: jax.Array
) -> TrainState:
    """The state before the first step, of given weights (fp32; frozen ones may be as they are stored) and the key of
    dropout. Only trained weights have masters and moments.
    """
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: w.astype(stored_dtype(model, plan, path_name(path))), weights
    )
    weights = model.trained(weights)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        updates=jnp.zeros((), jnp.int32),
        params=params,
        master=weights if plan.precision.has_master else None,
        opt_state=tx.init(jax.tree.map(lambda w: w.astype(jnp.float32), weights)),
        key=key,
        scale=initial_scale(plan.precision.loss_scale) if plan.precision.scales else None,
    )


def stored_dtype(model: Model, plan: Plan, path: str) -> np.dtype[Any]:
    """What the state stores a parameter in. A frozen one is stored as it is used, since nothing is added to it: the
    cast is made once, and half the bytes are held.
    """
    frozen = path in model.frozen and not is_norm_or_bias(path)
    return np.dtype(plan.precision.compute_dtype if frozen else plan.precision.param_dtype)


def state_shardings(model: Model, tx: optax.GradientTransformation, plan: Plan, mesh: Mesh) -> TrainState:
    """A NamedSharding for every leaf of the state: parameters in the plan's params layout, master and moments in its
    optimizer layout.

    Optimizer leaves that have no parameter's shape (counts, factored moments) are replicated.
    """
    layouts = plan.layouts()
    replicated: Any = NamedSharding(mesh, PartitionSpec())  # the state's own type, with shardings for arrays
    shapes = model.trained(model.shapes)
    optimizer = shardings(layouts.optimizer, model.trained(model.axes), shapes, mesh)
    of_params = dict(zip(parameter_shapes(model), jax.tree.leaves(optimizer), strict=True))

    def of_leaf(path: Any, leaf: Any) -> NamedSharding:
        parameter = parameter_of(path_name(path), leaf.shape, parameter_shapes(model))
        return replicated if parameter is None else of_params[parameter]

    return TrainState(
        step=replicated,
        updates=replicated,
        params=shardings(layouts.params, model.axes, model.shapes, mesh),
        master=optimizer if plan.precision.has_master else None,
        opt_state=jax.tree_util.tree_map_with_path(of_leaf, jax.eval_shape(tx.init, shapes)),
        key=replicated,
        scale=jax.tree.map(lambda _: replicated, initial_scale(plan.precision.loss_scale))
        if plan.precision.scales
        else None,
    )


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter that is trained by its path, in the order of the tree's leaves."""
    return {path_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(model.trained(model.shapes))}


def parameter_of(path: str, shape: tuple[int, ...], parameters: Mapping[str, tuple[int, ...]]) -> str | None:
    """The parameter that a leaf of the optimizer state belongs to and has the shape of; None for all others.

    A moment's path ends with the path of its parameter, however optax wraps, masks or partitions it.
    """
    parts = path.split("/")
    for start in range(len(parts)):
        if (name := "/".join(parts[start:])) in parameters:
            return name if parameters[name] == shape else None
    return None
