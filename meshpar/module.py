"""The one door to flax.nnx: a module becomes shapes, logical axes and pure functions over a nested dict of arrays.

nnx defines modules and nothing else: parameters are `nnx.Param(value, axes=("embed", "mlp"))`, with "axes" naming each
dim. Outside this file and `models/` there is a pytree (nested dicts) and a like tree of axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshpar.interfaces import Axes, Batch, LanguageModel, PyTree
from meshpar.layout.resolve import path_name

VECTORS = ("scale", "bias")  # leaves of these names are norms and biases: not decayed, not cast for use


def is_norm_or_bias(path: str) -> bool:
    """Whether a leaf is a norm scale or a bias: by its name, since stacking changes its rank."""
    return path.rsplit("/", 1)[-1] in VECTORS


def named(module: nnx.Module) -> AbstractContextManager[Any]:
    """A name scope for what a module computes, after its place in the model: `with named(self):` in its `__call__`.
    Profiles show it, and a report of collectives says by it whose they are.
    """
    return jax.named_scope(getattr(module, "scope", None) or type(module).__name__)


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """`layers` modules as one, every parameter with "layers" in front; layer i is drawn from its own key, so depth
    changes none of the others.

    The result is for `LanguageModel.blocks`: it is not called itself, the layer loop slices it.
    """
    base = rngs.params()
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=jax.random.key(0)))))
    keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(jax.numpy.arange(layers))
    state = jax.vmap(lambda key: nnx.split(make(nnx.Rngs(params=key)))[1])(keys)
    module = nnx.merge(graphdef, state)
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            param.set_metadata("axes", ("layers", *param.get_metadata().get("axes", ())))
    return module


@dataclass(frozen=True, eq=False)
class Model:
    """A model without its arrays: shapes, logical axes, how to draw parameters and how to call its parts with given
    ones.
    """

    config: Any
    shapes: PyTree  # jax.ShapeDtypeStruct leaves
    axes: PyTree  # a tuple of logical axes for each leaf
    init: Callable[[jax.Array], PyTree]  # key -> fp32 parameters; the same values whatever the sharding
    layer_constants: PyTree  # arrays [layers, ...] that are not trained; an empty dict for most models
    _bind: Callable[[PyTree], Any]
    _bind_block: Callable[[PyTree], Any]
    frozen: frozenset[str] = frozenset()  # paths of parameters that are used and not trained

    def trained(self, tree: PyTree) -> PyTree:
        """The part of a tree of parameters, or of their axes, that is trained: the tree itself where all of it is."""
        return _part(tree, lambda path: path not in self.frozen) if self.frozen else tree

    def untrained(self, tree: PyTree) -> PyTree:
        """The other part: what is frozen."""
        return _part(tree, lambda path: path in self.frozen)

    def whole(self, tree: PyTree, trained: PyTree) -> PyTree:
        """A tree with another trained part; what is frozen stays."""
        return _joined(self.untrained(tree), trained) if self.frozen else trained

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes))

    @property
    def layers(self) -> int:
        """The number of stacked blocks."""
        return int(jax.tree.leaves(self.shapes["blocks"])[0].shape[0])

    @property
    def layer_axes(self) -> PyTree:
        """The logical axes of one block's parameters."""
        return jax.tree.map(lambda axes: axes[1:], self.axes["blocks"], is_leaf=lambda axes: isinstance(axes, tuple))

    @property
    def layer_shapes(self) -> PyTree:
        """The shapes of one block's parameters."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.shapes["blocks"])

    def bind(self, params: PyTree) -> LanguageModel:
        """The module with these parameters, to call its parts."""
        return self._bind(params)

    def bind_block(self, params: PyTree) -> Any:
        """One block with the parameters of one layer."""
        return self._bind_block(params)

    def call_block(
        self, lm: LanguageModel, params: PyTree, constants: PyTree, x: jax.Array, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """One layer of `lm`, with its parameters and its part of `layer_constants`; see `LanguageModel.block`."""
        block: Any = lm.block  # with constants it takes one argument more than the protocol says
        given = (constants,) if self.layer_constants else ()
        y, aux = block(self.bind_block(params), x, batch, key, *given)
        return y, aux


def _part(tree: PyTree, keep: Callable[[str], bool], path: str = "") -> PyTree:
    """The leaves of nested dicts whose paths are kept; a dict that is left empty goes too."""
    found = {}
    for name, value in tree.items():
        at = f"{path}{name}"
        if isinstance(value, dict):
            if inner := _part(value, keep, f"{at}/"):
                found[name] = inner
        elif keep(at):
            found[name] = value
    return found


def _joined(one: PyTree, other: PyTree) -> PyTree:
    """The leaves of two nested dicts that share none."""
    both = {**one, **other}
    return {
        name: _joined(one[name], other[name]) if name in one and name in other else value
        for name, value in both.items()
    }


def abstract(make: Callable[[nnx.Rngs], nnx.Module], config: Any = None) -> Model:
    """Shapes and axes of a model, without memory.

    Args:
      make: builds the module from its random streams, e.g. `lambda rngs: Llama(config, rngs=rngs)`.
      config: kept as `Model.config`.

    Raises:
      ValueError: a part of `LanguageModel` is missing, or a parameter lacks axes; the sentence names it.
    """

    def build(key: jax.Array) -> nnx.Module:
        return make(nnx.Rngs(params=key))

    module = nnx.eval_shape(lambda: build(jax.random.key(0)))
    missing = [part for part in ("blocks", "embed", "block", "head") if not hasattr(module, part)]
    if missing:
        raise ValueError(
            f"{type(module).__name__} has no {missing[0]!r}; "
            "a language model has blocks (made by meshpar.module.stack), embed, block and head"
        )
    _name_modules(module)
    graphdef, state = nnx.split(module)
    block_graphdef, block_state = nnx.split(module.blocks)  # type: ignore[attr-defined]
    others = {type(v).__name__ for _, v in nnx.to_flat_state(state) if not isinstance(v, nnx.Param)}
    if others:
        raise ValueError(
            f"{type(module).__name__} holds {', '.join(sorted(others))}; "
            "only nnx.Param is trained, pass other values as arguments"
        )
    shapes = nnx.to_pure_dict(state)
    constants = {name: np.asarray(values) for name, values in getattr(module, "layer_constants", {}).items()}
    layers = int(jax.tree.leaves(shapes["blocks"])[0].shape[0])
    for name, values in constants.items():
        if values.shape[:1] != (layers,):
            raise ValueError(
                f"{type(module).__name__}.layer_constants: {name} is {values.shape} and there are {layers} layers; "
                "give one entry for each"
            )
    axes = jax.tree_util.tree_map_with_path(_axes, shapes, _metadata(state))
    return Model(
        config=config,
        shapes=shapes,
        axes=axes,
        init=lambda key: nnx.to_pure_dict(nnx.split(build(key))[1]),
        layer_constants=constants,
        _bind=_binder(graphdef, state),
        _bind_block=_binder(block_graphdef, block_state),
    )


def init_sharded(model: Model, key: jax.Array, shardings: PyTree) -> PyTree:
    """Draws the parameters straight into their shards; no device ever holds a whole one that is split."""
    return jax.jit(model.init, out_shardings=shardings)(key)


def _name_modules(root: nnx.Module) -> None:
    """Tells each module its path, that of a block's without the block, for `named`."""
    for path, node in nnx.iter_graph(root):
        if isinstance(node, nnx.Module) and not hasattr(node, "scope"):
            inside = path[1:] if path[:1] == ("blocks",) else path
            node.scope = "/".join(str(part) for part in inside)  # type: ignore[attr-defined]


def _binder(graphdef: Any, state: Any) -> Callable[[PyTree], Any]:
    treedef = jax.tree.structure(state)
    order = [path_name(path) for path, _ in jax.tree.leaves_with_path(nnx.to_pure_dict(state))]

    def bind(params: PyTree) -> Any:
        leaves = jax.tree.leaves_with_path(params)
        names = [path_name(path) for path, _ in leaves]
        if names != order:
            odd = sorted(set(names) ^ set(order))
            raise ValueError(
                f"parameters do not fit the model: {', '.join(odd[:5])} on one side only; "
                "use the tree that Model.init returns"
            )
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, [leaf for _, leaf in leaves]))

    return bind


def _metadata(state: Any) -> PyTree:
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda v: tuple(v.get_metadata().get("axes") or ()), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )
    )


def _axes(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct, axes: Axes) -> Axes:
    if len(axes) != len(shape.shape):
        raise ValueError(
            f"{path_name(path)} has the shape {shape.shape} and axes {axes or 'none'}; name each dim: "
            'nnx.Param(value, axes=("embed", "mlp")), and build the layers with meshpar.module.stack'
        )
    return axes
