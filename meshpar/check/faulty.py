"""What `faults.py` puts in place of functions that ship: each takes the real one and returns one with a fault in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from meshpar.layout.context import current
from meshpar.layout.resolve import path_name
from meshpar.train.accumulate import split_rows


def degree(axis: str) -> int:
    """The degree of a mesh axis in the step that is traced."""
    placement = current()
    return 1 if placement is None else placement.mesh.shape[axis]


def local_slice(scatter: Any) -> Any:
    def faulty(x: jax.Array, axes: Any, *, scatter_dimension: int, tiled: bool) -> jax.Array:
        size = x.shape[scatter_dimension] // jax.lax.axis_size(axes)
        begin = jax.lax.axis_index(axes) * size
        return jax.lax.dynamic_slice_in_dim(x, begin, size, scatter_dimension)

    return faulty


def summed_twice(scatter: Any) -> Any:
    def faulty(x: jax.Array, axes: Any, **options: Any) -> jax.Array:
        return scatter(jax.lax.psum(x, axes), axes, **options)

    return faulty


def loss_with(lse_of: Callable[[jax.Array, int], jax.Array], vocab_of: Callable[[int, int], int]) -> Any:
    """A cross-entropy over a split vocabulary with another log-sum-exp or size of the vocabulary."""

    def make(original: Any) -> Any:
        def faulty(options: Any, logits: jax.Array, targets: jax.Array) -> Any:
            n = degree("tensor")
            if n == 1:
                return original(options, logits, targets)
            values = logits.astype(jnp.float32)
            counts = jnp.arange(values.shape[-1]) < options.vocab
            lse = lse_of(jnp.where(counts, values, -jnp.inf), n)
            nll = lse - jnp.take_along_axis(values, targets[..., None], axis=-1)[..., 0]
            z = options.z_loss * lse * lse
            even = lse - jnp.where(counts, values, 0.0).sum(-1) / vocab_of(options.vocab, n)
            return nll + z + options.label_smoothing * (even - nll), nll, z

        return faulty

    return make


def lse(values: jax.Array, n: int) -> jax.Array:
    return jax.nn.logsumexp(values, axis=-1)


def lse_of_one_part(values: jax.Array, n: int) -> jax.Array:
    return jax.nn.logsumexp(values[..., : values.shape[-1] // n], axis=-1)


def lse_of_gathered(values: jax.Array, n: int) -> jax.Array:
    return jax.nn.logsumexp(jnp.concatenate([values] * n, axis=-1), axis=-1)


def mean_of_means(original: Any) -> Any:
    def faulty(forward: Any, objective: Any, params: Any, batch: Any, divisor: Any, key: Any) -> Any:
        count = forward.plan.accumulate
        if count == 1:
            return original(forward, objective, params, batch, divisor, key)
        one = dataclasses.replace(forward, plan=dataclasses.replace(forward.plan, accumulate=1))
        total = None
        for number in range(count):
            part = jax.tree.map(lambda x, number=number: x[number], split_rows(batch, count))
            found = original(one, objective, params, part, jnp.maximum(part.weights.sum(), 1.0) * count, key)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return total

    return faulty


def around_step(faulty_of: Callable[..., Any]) -> Any:
    """Replaces `make_step`; `faulty_of(step, plan, mesh)` is the faulty step."""

    def make(original: Any) -> Any:
        def make_step(model: Any, tx: Any, plan: Any, mesh: Any, objective: Any) -> Any:
            return faulty_of(original(model, tx, plan, mesh, objective), plan, mesh)

        return make_step

    return make


def norm_times(factor_of: Callable[[Any, Any, Any], Any]) -> Any:
    """A step whose gradient norm is off by a factor of (state, plan, mesh)."""

    def faulty_of(step: Any, plan: Any, mesh: Any) -> Any:
        def faulty(state: Any, batch: Any) -> Any:
            real = optax.tree_utils.tree_norm
            factor = factor_of(state, plan, mesh)
            with mock.patch.object(optax.tree_utils, "tree_norm", lambda tree: real(tree) * factor):
                return step(state, batch)

        return faulty

    return around_step(faulty_of)


def scale_of(state: Any, plan: Any, mesh: Any) -> Any:
    return 1.0 if state.scale is None else state.scale.scale


def scaled_again(original: Any) -> Any:
    def faulty(forward: Any, objective: Any, params: Any, batch: Any, key: Any, scale: Any = None) -> Any:
        grads, sums = original(forward, objective, params, batch, key, scale)
        return (grads, sums) if scale is None else (jax.tree.map(lambda g: g * scale, grads), sums)

    return faulty


def stale(step: Any, plan: Any, mesh: Any) -> Any:
    if plan.zero_stage not in (1, 2) or mesh.size == 1:
        return step

    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return dataclasses.replace(new, params=state.params), metrics

    return faulty


def drifting_copies(step: Any, plan: Any, mesh: Any) -> Any:
    if mesh.shape["data"] == 1:
        return step

    def drift(x: jax.Array) -> jax.Array:
        return x * (1 + jnp.float32(1e-6) * jax.lax.axis_index("data").astype(jnp.float32))

    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        spec = jax.sharding.PartitionSpec()
        apart = jax.shard_map(drift, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False)
        params = {name: jax.tree.map(apart, leaf) if name == "norm" else leaf for name, leaf in new.params.items()}
        return dataclasses.replace(new, params=params), metrics

    return faulty


def forgetful(step: Any, plan: Any, mesh: Any) -> Any:
    if plan.zero_stage not in (1, 2) or mesh.size == 1:
        return step

    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)

        def kept(path: Any, leaf: jax.Array, before: jax.Array) -> jax.Array:
            return before if "/mu/" in path_name(path) else leaf

        moments = jax.tree_util.tree_map_with_path(kept, new.opt_state, state.opt_state)
        return dataclasses.replace(new, opt_state=moments), metrics

    return faulty


def tokens_of_all_ranks(step: Any, plan: Any, mesh: Any) -> Any:
    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new, {**metrics, "tokens": metrics["tokens"] * mesh.shape["data"]}

    return faulty


def drawn_per_device(original: Any) -> Any:
    def faulty(model: Any, tx: Any, plan: Any, key: jax.Array) -> Any:
        n = plan.mesh.product
        return original(model, tx, plan, key if n == 1 else jax.random.fold_in(key, n))

    return faulty


def one_key_for_all_microbatches(original: Any) -> Any:
    def faulty(grad: Any, *rest: Any) -> Any:
        return original(lambda microbatch, index: grad(microbatch, 0), *rest)

    return faulty


def one_key_for_all_layers(original: Any) -> Any:
    def faulty(block: Any, *rest: Any) -> Any:
        return original(lambda x, given, layer: block(x, given, 0), *rest)

    return faulty


def mean_of_pieces(original: Any) -> Any:
    def faulty(forward: Any, *rest: Any) -> Any:
        return jax.tree.map(lambda x: x / forward.plan.accumulate, original(forward, *rest))

    return faulty


def shards_out_of_order(original: Any) -> Any:
    def faulty(plan: Any, mesh: Any, *rest: Any) -> Any:
        use, n = original(plan, mesh, *rest), mesh.shape["fsdp"]

        def turned(leaf: jax.Array) -> jax.Array:
            return jnp.roll(leaf, leaf.shape[0] // n) if leaf.ndim == 1 and n > 1 else leaf

        return lambda weights, axes, shapes: jax.tree.map(turned, use(weights, axes, shapes))

    return faulty


def shifted_in_halves(original: Any) -> Any:
    def faulty(**arrays: Any) -> Any:
        tokens, targets = arrays["tokens"], arrays["targets"].copy()
        half = tokens.shape[1] // 2
        targets[:, half - 1] = tokens[:, 0]  # what a roll of the first half brings round
        return original(**{**arrays, "targets": targets})

    return faulty


def one_mask(original: Any) -> Any:
    def faulty(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
        if rate == 0.0 or key is None:
            return x
        keep = jax.random.bernoulli(key, 1 - rate, x.shape[1:])
        return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))

    return faulty


def scale_of_one_part(original: Any) -> Any:
    """A norm whose scale learns from the first part of a sequence that is split over tensor."""

    def faulty(self: Any, x: jax.Array) -> jax.Array:
        placement = current()
        rule = None if placement is None else placement.layout.rule("seq_residual")
        n = degree("tensor") if rule is not None and "tensor" in rule.mesh_axes else 1
        y = original(self, x)
        if n == 1 or x.ndim != 3:
            return y
        mine = jnp.arange(x.shape[1])[None, :, None] < x.shape[1] // n
        frozen = type(self)(x.shape[-1], eps=self.eps)  # the same norm, with a scale that learns nothing
        frozen.scale[...] = jax.lax.stop_gradient(self.scale[...])
        return jnp.where(mine, y, original(frozen, x))

    return faulty


def one_part_of_the_heads(original: Any) -> Any:
    def faulty(x: jax.Array, kernel: jax.Array, inputs: int = 1) -> jax.Array:
        n = degree("tensor")
        if inputs == 2 and n > 1:
            first = (jnp.arange(kernel.shape[0]) < kernel.shape[0] // n)[:, None, None]
            kernel = jnp.where(first, kernel, 0)
        return original(x, kernel, inputs)

    return faulty


def bias_on_each(original: Any) -> Any:
    def faulty(self: Any, y: jax.Array) -> jax.Array:
        row_split = "embed" not in self.kernel.get_metadata()["axes"][: self.inputs]
        for _ in range(degree("tensor") if row_split else 1):
            y = original(self, y)
        return y

    return faulty
