"""Faults of parallel training, planted on purpose: what the checker must catch.

Each is a fault that some framework had or that a layout invites, made by replacing a function that ships while a
context is open. `mesh` and `changes` are a case in which it does harm; on one device, or without the feature it belongs
to, the replaced function does what the real one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from meshpar.layout.context import current
from meshpar.layout.resolve import path_name
from meshpar.train.accumulate import split_rows


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: what is replaced, by what, and a case that suffers from it."""

    what: str  # one line
    target: str  # "module:attribute" that is replaced; the attribute may have dots
    make: Callable[[Any], Any]  # the real thing -> the faulty one
    mesh: str
    changes: Mapping[str, str] = field(default_factory=dict)
    recipe: str = "llama"  # or "gpt": which family the case is of


@contextlib.contextmanager
def plant(fault: Fault) -> Iterator[None]:
    """Replaces the function while the context is open. What was compiled before keeps the real one."""
    module, _, attribute = fault.target.partition(":")
    owner = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    with mock.patch.object(owner, name, fault.make(getattr(owner, name))):
        yield


def _degree(axis: str) -> int:
    """The degree of a mesh axis in the step that is traced."""
    placement = current()
    return 1 if placement is None else placement.mesh.shape[axis]


def _local_slice(scatter: Any) -> Any:
    def faulty(x: jax.Array, axes: Any, *, scatter_dimension: int, tiled: bool) -> jax.Array:
        size = x.shape[scatter_dimension] // jax.lax.axis_size(axes)
        begin = jax.lax.axis_index(axes) * size
        return jax.lax.dynamic_slice_in_dim(x, begin, size, scatter_dimension)

    return faulty


def _summed_twice(scatter: Any) -> Any:
    def faulty(x: jax.Array, axes: Any, **options: Any) -> jax.Array:
        return scatter(jax.lax.psum(x, axes), axes, **options)

    return faulty


def _loss_with(lse_of: Callable[[jax.Array, int], jax.Array], vocab_of: Callable[[int, int], int]) -> Any:
    """A cross-entropy over a split vocabulary with another log-sum-exp or size of the vocabulary."""

    def make(original: Any) -> Any:
        def faulty(options: Any, logits: jax.Array, targets: jax.Array) -> Any:
            n = _degree("tensor")
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


def _lse(values: jax.Array, n: int) -> jax.Array:
    return jax.nn.logsumexp(values, axis=-1)


