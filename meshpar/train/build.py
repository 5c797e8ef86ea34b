"""`build`: a model, an optimizer and a plan become one compiled step.

The placement is entered inside the traced function, shardings in and out are fixed and the state is donated, so nothing
retraces or moves from step to step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from meshpar.attention.attend import check_backend
from meshpar.collectives.report import Report, report
from meshpar.compat import names_in_cache_key
from meshpar.forward import Forward
from meshpar.interfaces import Batch, PyTree
from meshpar.layout.context import placed
from meshpar.layout.resolve import path_name, place
from meshpar.mesh.build import build_mesh
from meshpar.mesh.devices import compiler_options, use_compilation_cache
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.train.accumulate import split_rows
from meshpar.train.state import TrainState, init_state, start_state, state_shardings
from meshpar.train.step import Metrics, Objective, loss_sums, make_step


@dataclass(frozen=True, eq=False)
class Training:
    """One compiled step with what belongs to it. Made by `build`."""

    model: Model
    plan: Plan
    mesh: Mesh
    batch: int  # rows of the global batch
    seq: int  # positions of a row
    shardings: TrainState  # a NamedSharding for each leaf of the state
    batch_sharding: NamedSharding  # of each [batch, seq] leaf of a batch
    _init: Any
    _start: Any
    _step: Any
    _evaluate: Any

    def init(self, seed: int = 0) -> TrainState:
        """A fresh state, drawn straight into its shards; the same values on every mesh."""
        return self._init(jax.random.key(seed))

    def start(self, weights: PyTree, seed: int = 0) -> TrainState:
        """A fresh state of given weights, which it takes over: use them no more.

        Args:
          weights: in the shapes, dtypes and shardings of `abstract_weights`.
          seed: of dropout.
        """
        made = self._start(weights, jax.random.key(seed))  # all but the parameters, which would be copied
        if self.plan.precision.has_master:
            trained, dtype = self.model.trained(weights), self.plan.precision.param_dtype
            cast = jax.jit(
                lambda tree: jax.tree.map(lambda w: w.astype(dtype), tree),
                out_shardings=self.model.trained(self.shardings.params),
            )
            weights = self.model.whole(weights, cast(trained))
        return dataclasses.replace(made, params=weights)

    def abstract_weights(self) -> PyTree:
        """What `start` takes: fp32 where the state has masters of them, else as the state stores parameters."""
        params = self.abstract_state().params
        if not self.plan.precision.has_master:
            return params
        wide = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), self.model.trained(params)
        )
        return self.model.whole(params, wide)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step. `state` is donated: use the returned one. Metrics are on devices: reading one waits
        for the step.
        """
        return self._step(state, batch)

    def evaluate(self, params: PyTree, batch: Batch) -> Metrics:
        """Sums over a batch without dropout: loss, nll, tokens."""
        return self._evaluate(params, batch)

    @functools.cached_property
    def own_rows(self) -> np.ndarray:
        """Which rows of the global batch the devices of this process hold, ascending int [rows]: all where there is one
        process, and the same in processes that differ in no axis of the batch.
        """
        held: Any = self.batch_sharding.addressable_devices_indices_map((self.batch, self.seq))
        return np.unique(np.concatenate([np.arange(self.batch)[rows] for rows, _ in held.values()]))

    def place(self, batch: Batch) -> Batch:
        """The rows `own_rows` of a global batch, from host memory onto the devices.

        Raises:
          ValueError: another shape than the step was built for, or a number that a look-up would clamp: a token or a
            target that counts outside the vocabulary, a position past the model's longest row.
        """
        self._check(batch)

        def placed_leaf(leaf: Any) -> jax.Array:
            mine = np.asarray(leaf)

            def of_device(index: Any) -> np.ndarray:
                rows, positions = index
                first, end, _ = rows.indices(self.batch)
                begin = int(np.searchsorted(self.own_rows, first))  # a device's rows follow one another in own_rows too
                return mine[begin : begin + end - first, positions]

            # make_array_from_process_local_data wants one run of rows from each process, and none twice
            return jax.make_array_from_callback((self.batch, self.seq), self.batch_sharding, of_device)

        return jax.tree.map(placed_leaf, batch)

    def _check(self, batch: Batch) -> None:
        mine = (len(self.own_rows), self.seq)
        for name, leaf in vars(batch).items():
            if leaf is not None and leaf.shape != mine:
                raise ValueError(
                    f"batch.{name} is {leaf.shape} and the step was built for {mine} in each process; "
                    "give such rows, or build with other batch= and seq="
                )
        counts = np.asarray(batch.weights) != 0
        for name, ids, size in (
            ("token", batch.tokens, "vocab"),
            ("target", np.where(counts, batch.targets, 0), "vocab"),
            ("position", batch.positions, "max_seq"),
        ):
            end = getattr(self.model.config, size, None)
            if ids is None or end is None:
                continue
            for worst in (np.max(ids), np.min(ids)):
                if not 0 <= worst < end:
                    raise ValueError(
                        f"the batch holds the {name} {worst} and the model's {size}={end} ends at {end - 1}; "
                        "use the tokenizer and the rows that the model was made for, or a larger model"
                    )

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; a target for restoring and for lowering."""
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings,
        )

    def abstract_batch(self, *, packed: bool = False) -> Batch:
        """Shapes of a batch; with `packed` also segments and positions."""

        def leaf(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch, self.seq), dtype, sharding=self.batch_sharding)

        extra = {"segments": leaf(jnp.int32), "positions": leaf(jnp.int32)} if packed else {}
        return Batch(tokens=leaf(jnp.int32), targets=leaf(jnp.int32), weights=leaf(jnp.float32), **extra)  # type: ignore[arg-type]

    def trace(self, *, packed: bool = False) -> jax.stages.Traced:
        """The step traced ahead of its compilation, which then uses the trace: what a layout cannot do inside shows
        here, as a ValueError.
        """
        return self._step.trace(self.abstract_state(), self.abstract_batch(packed=packed))

    def compile(self, *, packed: bool = False) -> jax.stages.Compiled:
        """The step compiled ahead of its first call, for its memory, its text and its cost."""
        with names_in_cache_key():  # the text tells the lines of today
            return self.trace(packed=packed).lower().compile()

    def collectives(self, compiled: jax.stages.Compiled | None = None) -> Report:
        """What the step communicates, read from the text of the compiled program; compiles it where none is given."""
        compiled = self.compile() if compiled is None else compiled
        paths = [path_name(path) for path, _ in jax.tree.leaves_with_path(self.model.shapes)]
        return report(compiled, self.mesh, paths)


def build(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    batch: int,
    seq: int,
    objective: Objective = Objective(),
    devices: Sequence[jax.Device] | None = None,
) -> Training:
    """Builds the training step of a plan.

    Args:
      model: from `meshpar.module.abstract`.
      tx: any optax transformation; clipping belongs to `objective`, where the norm is logged.
      plan: a free mesh axis is filled with the devices there are.
      batch: rows of the global batch; seq: positions of a row.
      devices: what the mesh is built of; None takes all.

    Raises:
      ValueError: the plan does not fit the model, the batch or the devices; one sentence, before anything compiles.
    """
    plan = plan.on(len(devices) if devices is not None else jax.device_count())
    plan.check(model, batch=batch, seq=seq)
    mesh = build_mesh(plan.mesh, devices)
    check_backend(plan.attention, mesh.devices.flat[0].platform)
    use_compilation_cache()
    spec = place(plan.layouts().compute, ("batch", "seq"), (batch, seq), mesh, path="batch").spec
    batch_sharding = NamedSharding(mesh, spec)
    shardings = state_shardings(model, tx, plan, mesh)
    forward = Forward(model, plan, mesh)
    options = compiler_options(mesh.devices.flat[0].platform)

    def evaluate(params: PyTree, batch: Batch) -> Metrics:
        with placed(plan.placement(mesh)):

            def of_rows(rows: Batch) -> Metrics:
                return loss_sums(forward, objective, params, rows, None)

            if plan.accumulate == 1:
                return of_rows(batch)
            each = jax.lax.map(of_rows, split_rows(batch, plan.accumulate))  # what trains in pieces may not fit whole
            return jax.tree.map(lambda x: x.sum(), each)

    return Training(
        model=model,
        plan=plan,
        mesh=mesh,
        batch=batch,
        seq=seq,
        shardings=shardings,
        batch_sharding=batch_sharding,
        _init=jax.jit(
            functools.partial(init_state, model, tx, plan), out_shardings=shardings, compiler_options=options
        ),
        _start=jax.jit(
            lambda weights, key: dataclasses.replace(start_state(model, tx, plan, weights, key), params=None),
            out_shardings=dataclasses.replace(shardings, params=None),
            compiler_options=options,
        ),
        _step=jax.jit(
            make_step(model, tx, plan, mesh, objective),
            in_shardings=(shardings, batch_sharding),
            out_shardings=(shardings, None),
            donate_argnums=0,
            compiler_options=options,
        ),
        _evaluate=jax.jit(evaluate, in_shardings=(shardings.params, batch_sharding), compiler_options=options),
    )
