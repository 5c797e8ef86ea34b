"""`TrainState`: all that one step reads and writes, one pytree, donated to each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.interfaces import PyTree
from meshpar.layout.resolve import shardings
from meshpar.module import Model
from meshpar.plan import Plan


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What is trained and how far it is.

    `params` are fp32, or the compute-dtype copy of `master` with precision.storage=copy. `key` never changes: each step
    folds its number in.
    """

    step: jax.Array  # int32 scalar: optimizer updates so far
    params: PyTree
    master: PyTree | None  # fp32, in the optimizer's layout; None when params are the master weights
    opt_state: PyTree
    key: jax.Array  # typed PRNG key: dropout


def init_state(model: Model, tx: optax.GradientTransformation, plan: Plan, key: jax.Array) -> TrainState:
    """A fresh state; pure, for `jax.jit` with `state_shardings` or `jax.eval_shape`."""
    params_key, dropout_key = jax.random.split(key)
    weights = model.init(params_key)
    params = jax.tree.map(lambda w: w.astype(plan.precision.param_dtype), weights)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        master=weights if plan.precision.has_master else None,
        opt_state=tx.init(weights),
        key=dropout_key,
    )


@dataclass(frozen=True)
class _Like:
    """A parameter's shape and the sharding of state that has that shape (not a pytree, so it stays one leaf)."""

    shape: tuple[int, ...]
    sharding: NamedSharding


def state_shardings(model: Model, tx: optax.GradientTransformation, plan: Plan, mesh: Mesh) -> TrainState:
    """A NamedSharding for every leaf of the state: parameters in the plan's params layout, master and moments in its
    optimizer layout.

    Optimizer leaves that have no parameter's shape (counts, factored moments) are replicated.
    """
    layouts = plan.layouts()
    replicated: Any = NamedSharding(mesh, PartitionSpec())  # the state's own type, with shardings for arrays
    optimizer = shardings(layouts.optimizer, model.axes, model.shapes, mesh)
    like = jax.tree.map(lambda shape, sharding: _Like(shape.shape, sharding), model.shapes, optimizer)

    def of_leaf(leaf: Any, param: _Like) -> NamedSharding:
        return param.sharding if leaf.shape == param.shape else replicated

    opt_shapes = jax.eval_shape(tx.init, model.shapes)
    return TrainState(
        step=replicated,
        params=shardings(layouts.params, model.axes, model.shapes, mesh),
        master=optimizer if plan.precision.has_master else None,
        opt_state=optax.tree_utils.tree_map_params(
            tx, of_leaf, opt_shapes, like, transform_non_params=lambda _: replicated
        ),
        key=replicated,
    )
