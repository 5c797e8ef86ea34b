"""The door to flax.nnx: axes of stacked layers, initial values that no sharding changes, refusals of bad modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.interfaces import LanguageModel
from meshpar.layout.resolve import shardings
from meshpar.mesh.spec import MeshSpec
from meshpar.module import Model, abstract, init_sharded, is_norm_or_bias, stack
from meshpar.plan import Plan
from models.gpt import GPTConfig
from models.llama import LlamaConfig


class Block(nnx.Module):
    """One random matrix and one constant; nothing divides by a power of two above 8."""

    def __init__(self, rngs: nnx.Rngs, axes: Any = ("embed", "mlp")):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (24, 40)), **({} if axes is None else {"axes": axes}))
        self.scale = nnx.Param(jnp.ones((24,)), axes=("embed",))


class Toy(nnx.Module):
    """The least language model."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 3, axes: Any = ("embed", "mlp")):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (56, 24)), axes=("vocab", "embed"))
        self.temperature = nnx.Param(jnp.ones(()))
        self.blocks = stack(lambda rngs: Block(rngs, axes), layers, rngs)

    def embed(self) -> None: ...

    def block(self) -> None: ...

    def head(self) -> None: ...


TOY = abstract(Toy)


@pytest.fixture(scope="module")
def values() -> Any:
    """The parameters of TOY as one device draws them."""
    return jax.device_get(jax.jit(TOY.init)(jax.random.key(7)))


def test_shapes_axes_and_sizes_are_known_without_memory() -> None:
    assert TOY.axes == {
        "blocks": {"up": ("layers", "embed", "mlp"), "scale": ("layers", "embed")},
        "table": ("vocab", "embed"),
        "temperature": (),
    }
    leaves = jax.tree.leaves(TOY.shapes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.float32 for leaf in leaves)
    assert TOY.shapes["blocks"]["up"].shape == (3, 24, 40)
    assert TOY.size == 56 * 24 + 1 + 3 * (24 * 40 + 24)
    assert TOY.layers == 3


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            vocab=9, layers=2, embed=8, heads=4, kv_heads=2, mlp=8, max_seq=8, attention_bias=True, qk_norm=True
        ),
        GPTConfig(vocab=9, layers=2, embed=8, heads=2, max_seq=8, tied=False),
    ],
    ids=["llama", "gpt"],
)
def test_every_stacked_parameter_has_layers_in_front_and_no_other_has(config: Any) -> None:
    model = abstract(config.build, config)
    for name, axes in model.axes.items():
        for leaf in jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple)):
            assert (leaf[0] == "layers") == (name == "blocks")
            assert leaf.count("layers") == (name == "blocks")
    assert {leaf.shape[0] for leaf in jax.tree.leaves(model.shapes["blocks"])} == {2}
    assert model.config is config


def test_a_model_is_made_with_no_mesh_and_under_one_that_lacks_its_axes(mesh_of: Callable[[str], Mesh]) -> None:
    with jax.set_mesh(mesh_of("data=2 tensor=4")):
        under = abstract(Toy)
        drawn = jax.jit(under.init)(jax.random.key(0))
    assert under.axes == TOY.axes
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), under.shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), TOY.shapes
    )
    assert jax.tree.structure(drawn) == jax.tree.structure(TOY.shapes)


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "tensor=8", "data=2 fsdp=2 tensor=2"])
def test_initial_values_do_not_depend_on_the_sharding(mesh: str, mesh_of: Callable[[str], Mesh], values: Any) -> None:
    devices = mesh_of(mesh)
    layout = Plan(mesh=MeshSpec.parse(mesh), zero=3).layouts().params
    wanted = shardings(layout, TOY.axes, TOY.shapes, devices)
    drawn = init_sharded(TOY, jax.random.key(7), wanted)
    assert not drawn["blocks"]["up"].sharding.is_fully_replicated
    assert jax.tree.all(
        jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), drawn, wanted)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(drawn), values)


def test_no_device_holds_a_whole_matrix_that_is_split(mesh_of: Callable[[str], Mesh]) -> None:
    """In the compiled draw, the numbers of a split matrix appear in the shape of its shard alone."""
    mesh = mesh_of("fsdp=8")
    split = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    out = jax.tree.map(lambda leaf: split if leaf.shape == (3, 24, 40) else whole, TOY.shapes)
    text = jax.jit(TOY.init, out_shardings=out).lower(jax.random.key(7)).compile().as_text()
    assert "f32[3,24,5]" in text
    assert "f32[3,24,40]" not in text


def test_a_layer_does_not_depend_on_the_depth_and_differs_from_its_neighbours(values: Any) -> None:
    deeper = jax.jit(abstract(lambda rngs: Toy(rngs, layers=5)).init)(jax.random.key(7))
    np.testing.assert_array_equal(deeper["blocks"]["up"][:3], values["blocks"]["up"])
    np.testing.assert_array_equal(deeper["table"], values["table"])
    up = values["blocks"]["up"]
    assert not np.array_equal(up[0], up[1]) and not np.array_equal(up[1], up[2])
    np.testing.assert_allclose(up.std(), 1.0, atol=0.05)  # 2880 draws: one standard error is 0.013


