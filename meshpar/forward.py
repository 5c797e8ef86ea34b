"""A model's parts driven under a plan: weights to their compute layout, blocks in a scan, hidden states out.

Step, evaluation and generation share this forward. Weights are cast and gathered inside the layer loop, so
that with ZeRO 3 one layer is whole at a time; their gradients are reduced inside that loop on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshpar.attention.cache import CACHE_AXES, KVCache, continuing, keeping
from meshpar.collectives.gather_weight import gather_weight
from meshpar.interfaces import Axes, Batch, LanguageModel, PyTree
from meshpar.layout.constrain import constrain, split_as
from meshpar.layout.context import current
from meshpar.layout.resolve import dims_over, path_name, place, split_over
from meshpar.module import Model, is_norm_or_bias
from meshpar.plan import Plan
from meshpar.precision.remat import remat


@dataclass(frozen=True, eq=False)
class Forward:
    """A model, a plan and a mesh, ready to run inside a traced function whose placement is entered.

    `manual_axes` are the mesh axes that a surrounding `shard_map` has made manual. Where the placement has a tape, all
    layers are written out and nothing is rematerialised, so that the activations of each are on it.

    Calling it: `(params, batch, key) -> (module bound to usable weights, hidden states [batch, seq_residual, embed],
    auxiliary sums by name)`.
    """

    model: Model
    plan: Plan
    mesh: Mesh
    manual_axes: frozenset[str] = frozenset()

    def __call__(
        self, params: PyTree, batch: Batch, key: jax.Array | None
    ) -> tuple[LanguageModel, jax.Array, dict[str, jax.Array]]:
        placement = current()
        tape = None if placement is None else placement.tape
        use = weights_in_use(self.plan, self.mesh, self.manual_axes)
        lm = self._bind(use, params)
        embed_key, blocks_key = (None, None) if key is None else tuple(jax.random.split(key))
        with jax.named_scope("embed"):
            x = lm.embed(batch, embed_key)

        def block(x: jax.Array, given: PyTree, layer: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            block_key = None if blocks_key is None else jax.random.fold_in(blocks_key, layer)
            if tape is not None:
                tape.where = f"block {layer}"
            y, aux = self._call_block(lm, use, given, x, batch, block_key)
            return y, dict(aux)

        unroll = self._unroll
        if tape is None:
            shapes = {weight.shape[1:] for weight in jax.tree.leaves(params["blocks"])}
            block = remat(block, self.plan.remat, self.plan.remat_save, weights=shapes)
        else:
            unroll = 0
        with jax.named_scope("blocks"):
            x, aux = loop(block, x, self._stacked(params), self.model.layers, unroll)
        if tape is not None:
            tape.where = ""
        return lm, x, {name: value.sum() for name, value in aux.items()}

    def prefill(self, params: PyTree, batch: Batch) -> tuple[LanguageModel, jax.Array, tuple[KVCache, ...]]:
        """The forward without dropout that keeps the keys and values of all positions: module, hidden states, and a
        cache of the length of the rows for each call of `attend` in a block.
        """
        use = weights_in_use(self.plan, self.mesh, self.manual_axes)
        lm = self._bind(use, params)

        def block(x: jax.Array, given: PyTree, layer: Any) -> tuple[jax.Array, tuple[KVCache, ...]]:
            with keeping() as kept:
                y, _ = self._call_block(lm, use, given, x, batch, None)
            return y, tuple(kept)

        x, caches = loop(block, lm.embed(batch, None), self._stacked(params), self.model.layers, self._unroll)
        return lm, x, caches

    def decode(
        self, params: PyTree, batch: Batch, caches: tuple[KVCache, ...]
    ) -> tuple[LanguageModel, jax.Array, tuple[KVCache, ...]]:
        """The forward of one position of each row, `[batch, 1]` with `batch.positions`, after those in `caches`:
        module, hidden states, and the caches with that position written.

        The loop carries the caches, so that XLA writes into the buffers it was given; caches that it scanned over would
        be copied, layer by layer, for each token.
        """
        assert batch.positions is not None, "decode writes each row at its own position"
        use = weights_in_use(self.plan, self.mesh, self.manual_axes)
        lm, positions = self._bind(use, params), batch.positions

        def block(
            carry: tuple[jax.Array, tuple[KVCache, ...]], given: PyTree, layer: Any
        ) -> tuple[tuple[jax.Array, tuple[KVCache, ...]], None]:
            x, caches = carry
            with continuing(caches, layer, positions) as written:
                y, _ = self._call_block(lm, use, given, x, batch, None)
            return (y, jax.tree.map(lambda x: constrain(x, CACHE_AXES, name="cache"), tuple(written))), None

        carry = (lm.embed(batch, None), caches)
        (x, caches), _ = loop(block, carry, self._stacked(params), self.model.layers, self._unroll)
        return lm, x, caches

    def _bind(self, use: Callable[..., PyTree], params: PyTree) -> LanguageModel:
        """The module with usable weights, those of the blocks excepted."""
        shared, axes, shapes = (
            {name: value for name, value in tree.items() if name != "blocks"}
            for tree in (params, self.model.axes, self.model.shapes)
        )
        return self.model.bind({**use(shared, axes, shapes), "blocks": params["blocks"]})

    def _stacked(self, params: PyTree) -> PyTree:
        """What the layers are given, one of each: weights and constants."""
        constants = jax.tree.map(jnp.asarray, self.model.layer_constants)
        return {"weights": params["blocks"], "constants": constants}

    def _call_block(
        self,
        lm: LanguageModel,
        use: Callable[..., PyTree],
        given: PyTree,
        x: jax.Array,
        batch: Batch,
        key: jax.Array | None,
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """One layer, its weights made usable first."""
        weights = use(given["weights"], self.model.layer_axes, self.model.layer_shapes)
        return self.model.call_block(lm, weights, given["constants"], x, batch, key)

    @property
    def _unroll(self) -> int:
        # What is computed or gathered again must not stand in one computation with its first run: XLA would merge them.
        again = self.plan.remat != "none" or (bool(self.plan.layouts().params.spread) and self.mesh.size > 1)
        return 1 if again else self.plan.unroll


def loop(block: Callable[..., Any], carry: PyTree, stacked: PyTree, layers: int, unroll: int) -> tuple[PyTree, PyTree]:
    """Runs `carry, out = block(carry, given, layer)` over what is stacked; `unroll` layers an iteration, 0 for all
    written out. Returns the last carry, and what came out of the layers, stacked.
    """
    if unroll == 0 or unroll >= layers > 1:
        # lax.split, not indexing: its transpose is one concatenation, where each index would add a padded copy of the
        # whole stack.
        split = jax.tree.map(lambda w: jax.lax.split(w, (1,) * layers, axis=0), stacked)
        outs = []
        for layer in range(layers):
            weights = jax.tree.map(
                lambda pieces, layer=layer: pieces[layer][0],
                split,
                is_leaf=lambda leaf: isinstance(leaf, (tuple, list)),
            )
            carry, out = block(carry, weights, layer)
            outs.append(out)
        return carry, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *outs)

    def body(carry: PyTree, scanned: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
        return block(carry, *scanned)

    return jax.lax.scan(body, carry, (stacked, jnp.arange(layers)), unroll=unroll)


def weights_in_use(
    plan: Plan, mesh: Mesh, manual_axes: frozenset[str] = frozenset()
) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """A function (weights, axes, shapes) -> the same weights as the model computes with them: cast, and gathered to the
    compute layout. `shapes` are those of the whole arrays; inside a `shard_map` a weight is a block of it.

    Cost with ZeRO 3: all-gather over the ZeRO axes, (n-1) shards a device, in the compute dtype.

    The transpose of the constraint brings each gradient to the compute layout, as the product that makes it is split,
    so that it is summed there: asked for the gradient layout at once, XLA would rather move the activations. It is
    sliced into the gradient layout after that, which GPUs fuse with the sum into a reduce-scatter, TPUs for some sizes.
    """
    layouts = plan.layouts()

    def one(path: str, weight: jax.Array, axes: Axes, shape: jax.ShapeDtypeStruct) -> jax.Array:
        dtype = weight.dtype if is_norm_or_bias(path) else plan.precision.compute_dtype
        stored, used = (
            place(layout, axes, shape.shape, mesh, path=path).spec for layout in (layouts.params, layouts.compute)
        )
        # as it is stored, so that the gather is here and not where the layer is taken from its stack
        weight = split_as(weight, split_over(stored, without=manual_axes), mesh, manual_axes)
        # cast first: half the bytes are gathered
        weight = gather_weight(weight, dtype, dims_over(stored, manual_axes)) if manual_axes else weight.astype(dtype)
        return split_as(weight, split_over(used, without=manual_axes), mesh, manual_axes)

    def all_of(weights: PyTree, axes: PyTree, shapes: PyTree) -> PyTree:
        def of_path(path: Any, weight: jax.Array, of: Axes, shape: jax.ShapeDtypeStruct) -> jax.Array:
            with jax.named_scope(f"weights/{path_name(path)}"):
                return one(path_name(path), weight, of, shape)

        return jax.tree_util.tree_map_with_path(of_path, weights, axes, shapes)

    return all_of