def _lse_of_one_part(values: jax.Array, n: int) -> jax.Array:
    return jax.nn.logsumexp(values[..., : values.shape[-1] // n], axis=-1)


def _lse_of_gathered(values: jax.Array, n: int) -> jax.Array:
    return jax.nn.logsumexp(jnp.concatenate([values] * n, axis=-1), axis=-1)


def _mean_of_means(original: Any) -> Any:
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


def _around_step(faulty_of: Callable[..., Any]) -> Any:
    """Replaces `make_step`; `faulty_of(step, plan, mesh)` is the faulty step."""

    def make(original: Any) -> Any:
        def make_step(model: Any, tx: Any, plan: Any, mesh: Any, objective: Any) -> Any:
            return faulty_of(original(model, tx, plan, mesh, objective), plan, mesh)

        return make_step

    return make


def _norm_times(factor_of: Callable[[Any, Any, Any], Any]) -> Any:
    """A step whose gradient norm is off by a factor of (state, plan, mesh)."""

    def faulty_of(step: Any, plan: Any, mesh: Any) -> Any:
        def faulty(state: Any, batch: Any) -> Any:
            real = optax.tree_utils.tree_norm
            factor = factor_of(state, plan, mesh)
            with mock.patch.object(optax.tree_utils, "tree_norm", lambda tree: real(tree) * factor):
                return step(state, batch)

        return faulty

    return _around_step(faulty_of)


def _scale_of(state: Any, plan: Any, mesh: Any) -> Any:
    return 1.0 if state.scale is None else state.scale.scale


def _scaled_again(original: Any) -> Any:
    def faulty(forward: Any, objective: Any, params: Any, batch: Any, key: Any, scale: Any = None) -> Any:
        grads, sums = original(forward, objective, params, batch, key, scale)
        return (grads, sums) if scale is None else (jax.tree.map(lambda g: g * scale, grads), sums)

    return faulty


def _stale(step: Any, plan: Any, mesh: Any) -> Any:
    if plan.zero_stage not in (1, 2) or mesh.size == 1:
        return step

    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return dataclasses.replace(new, params=state.params), metrics

    return faulty


def _drifting_copies(step: Any, plan: Any, mesh: Any) -> Any:
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


def _forgetful(step: Any, plan: Any, mesh: Any) -> Any:
    if plan.zero_stage not in (1, 2) or mesh.size == 1:
        return step

    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)

        def kept(path: Any, leaf: jax.Array, before: jax.Array) -> jax.Array:
            return before if "/mu/" in path_name(path) else leaf

        moments = jax.tree_util.tree_map_with_path(kept, new.opt_state, state.opt_state)
        return dataclasses.replace(new, opt_state=moments), metrics

    return faulty


def _tokens_of_all_ranks(step: Any, plan: Any, mesh: Any) -> Any:
    def faulty(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new, {**metrics, "tokens": metrics["tokens"] * mesh.shape["data"]}

    return faulty


def _drawn_per_device(original: Any) -> Any:
    def faulty(model: Any, tx: Any, plan: Any, key: jax.Array) -> Any:
        n = plan.mesh.product
        return original(model, tx, plan, key if n == 1 else jax.random.fold_in(key, n))

    return faulty


def _one_key_for_all_microbatches(original: Any) -> Any:
    def faulty(grad: Any, *rest: Any) -> Any:
        return original(lambda microbatch, index: grad(microbatch, 0), *rest)

    return faulty


def _one_key_for_all_layers(original: Any) -> Any:
    def faulty(block: Any, *rest: Any) -> Any:
        return original(lambda x, given, layer: block(x, given, 0), *rest)

    return faulty


def _mean_of_pieces(original: Any) -> Any:
    def faulty(forward: Any, *rest: Any) -> Any:
        return jax.tree.map(lambda x: x / forward.plan.accumulate, original(forward, *rest))

    return faulty


def _shards_out_of_order(original: Any) -> Any:
    def faulty(plan: Any, mesh: Any, *rest: Any) -> Any:
        use, n = original(plan, mesh, *rest), mesh.shape["fsdp"]

        def turned(leaf: jax.Array) -> jax.Array:
            return jnp.roll(leaf, leaf.shape[0] // n) if leaf.ndim == 1 and n > 1 else leaf

        return lambda weights, axes, shapes: jax.tree.map(turned, use(weights, axes, shapes))

    return faulty


def _shifted_in_halves(original: Any) -> Any:
    def faulty(**arrays: Any) -> Any:
        tokens, targets = arrays["tokens"], arrays["targets"].copy()
        half = tokens.shape[1] // 2
        targets[:, half - 1] = tokens[:, 0]  # what a roll of the first half brings round
        return original(**{**arrays, "targets": targets})

    return faulty


def _one_mask(original: Any) -> Any:
    def faulty(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
        if rate == 0.0 or key is None:
            return x
        keep = jax.random.bernoulli(key, 1 - rate, x.shape[1:])
        return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))

    return faulty


def _scale_of_one_part(original: Any) -> Any:
    """A norm whose scale learns from the first part of a sequence that is split over tensor."""

    def faulty(self: Any, x: jax.Array) -> jax.Array:
        placement = current()
        rule = None if placement is None else placement.layout.rule("seq_residual")
        n = _degree("tensor") if rule is not None and "tensor" in rule.mesh_axes else 1
        y = original(self, x)
        if n == 1 or x.ndim != 3:
            return y
        mine = jnp.arange(x.shape[1])[None, :, None] < x.shape[1] // n
        frozen = type(self)(x.shape[-1], eps=self.eps)  # the same norm, with a scale that learns nothing
        frozen.scale[...] = jax.lax.stop_gradient(self.scale[...])
        return jnp.where(mine, y, original(frozen, x))

    return faulty


def _one_part_of_the_heads(original: Any) -> Any:
    def faulty(x: jax.Array, kernel: jax.Array, inputs: int = 1) -> jax.Array:
        n = _degree("tensor")
        if inputs == 2 and n > 1:
            first = (jnp.arange(kernel.shape[0]) < kernel.shape[0] // n)[:, None, None]
            kernel = jnp.where(first, kernel, 0)
        return original(x, kernel, inputs)

    return faulty


def _bias_on_each(original: Any) -> Any:
    def faulty(self: Any, y: jax.Array) -> jax.Array:
        row_split = "embed" not in self.kernel.get_metadata()["axes"][: self.inputs]
        for _ in range(_degree("tensor") if row_split else 1):
            y = original(self, y)
        return y

    return faulty


_SCALED: Final = {"precision.loss_scale.kind": "static"}
_STEP: Final = "meshpar.train.build:make_step"
_LOSS: Final = "meshpar.losses.cross_entropy:_cross_entropy"
_SCATTER: Final = "meshpar.collectives.gather_weight:jax.lax.psum_scatter"

FAULTS: Final[Mapping[str, Fault]] = {
    "psum dropped": Fault(
        what="a gradient that is reduced by an explicit reduce-scatter keeps this device's part only",
        target=_SCATTER,
        make=_local_slice,
        mesh="fsdp=4",
        changes={"precision.reduce": "fp32"},
    ),
    "psum doubled": Fault(
        what="the same gradient is summed over the devices twice",
        target=_SCATTER,
        make=_summed_twice,
        mesh="fsdp=4",
        changes={"precision.reduce": "fp32"},
    ),
    "all-reduce dropped": Fault(
        what="the row-split product of attention is not summed over tensor",
        target="models.nn.linear:linear",
        make=_one_part_of_the_heads,
        mesh="data=2 tensor=2",
    ),
    "local softmax": Fault(
        what="the softmax of a split vocabulary sums over one part of it",
        target=_LOSS,
        make=_loss_with(_lse_of_one_part, lambda vocab, n: vocab),
        mesh="data=2 tensor=2",
    ),
    "gathered logits": Fault(
        what="a loss for split logits is given whole ones, so each device adds the whole sum",
        target=_LOSS,
        make=_loss_with(_lse_of_gathered, lambda vocab, n: vocab),
        mesh="tensor=4",
    ),
    "local vocabulary": Fault(
        what="label smoothing divides by the vocabulary of one device",
        target=_LOSS,
        make=_loss_with(_lse, lambda vocab, n: vocab // n),
        mesh="data=2 tensor=2",
        changes={"objective.label_smoothing": "0.1"},
    ),
    "mean of means": Fault(
        what="each microbatch is divided by its own tokens",
        target="meshpar.train.step:_of_rows",
        make=_mean_of_means,
        mesh="data=2",
        changes={"accumulate": "4"},
    ),
    "clip before unscale": Fault(
        what="gradients are clipped while they carry the loss scale",
        target=_STEP,
        make=_norm_times(_scale_of),
        mesh="data=2",
        changes={**_SCALED, "objective.clip_norm": "1"},
    ),
    "loss scale kept": Fault(
        what="gradients are not divided by the loss scale",
        target="meshpar.train.step:gradients",
        make=_scaled_again,
        mesh="data=2",
        changes=_SCALED,
    ),
    "norm per rank": Fault(
        what="the gradient norm counts each copy of a parameter",
        target=_STEP,
        make=_norm_times(lambda state, plan, mesh: mesh.size**0.5),
        mesh="data=4",
    ),
    "stale weights": Fault(
        what="ZeRO 1 updates its part and does not gather the new parameters",
        target=_STEP,
        make=_around_step(_stale),
        mesh="data=4",
        changes={"zero": "1"},
    ),
    "moments forgotten": Fault(
        what="ZeRO 1 does not write the new first moments back",
        target=_STEP,
        make=_around_step(_forgetful),
        mesh="data=2",
        changes={"zero": "1"},
    ),
    "tokens of all ranks": Fault(
        what="the tokens of a batch that is counted whole are summed over the data ranks again",
        target=_STEP,
        make=_around_step(_tokens_of_all_ranks),
        mesh="data=2",
    ),
    "drawn per device": Fault(
        what="the first parameters depend on how many devices draw them",
        target="meshpar.train.build:init_state",
        make=_drawn_per_device,
        mesh="data=2",
    ),
    "mean of evaluations": Fault(
        what="the evaluation divides its sums by the number of microbatches",
        target="meshpar.train.build:loss_sums",
        make=_mean_of_pieces,
        mesh="data=2",
        changes={"accumulate": "2"},
    ),
    "shards out of order": Fault(
        what="the shards of a norm's scale are gathered in another order",
        target="meshpar.forward:weights_in_use",
        make=_shards_out_of_order,
        mesh="fsdp=2",
    ),
    "copies drift": Fault(
        what="the copies of a norm's scale differ between data ranks",
        target=_STEP,
        make=_around_step(_drifting_copies),
        mesh="data=2",
    ),
    "shift after the split": Fault(
        what="targets are shifted in each half of a row, so that the first half loses its last target",
        target="meshpar.train.rows:_batch",
        make=_shifted_in_halves,
        mesh="data=2",
    ),
    "dropout reused": Fault(
        what="each data rank draws the masks of the first",
        target="meshpar.layout.dropout:_first_row",
        make=lambda original: lambda rows: 0,
        mesh="data=2",
        changes={"accumulate": "2", "model.dropout": "0.2"},
    ),
    "one mask for all rows": Fault(
        what="all rows of a batch have the same dropout mask",
        target="models.llama.model:dropout",
        make=_one_mask,
        mesh="data=2",
        changes={"model.dropout": "0.2"},
    ),
    "microbatches drop alike": Fault(
        what="each microbatch draws the masks of the first",
        target="meshpar.train.step:accumulate",
        make=_one_key_for_all_microbatches,
        mesh="data=2",
        changes={"accumulate": "2", "model.dropout": "0.2"},
        recipe="gpt",
    ),
    "layers drop alike": Fault(
        what="each layer draws the masks of the first",
        target="meshpar.forward:loop",
        make=_one_key_for_all_layers,
        mesh="data=2",
        changes={"model.dropout": "0.2"},
        recipe="gpt",
    ),
    "sequence-parallel norm": Fault(
        what="the gradient of a norm's scale is not summed over the parts of a sequence that tensor splits",
        target="models.nn.norm:RMSNorm.__call__",
        make=_scale_of_one_part,
        mesh="data=2 tensor=2",
        changes={"sequence_parallel": "true"},
    ),
    "bias on each rank": Fault(
        what="the bias of a row-split product is added before the sum over tensor, once by each device",
        target="models.nn.linear:Linear.add_bias",
        make=_bias_on_each,
        mesh="data=2 tensor=2",
        recipe="gpt",
    ),
}
