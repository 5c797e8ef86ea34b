"""A training state as rows, before it exists: parameters, master weights and optimizer state, without devices.

Persistent bytes per device follow from the plan alone. With Ψ parameters, N the product of the degrees of
`plan.zero_over`, Adam and bf16 compute, storage "cast" is 4Ψ + 8Ψ, with ZeRO 1 and 2 4Ψ + 8Ψ/N, with ZeRO 3
(4Ψ + 8Ψ)/N; "copy" has 2Ψ and 12Ψ in their place (Rajbhandari et al. 2020, section 3). Tensor parallelism divides what
it splits; leaves that stay whole are counted whole.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from meshpar.interfaces import Axes
from meshpar.layout.describe import Leaf, describe, leaf_of
from meshpar.layout.resolve import map_leaves, path_name, place
from meshpar.mesh.build import abstract_mesh
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.train.state import init_state, parameter_of, parameter_shapes, state_shardings


def describe_state(model: Model, tx: optax.GradientTransformation, plan: Plan) -> dict[str, list[Leaf]]:
    """Rows of the state that `init_state` makes: "params", "master" (empty without one), "optimizer" and "counters".

    Raises:
      ValueError: the plan has a free mesh axis or does not fit the model.
    """
    mesh, layouts = abstract_mesh(plan.mesh), plan.layouts()
    state = jax.eval_shape(lambda: init_state(model, tx, plan, jax.random.key(0)))
    split: Any = state_shardings(model, tx, plan, cast(Mesh, mesh))  # which asks no mesh for its devices
    axes: dict[str, Axes] = {}
    map_leaves(lambda path, _, of_leaf: axes.update({path: of_leaf}), model.shapes, model.axes)

    def of_optimizer(path: str, leaf: Any, sharding: Any) -> Leaf:
        parameter = parameter_of(path, leaf.shape, parameter_shapes(model))
        if parameter is None:
            note = "whole: not of the shape of a parameter" if leaf.shape else ""
            return leaf_of(path, leaf.shape, leaf.dtype, (None,) * len(leaf.shape), sharding.spec, mesh, note)
        note = place(layouts.optimizer, axes[parameter], leaf.shape, mesh, path=parameter).note
        return leaf_of(path, leaf.shape, leaf.dtype, axes[parameter], sharding.spec, mesh, note)

    counters = {"step": state.step, "updates": state.updates, "key": state.key, "scale": state.scale}
    return {
        "params": describe(layouts.params, model.axes, state.params, mesh),
        "master": []
        if state.master is None
        else describe(layouts.optimizer, model.trained(model.axes), state.master, mesh),
        "optimizer": [
            of_optimizer(path_name(path), leaf, sharding)
            for (path, leaf), sharding in zip(
                jax.tree.leaves_with_path(state.opt_state), jax.tree.leaves(split.opt_state), strict=True
            )
        ],
        "counters": [
            leaf_of(path_name(path), leaf.shape, leaf.dtype, (), PartitionSpec(), mesh)
            for path, leaf in jax.tree.leaves_with_path(counters)
        ],
    }


def step_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on a device while a compiled step runs, as the compiler plans them: arguments, results that take no
    argument's place, and temporaries. On TPU small buffers lie in the chips' own memory and are not among them.
    """
    found = compiled.memory_analysis()
    assert found is not None, "every platform that we compile for tells its memory"
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(kept + found.temp_size_in_bytes)


def persistent_bytes(model: Model, tx: optax.GradientTransformation, plan: Plan) -> int:
    """Bytes on each device between steps: all rows of `describe_state`. Gradients and activations are temporaries."""
    return sum(row.bytes_per_device for rows in describe_state(model, tx, plan).values() for row in rows)
