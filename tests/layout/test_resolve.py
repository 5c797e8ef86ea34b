"""`place`: properties for random arrays, rules, spreads and meshes, then the cases that users meet."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.interfaces import Axes
from meshpar.layout.describe import leaf_of
from meshpar.layout.resolve import Placed, map_leaves, path_name, place, shardings
from meshpar.layout.rules import Layout, Rule
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.spec import MeshSpec

MESH_AXES = ("data", "fsdp", "expert", "tensor")
LOGICAL = ("batch", "embed", "mlp", "heads", "layers", None)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Layout, Axes, tuple[int, ...], MeshSpec]:
    """A layout, an array and a mesh, fitting or not; sizes have enough factors that most fit."""
    spec = MeshSpec(**{axis: draw(st.sampled_from([1, 2, 2, 3, 4])) for axis in MESH_AXES})
    axes = tuple(draw(st.lists(st.sampled_from(LOGICAL), max_size=4)))
    shape = tuple(draw(st.sampled_from([1, 2, 4, 6, 12, 24, 48, 96])) for _ in axes)
    present = sorted({axis for axis in axes if axis})
    ruled = draw(st.lists(st.sampled_from(present), unique=True, max_size=2)) if present else []
    rules = tuple(
        Rule(
            logical=logical,
            mesh_axes=tuple(draw(st.lists(st.sampled_from(MESH_AXES), unique=True, max_size=2))),
            source="a test",
            replicate_if_fewer=draw(st.booleans()),
        )
        for logical in ruled
    )
    spread = tuple(draw(st.lists(st.sampled_from(MESH_AXES), unique=True, min_size=1, max_size=3)))
    return Layout(rules=rules, spread=spread), axes, shape, spec


def split_of(placed: Placed, ndim: int) -> list[tuple[str, ...]]:
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in placed.spec]
    return entries + [()] * (ndim - len(entries))


def tried(layout: Layout, axes: Axes, shape: tuple[int, ...], spec: MeshSpec) -> Placed | str:
    """The placement, or the sentence that refuses it."""
    try:
        return place(layout, axes, shape, abstract_mesh(spec), path="a/leaf")
    except ValueError as error:
        return str(error)


@settings(max_examples=150)
@given(placements())
def test_each_mesh_axis_splits_one_dim_and_every_split_divides(drawn: tuple) -> None:
    layout, axes, shape, spec = drawn
    placed = tried(layout, axes, shape, spec)
    if isinstance(placed, str):
        return
    split = split_of(placed, len(shape))
    used = [axis for dim in split for axis in dim]
    assert len(used) == len(set(used))
    assert all(spec.sizes[axis] > 1 for axis in used)
    assert all(size % math.prod(spec.sizes[a] for a in dim) == 0 for size, dim in zip(shape, split, strict=True))


@settings(max_examples=150)
@given(placements())
def test_bytes_on_a_device_times_the_degrees_in_use_are_all_bytes(drawn: tuple) -> None:
    layout, axes, shape, spec = drawn
    placed = tried(layout, axes, shape, spec)
    if isinstance(placed, str):
        return
    mesh = abstract_mesh(spec)
    leaf = leaf_of("a/leaf", shape, jnp.dtype(jnp.float32), axes, placed.spec, mesh)
    degree = math.prod(spec.sizes[axis] for dim in split_of(placed, len(shape)) for axis in dim)
    assert leaf.bytes_per_device * degree == leaf.bytes == 4 * math.prod(shape)
    assert leaf.bytes_per_device == 4 * math.prod(NamedSharding(mesh, placed.spec).shard_shape(shape))


@settings(max_examples=150)
@given(placements())
def test_rules_come_first_and_spread_takes_what_they_left_but_never_layers(drawn: tuple) -> None:
    layout, axes, shape, spec = drawn
    placed = tried(layout, axes, shape, spec)
    if isinstance(placed, str):
        return
    by_rule = split_of(place(Layout(rules=layout.rules), axes, shape, abstract_mesh(spec), path=""), len(shape))
    split = split_of(placed, len(shape))
    for logical, ruled, dim in zip(axes, by_rule, split, strict=True):
        assert dim[: len(ruled)] == ruled
        assert set(dim[len(ruled) :]) <= set(layout.spread)
        assert logical != "layers" or dim == ruled


@settings(max_examples=150)
@given(placements())
def test_a_spread_axis_is_left_out_only_where_no_dim_divides_and_a_note_says_so(drawn: tuple) -> None:
    layout, axes, shape, spec = drawn
    placed = tried(layout, axes, shape, spec)
    if isinstance(placed, str):
        return
    split = split_of(placed, len(shape))
    left = {a for a in layout.spread if spec.sizes[a] > 1} - {axis for dim in split for axis in dim}
    for axis in left:
        for logical, size, dim in zip(axes, shape, split, strict=True):
            assert logical == "layers" or size % math.prod(spec.sizes[a] for a in (*dim, axis))
    noted = re.search(r"whole over ([\w ]+):", placed.note)
    assert (set(noted[1].split()) if noted else set()) == left


@settings(max_examples=150)
@given(placements())
def test_a_refusal_is_one_sentence_that_names_the_array(drawn: tuple) -> None:
    placed = tried(*drawn)
    if isinstance(placed, str):
        assert "a/leaf" in placed and "\n" not in placed


@given(st.integers(1, 200), st.integers(2, 16))
def test_a_rule_divides_or_its_refusal_offers_sizes_that_do(size: int, degree: int) -> None:
    layout = Layout(rules=(Rule(logical="mlp", mesh_axes=("tensor",), source="a test"),))
    placed = tried(layout, ("mlp",), (size,), MeshSpec(tensor=degree))
    if size % degree == 0:
        assert placed == Placed(spec=PartitionSpec("tensor"))
        return
    assert isinstance(placed, str)
    assert placed.startswith(f"mlp={size} is not divisible by tensor={degree} (a/leaf, dim 0); choose tensor in {{")
    choices = [int(choice) for choice in re.search(r"\{(.*)\}", placed)[1].split(", ")]  # type: ignore[index]
    padded = int(placed.rsplit(" ", 1)[1])
    assert choices and all(size % choice == 0 and choice < degree for choice in choices)
    assert padded % degree == 0 and 0 < padded - size < degree


def spread(shape: tuple[int, ...], axes: Axes, mesh: str, over: tuple[str, ...] = ("data", "fsdp")) -> Placed:
    return place(Layout(spread=over), axes, shape, abstract_mesh(MeshSpec.parse(mesh)), path="w")


P = PartitionSpec


@pytest.mark.parametrize(
    ("shape", "axes", "mesh", "spec", "note"),
    [
        # all on one dim if one divides by the product, the largest first
        ((8, 64), ("embed", "mlp"), "data=2 fsdp=4", P(None, ("data", "fsdp")), ""),
        ((64, 8), ("embed", "mlp"), "data=2 fsdp=4", P(("data", "fsdp")), ""),
        # the large dim does not divide, so the small one takes it
        ((65, 8), ("embed", "mlp"), "data=2 fsdp=4", P(None, ("data", "fsdp")), ""),
        ((64, 96), ("embed", "mlp"), "fsdp=3", P(None, "fsdp"), ""),
        ((64, 100), ("embed", "mlp"), "fsdp=5", P(None, "fsdp"), ""),
        # else each where it fits, the largest degree first
        ((4, 2), ("embed", "mlp"), "data=2 fsdp=4", P("fsdp", "data"), ""),
        ((8,), ("embed",), "data=2 fsdp=8", P("fsdp"), "whole over data: no dim of embed=8/fsdp divides by 2"),
        # layers never, so that a loop can slice them
        ((8, 3), ("layers", "embed"), "fsdp=8", P(), "whole over fsdp: no dim of embed=3 divides by 8"),
        # a bias of size 2, a scalar
        ((2,), ("embed",), "fsdp=3", P(), "whole over fsdp: no dim of embed=2 divides by 3"),
        ((), (), "fsdp=3", P(), "whole over fsdp: no dim to split"),
        (
            (3, 5),
            ("embed", None),
            "data=2 fsdp=4",
            P(),
            "whole over fsdp data: no dim of embed=3 _=5 divides by 4 or 2",
        ),
        ((0,), ("embed",), "fsdp=2", P(), "whole over fsdp: no dim of embed=0 divides by 2"),
        # nothing to spread over
        ((7,), ("embed",), "tensor=2", P(), ""),
    ],
)
def test_spread(shape: tuple[int, ...], axes: Axes, mesh: str, spec: PartitionSpec, note: str) -> None:
    assert spread(shape, axes, mesh) == Placed(spec=spec, note=note)


def test_spread_goes_beside_a_rule_where_no_whole_dim_divides() -> None:
    layout = Layout(rules=(Rule(logical="mlp", mesh_axes=("tensor",), source="a test"),), spread=("fsdp",))
    mesh = abstract_mesh(MeshSpec(fsdp=4, tensor=2))
    assert place(layout, ("embed", "mlp"), (4, 64), mesh, path="w").spec == P("fsdp", "tensor")
    assert place(layout, ("embed", "mlp"), (3, 64), mesh, path="w").spec == P(None, ("tensor", "fsdp"))
    whole = place(layout, ("embed", "mlp"), (3, 4), mesh, path="w")
    assert whole == Placed(spec=P(None, "tensor"), note="whole over fsdp: no dim of embed=3 mlp=4/tensor divides by 4")


KV = Layout(
    rules=(
        Rule(logical="heads", mesh_axes=("tensor",), source="tensor parallelism"),
        Rule(logical="kv_heads", mesh_axes=("tensor",), source="tensor parallelism", replicate_if_fewer=True),
    )
)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "spec"), [(2, 4, P()), (1, 8, P()), (4, 4, P("tensor")), (8, 4, P("tensor"))]
)
def test_fewer_kv_heads_than_the_degree_stay_whole_with_a_note(kv_heads: int, tensor: int, spec: PartitionSpec) -> None:
    placed = place(KV, ("kv_heads",), (kv_heads,), abstract_mesh(MeshSpec(tensor=tensor)), path="k")
    assert placed.spec == spec
    assert placed.note == ("" if spec else f"kv_heads={kv_heads} is fewer than tensor={tensor}: whole on each")


@pytest.mark.parametrize(
    ("axes", "size", "tensor", "sentence"),
    [
        ("heads", 6, 4, "heads=6 is not divisible by tensor=4 (k, dim 0); choose tensor in {3, 2, 1} or make heads 8"),
        ("heads", 2, 4, "heads=2 is not divisible by tensor=4 (k, dim 0); choose tensor in {2, 1} or make heads 4"),
        (
            "kv_heads",
            3,
            2,
            "kv_heads=3 is not divisible by tensor=2 (k, dim 0); choose tensor in {1} or make kv_heads 4",
        ),
        (
            "kv_heads",
            3,
            4,
            "kv_heads=3 is not divisible by tensor=4 (k, dim 0); choose tensor in {3, 1} or make kv_heads 4",
        ),
    ],
)
def test_heads_that_neither_divide_nor_replicate_are_refused(axes: str, size: int, tensor: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        place(KV, (axes,), (size,), abstract_mesh(MeshSpec(tensor=tensor)), path="k")


def test_a_dim_that_two_axes_split_is_refused_by_their_product() -> None:
    layout = Layout(rules=(Rule(logical="batch", mesh_axes=("data", "fsdp"), source="a test"),))
    with pytest.raises(ValueError, match=re.escape("batch=12 is not divisible by data*fsdp=8 (x, dim 0)")):
        place(layout, ("batch",), (12,), abstract_mesh(MeshSpec(data=2, fsdp=4)), path="x")


def test_one_mesh_axis_for_two_dims_is_refused_naming_both_rules() -> None:
    rules = tuple(Rule(logical=name, mesh_axes=("fsdp",), source=f"source {name}") for name in ("batch", "mlp"))
    sentence = (
        "x ('batch', 'mlp'): mesh axis 'fsdp' would split two dims, "
        "by batch -> fsdp (from source batch) and mlp -> fsdp (from source mlp); drop one of the rules"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        place(Layout(rules=rules), ("batch", "mlp"), (8, 8), abstract_mesh(MeshSpec(fsdp=2)), path="x")
    # without a degree there is nothing to collide
    assert place(Layout(rules=rules), ("batch", "mlp"), (8, 8), abstract_mesh(MeshSpec()), path="x").spec == P()


def test_axes_and_shape_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("w: 1 logical axes ('embed',) for the shape (2, 3); name each dim")):
        place(Layout(), ("embed",), (2, 3), abstract_mesh(MeshSpec()), path="w")


def test_manual_axes_are_left_to_the_shard_map_that_made_them() -> None:
    layout = Layout(rules=(Rule(logical="batch", mesh_axes=("data", "fsdp"), source="a test"),), spread=("tensor",))
    mesh = abstract_mesh(MeshSpec(data=2, fsdp=4, tensor=2))
    # 4 rows are what a block of 8 has on each of data=2
    manual = frozenset({"data", "tensor"})
    assert place(layout, ("batch", "embed"), (4, 6), mesh, path="x", manual_axes=manual) == Placed(spec=P("fsdp"))


def test_shardings_places_each_leaf_of_a_tree_under_its_path() -> None:
    shapes = {"mlp": {"up": jax.ShapeDtypeStruct((6, 8), jnp.float32), "scale": jax.ShapeDtypeStruct((), jnp.float32)}}
    axes = {"mlp": {"up": ("embed", "mlp"), "scale": ()}}
    mesh = abstract_mesh(MeshSpec(fsdp=4))
    got = shardings(Layout(spread=("fsdp",)), axes, shapes, mesh)
    assert got == {"mlp": {"up": NamedSharding(mesh, P(None, "fsdp")), "scale": NamedSharding(mesh, P())}}
    paths = map_leaves(lambda path, leaf, leaf_axes: (path, leaf.ndim, leaf_axes), shapes, axes)
    assert paths["mlp"] == {"up": ("mlp/up", 2, ("embed", "mlp")), "scale": ("mlp/scale", 0, ())}
    rule = Rule(logical="mlp", mesh_axes=("fsdp",), source="mine")
    with pytest.raises(ValueError, match=re.escape("mlp=8 is not divisible by fsdp=3 (mlp/up, dim 1)")):
        shardings(Layout(rules=(rule,)), axes, shapes, abstract_mesh(MeshSpec(fsdp=3)))


def test_path_names_join_keys_indices_and_attributes() -> None:
    ((path, _),) = jax.tree.leaves_with_path({"a": [0, {"b": None}][:1]})
    assert path_name(path) == "a/0"
