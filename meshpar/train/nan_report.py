"""The first tensor that is not finite, by name: of the parameters, then of the activations in the order in which they
are computed, then of the gradients in the order in which the backward makes them.

A step keeps none of this, so the report computes it again, layer by layer, from the parameters and the batch that the
step was given. Asking for it costs a copy of the parameters in each step.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.forward import Forward, weights_in_use
from meshpar.interfaces import Batch, PyTree
from meshpar.layout.context import placed
from meshpar.layout.resolve import path_name
from meshpar.precision.remat import seen_names
from meshpar.train.accumulate import split_rows
from meshpar.train.build import Training
from meshpar.train.step import Objective, gradients
from meshpar.train.trainer import Diverged, Hook


def first_not_finite(
    training: Training, objective: Objective, params: PyTree, batch: Batch, key: jax.Array | None = None
) -> str | None:
    """What is not finite first, such as "layer 3: mlp_hidden", "gradient of blocks/mlp/up/kernel, layer 3"; None when
    all is.

    Args:
      params: parameters as the step was given them.
      batch: on devices, as the step was given it.
      key: of dropout, as the step folded it; None: without dropout.
    """
    for path, fine in jax.device_get(jax.jit(_finite)(params)).items():
        if not fine.all():
            return f"parameter {path}{_layer(fine)}"
    # as the step splits them, whose microbatches have keys of their own
    count = training.plan.accumulate
    split = None if count == 1 else split_rows(batch, count)
    for index in range(count):
        microbatch = batch if split is None else jax.tree.map(lambda x, index=index: x[index], split)
        micro_key = None if key is None else jax.random.fold_in(key, index)
        for name, fine in _activations(training, params, microbatch, micro_key):
            if not fine:
                return name if count == 1 else f"microbatch {index}, {name}"

    def backward(params: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        with placed(training.plan.placement(training.mesh)):
            grads, sums = gradients(
                Forward(training.model, training.plan, training.mesh), objective, params, batch, key
            )
        return jnp.isfinite(sums["loss"]), _finite(grads)

    loss, grads = jax.device_get(jax.jit(backward)(params, batch))
    if not loss:
        return "loss"
    found = {path: fine for path, fine in grads.items() if not fine.all()}
    if not found:
        return None
    path = min(found, key=lambda path: _place_in_backward(path, found[path]))
    return f"gradient of {path}{_layer(found[path], last=True)}"


def _finite(tree: PyTree) -> dict[str, jax.Array]:
    """For each leaf a bool, for those stacked over layers a bool [layers]."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = path_name(path)
        found[name] = jnp.isfinite(leaf).all(axis=tuple(range(int(_stacked(name)), leaf.ndim)))
    return found


def _stacked(path: str) -> bool:
    return path.startswith("blocks/")


def _place_in_backward(path: str, fine: Any) -> tuple[int, int]:
    """The backward runs from the head down: what stands after the layers, then the last layer first, the embedding."""
    if _stacked(path):
        return 1, -max(layer for layer, well in enumerate(fine) if not well)
    return (2 if path.startswith("embed") else 0), 0


def _layer(fine: Any, *, last: bool = False) -> str:
    """Names the first layer that is not fine, or the last."""
    if fine.ndim == 0:
        return ""
    wrong = [layer for layer, well in enumerate(fine) if not well]
    return f", layer {wrong[-1 if last else 0]}"


def _activations(training: Training, params: PyTree, batch: Batch, key: jax.Array | None) -> Iterator[tuple[str, bool]]:
    """Every tagged value of the forward with whether it is finite, in order. Layers run one at a time."""
    model, plan, mesh = training.model, training.plan, training.mesh
    use = weights_in_use(plan, mesh)
    shared_axes = {name: axes for name, axes in model.axes.items() if name != "blocks"}
    shared_shapes = {name: shape for name, shape in model.shapes.items() if name != "blocks"}
    embed_key, blocks_key = (None, None) if key is None else tuple(jax.random.split(key))
    names: list[str] = []  # of what `layer` returns, found when it is traced

    def bound(params: PyTree) -> Any:
        shared = {name: leaf for name, leaf in params.items() if name != "blocks"}
        return model.bind({**use(shared, shared_axes, shared_shapes), "blocks": params["blocks"]})

    def embed(params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with placed(plan.placement(mesh)):
            x = bound(params).embed(batch, embed_key)
        return x, jnp.isfinite(x).all()

    def layer(params: PyTree, x: jax.Array, batch: Batch, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        constants = jax.tree.map(lambda values: jnp.asarray(values)[index], model.layer_constants)
        weights = jax.tree.map(lambda w: w[index], params["blocks"])
        block_key = None if blocks_key is None else jax.random.fold_in(blocks_key, index)
        with placed(plan.placement(mesh)), seen_names() as seen:
            weights = use(weights, model.layer_axes, model.layer_shapes)
            y, _ = model.call_block(bound(params), weights, constants, x, batch, block_key)
        names[:] = [*(name for name, _ in seen), "output"]
        return y, jnp.stack([jnp.isfinite(value).all() for value in (*(value for _, value in seen), y)])

    x, fine = jax.jit(embed)(params, batch)
    yield "embedding of the tokens", bool(fine)
    run = jax.jit(layer)
    for index in range(model.layers):
        x, each = run(params, x, batch, jnp.int32(index))
        for name, fine in zip(names, jax.device_get(each), strict=True):
            yield f"layer {index}: {name}", bool(fine)


class NanReport:
    """The hook that ends a run with the name of the first tensor that is not finite."""

    def __init__(self, training: Training, objective: Objective):
        self._training, self._objective = training, objective
        self._kept: collections.deque[tuple[int, PyTree, Batch, jax.Array]] = collections.deque()
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))

    def hook(self) -> Hook:
        """The hook; its `before` copies the parameters."""
        return Hook(before=self._before, on_metrics=self._on_metrics)

    def _before(self, step: int, state: Any, batch: Batch) -> None:
        key = jax.jit(jax.random.fold_in)(state.key, state.step)
        self._kept.append((step, self._copy(state.params), batch, key))

    def _on_metrics(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        kept, params, batch, key = self._kept.popleft()
        assert kept == step
        if "loss_scale" in metrics:  # then a gradient may overflow now and then, and the step is skipped
            wrong = metrics["skipped_in_a_row"] >= self._training.plan.precision.loss_scale.max_skips
        else:
            wrong = not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
        if not wrong:
            return
        found = first_not_finite(self._training, self._objective, params, batch, key)
        raise Diverged(
            f"step {step}: the first tensor that is not finite is: {found or 'none, when computed again'}; "
            "lower optimizer.lr, warm up longer, or set objective.clip_norm"
        )