def test_another_key_draws_other_values(values: Any) -> None:
    other = jax.jit(TOY.init)(jax.random.key(8))
    assert not np.array_equal(other["table"], values["table"])


@pytest.mark.parametrize(
    ("axes", "said"),
    [(None, "('layers',)"), (("embed",), "('layers', 'embed')"), (("a", "b", "c"), "('layers', 'a', 'b', 'c')")],
)
def test_a_parameter_without_an_axis_for_each_dim_is_refused_by_path(axes: Any, said: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"blocks/up has the shape (3, 24, 40) and axes {said}; name each dim")
    ):
        abstract(lambda rngs: Toy(rngs, axes=axes))


def test_a_parameter_outside_the_stack_is_refused_too() -> None:
    class Bare(Toy):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.table = nnx.Param(jnp.ones((4, 4)))

    with pytest.raises(
        ValueError, match=re.escape("table has the shape (4, 4) and axes none; name each dim: nnx.Param(")
    ):
        abstract(Bare)


@pytest.mark.parametrize("part", ["blocks", "embed", "block", "head"])
def test_a_module_that_lacks_a_part_is_refused_naming_it(part: str) -> None:
    parts = {"embed": lambda self: None, "block": lambda self: None, "head": lambda self: None}

    def init(self: Any, rngs: nnx.Rngs) -> None:
        if part != "blocks":
            self.blocks = stack(Block, 2, rngs)

    made = type("Partial", (nnx.Module,), {"__init__": init, **{k: v for k, v in parts.items() if k != part}})
    with pytest.raises(ValueError, match=f"^Partial has no '{part}'; a language model has blocks"):
        abstract(made)


def test_state_that_is_not_a_parameter_is_refused() -> None:
    class Counting(Toy):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.seen = nnx.BatchStat(jnp.zeros(()))

    with pytest.raises(ValueError, match=r"^Counting holds BatchStat; only nnx\.Param is trained"):
        abstract(Counting)


def test_constants_of_layers_have_one_entry_for_each_and_reach_their_block() -> None:
    class Turning(Toy):
        layer_constants: Any = {"turn": np.arange(3)}  # noqa: RUF012

        def block(self, block: Any, x: Any, batch: Any, key: Any, constants: Any) -> Any:
            return x + constants["turn"], {}

    model = abstract(Turning)
    assert model.layer_constants["turn"].tolist() == [0, 1, 2]
    assert model.shapes.keys() == TOY.shapes.keys()
    given = jax.tree.map(jnp.zeros_like, TOY.init(jax.random.key(0)))
    one = jax.tree.map(lambda leaf: leaf[0], given["blocks"])
    y, _ = model.call_block(model.bind(given), one, {"turn": jnp.asarray(2.0)}, jnp.ones(()), Any, None)  # type: ignore[arg-type]
    assert float(y) == 3.0
    Turning.layer_constants = {"turn": np.arange(2)}
    with pytest.raises(ValueError, match=r"Turning.layer_constants: turn is \(2,\) and there are 3 layers; give one"):
        abstract(Turning)


def test_bound_parameters_are_those_that_were_given(values: Any) -> None:
    bound: Any = TOY.bind(values)
    assert isinstance(bound, LanguageModel)
    np.testing.assert_array_equal(bound.table[...], values["table"])
    np.testing.assert_array_equal(bound.blocks.up[...], values["blocks"]["up"])
    one: Any = TOY.bind_block(jax.tree.map(lambda leaf: leaf[1], values["blocks"]))
    np.testing.assert_array_equal(one.up[...], values["blocks"]["up"][1])
    np.testing.assert_array_equal(one.scale[...], np.ones(24, np.float32))


def test_each_leaf_is_bound_to_its_own_name() -> None:
    """Leaves are matched by position, so the order of a module's state must be that of a nested dict's sorted keys."""
    config = LlamaConfig(vocab=9, layers=12, embed=8, heads=4, kv_heads=2, mlp=8, max_seq=8, attention_bias=True)
    model: Model = abstract(config.build, config)
    paths = jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path, simple=True, separator="."), model.shapes)
    bound: Any = model.bind(jax.tree.map(lambda path: _Named(path), paths))
    assert bound.blocks.attention.q.kernel.get_value().path == "blocks.attention.q.kernel"
    assert bound.blocks.mlp.down.kernel.get_value().path == "blocks.mlp.down.kernel"
    assert bound.unembed.kernel.get_value().path == "unembed.kernel"


class _Named:
    """Stands for an array and knows where it belongs."""

    def __init__(self, path: str):
        self.path = path


@pytest.mark.parametrize("missing", [True, False])
def test_a_tree_that_does_not_fit_the_model_is_refused_naming_what_is_odd(missing: bool, values: Any) -> None:
    tree = {name: leaf for name, leaf in values.items() if name != "table"} if missing else values | {"extra": 1}
    odd = "table" if missing else "extra"
    with pytest.raises(ValueError, match=f"parameters do not fit the model: {odd} on one side only"):
        TOY.bind(tree)


def test_norms_and_biases_are_known_by_name_since_stacking_changes_their_rank() -> None:
    assert is_norm_or_bias("blocks/attention_norm/scale") and is_norm_or_bias("bias")
    assert not is_norm_or_bias("blocks/scale/kernel") and not is_norm_or_bias("embedding/table")
