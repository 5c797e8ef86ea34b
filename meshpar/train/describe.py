"""A training state as rows, before it exists: parameters, master weights and optimizer state, without devices.

Persistent bytes per device follow from the plan alone. With Ψ parameters, N the product of the degrees of
`plan.zero_over`, Adam and bf16 compute, storage "cast" is 4Ψ + 8Ψ, with ZeRO 1 and 2 4Ψ + 8Ψ/N, with ZeRO 3
(4Ψ + 8Ψ)/N; "copy" has 2Ψ and 12Ψ in their place (Rajbhandari et al. 2020, section 3). Tensor parallelism divides what
it splits; leaves that stay whole are counted whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh

from meshpar.interfaces import Axes
from meshpar.layout.describe import Leaf, describe, leaf_of
from meshpar.layout.resolve import map_leaves, path_name, place
from meshpar.mesh.build import abstract_mesh
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.train.state import init_state, state_shardings


def describe_state(model: Model, tx: optax.GradientTransformation, plan: Plan) -> dict[str, list[Leaf]]:
    """Rows of the state that `init_state` makes: "params", "master" (empty without one), "optimizer" and "counters".

    Raises:
      ValueError: the plan has a free mesh axis or does not fit the model.
    """
    mesh, layouts = abstract_mesh(plan.mesh), plan.layouts()
    state = jax.eval_shape(lambda: init_state(model, tx, plan, jax.random.key(0)))
    # state_shardings asks no mesh for its devices.
    shardings: Any = _without_devices(lambda: state_shardings(model, tx, plan, cast(Mesh, mesh)))
    return {
        "params": describe(layouts.params, model.axes, state.params, mesh),
        "master": [] if state.master is None else describe(layouts.optimizer, model.axes, state.master, mesh),
        "optimizer": [
            leaf_of(path_name(path), leaf.shape, leaf.dtype, like.axes, sharding.spec, mesh, like.note)
            for (path, leaf), sharding, like in zip(
                jax.tree.leaves_with_path(state.opt_state),
                jax.tree.leaves(shardings.opt_state),
                jax.tree.leaves(_without_devices(lambda: _optimizer_axes(model, tx, plan))),
                strict=True,
            )
        ],
        "counters": [
            leaf_of(name, leaf.shape, leaf.dtype, (), sharding.spec, mesh)
            for name, leaf, sharding in (("step", state.step, shardings.step), ("key", state.key, shardings.key))
        ],
    }


def persistent_bytes(model: Model, tx: optax.GradientTransformation, plan: Plan) -> int:
    """Bytes on each device between steps: all rows of `describe_state`. Gradients and activations are temporaries."""
    return sum(row.bytes_per_device for rows in describe_state(model, tx, plan).values() for row in rows)


@dataclass(frozen=True)
class _Like:
    """Logical axes of state, and why it is whole (not a pytree, so it stays one leaf)."""

    shape: tuple[int, ...]
    axes: Axes
    note: str


def _without_devices(function: Callable[[], Any]) -> Any:
    """What `function` returns, run in a trace: optax's tree_map_params makes arrays on its way, claiming devices."""
    returned = []
    jax.eval_shape(lambda: returned.append(function()))
    return returned[0]


def _optimizer_axes(model: Model, tx: optax.GradientTransformation, plan: Plan) -> Any:
    """A `_Like` for each leaf of the optimizer state: those of the parameter's shape inherit its axes."""
    mesh, layout = abstract_mesh(plan.mesh), plan.layouts().optimizer
    params = map_leaves(
        lambda path, leaf, axes: _Like(leaf.shape, axes, place(layout, axes, leaf.shape, mesh, path=path).note),
        model.shapes,
        model.axes,
    )

    def of_leaf(leaf: Any, like: _Like) -> _Like:
        return like if leaf.shape == like.shape else other(leaf)

    def other(leaf: Any) -> _Like:
        note = "whole: not of the shape of a parameter" if leaf.shape else ""
        return _Like(leaf.shape, (None,) * len(leaf.shape), note)

    opt_state = jax.eval_shape(tx.init, model.shapes)
    return optax.tree_utils.tree_map_params(tx, of_leaf, opt_state, params, transform_non_params=other)
