"""`constrain` and `einsum`: plain JAX without a placement, constraints by name under one, sentences for mistakes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.layout.constrain import constrain, einsum
from meshpar.layout.context import Placement, current, placed
from meshpar.layout.rules import Layout, Rule

MeshOf = Callable[[str], Mesh]
P = PartitionSpec


def layout(**rules: str) -> Layout:
    return Layout(
        rules=tuple(Rule(logical=k, mesh_axes=tuple(v.split()), source=f"the test's {k}") for k, v in rules.items())
    )


USUAL = layout(batch="data fsdp", mlp="tensor")


def under(placement: Placement, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`function(*arrays)` traced with a placement, as the step builder does it."""

    def traced(*arrays: jax.Array) -> jax.Array:
        with placed(placement):
            return function(*arrays)

    return jax.jit(traced)(*arrays)


def test_without_a_placement_constrain_returns_its_argument() -> None:
    x = jnp.ones((3, 5))
    assert current() is None
    assert constrain(x, "batch mlp") is x


def test_constrain_splits_an_array_by_the_rules_of_its_axes(mesh_of: MeshOf) -> None:
    mesh = mesh_of("data=2 fsdp=2 tensor=2")
    x = jnp.arange(8 * 3 * 6.0).reshape(8, 3, 6)
    y = under(Placement(mesh=mesh, layout=USUAL), lambda x: constrain(x, "batch seq mlp"), x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")), 3)
    np.testing.assert_array_equal(y, x)


def test_an_underscore_is_a_dim_that_stays_whole(mesh_of: MeshOf) -> None:
    mesh = mesh_of("data=4 tensor=2")
    y = under(Placement(mesh=mesh, layout=USUAL), lambda x: constrain(x, "_ mlp"), jnp.ones((3, 4)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "tensor")), 2)


def test_two_placements_of_one_function_give_two_programs(mesh_of: MeshOf) -> None:
    """A placement that is entered outside jit would be ignored by a cached program."""
    mesh = mesh_of("data=2 tensor=4")
    function = lambda x: constrain(x, "batch mlp")  # noqa: E731
    first = under(Placement(mesh=mesh, layout=layout(batch="data")), function, jnp.ones((8, 8)))
    second = under(Placement(mesh=mesh, layout=layout(mlp="tensor")), function, jnp.ones((8, 8)))
    assert first.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert second.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "tensor")), 2)


def test_a_placement_ends_with_its_block_also_after_an_error(mesh_of: MeshOf) -> None:
    outer, inner = (Placement(mesh=mesh_of("data=2"), layout=each) for each in (USUAL, layout()))
    with placed(outer):
        with contextlib.suppress(KeyError), placed(inner):
            assert current() is inner
            raise KeyError
        assert current() is outer
    assert current() is None


@pytest.mark.parametrize(
    ("shape", "axes", "sentence"),
    [
        ((8, 4), "batch", "gate 'batch': 1 logical axes ('batch',) for the shape (8, 4)"),
        ((8, 4), "batch mpl", "unknown logical axis 'mpl'; did you mean 'mlp'?"),
    ],
)
@pytest.mark.parametrize("mesh", ["data=2 tensor=4", "data=1"])
def test_wrong_names_are_refused_on_every_mesh_even_of_one_device(
    mesh_of: MeshOf, mesh: str, shape: tuple[int, ...], axes: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)), placed(Placement(mesh=mesh_of(mesh), layout=USUAL)):
        constrain(jnp.ones(shape), axes, name="gate")


def test_a_dim_that_does_not_divide_is_refused_instead_of_padded_or_replicated(mesh_of: MeshOf) -> None:
    sentence = "mlp=6 is not divisible by tensor=4 (gate 'batch mlp', dim 1); choose tensor in {3, 2, 1} or make mlp 8"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        under(
            Placement(mesh=mesh_of("data=2 tensor=4"), layout=USUAL),
            lambda x: constrain(x, "batch mlp", name="gate"),
            jnp.ones((8, 6)),
        )


def test_one_mesh_axis_for_two_dims_is_refused(mesh_of: MeshOf) -> None:
    placement = Placement(mesh=mesh_of("fsdp=8"), layout=layout(batch="data fsdp", mlp="fsdp"))
    with (
        pytest.raises(ValueError, match="mesh axis 'fsdp' would split two dims, by batch -> data fsdp"),
        placed(placement),
    ):
        constrain(jnp.ones((8, 8)), "batch mlp")


def test_inside_shard_map_constrain_splits_by_the_axes_that_are_still_automatic(mesh_of: MeshOf) -> None:
    mesh = mesh_of("data=2 fsdp=2 tensor=2")
    placement = Placement(mesh=mesh, layout=USUAL, manual_axes=frozenset({"data"}))
    shapes = []

    def body(x: jax.Array) -> jax.Array:
        shapes.append(x.shape)
        with placed(placement):
            return constrain(2 * x, "batch mlp")

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))
    x = jnp.arange(32.0).reshape(8, 4)
    y = mapped(x)
    assert shapes[0] == (4, 4)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), "tensor")), 2)
    np.testing.assert_array_equal(y, 2 * x)


def test_einsum_in_names_equals_einsum_in_letters(mesh_of: MeshOf) -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 3, 6), (6, 2, 8)))
    expected = jnp.einsum("bse,ehd->bshd", x, w)
    equation = "batch seq embed, embed heads head_dim -> batch seq heads head_dim"
    np.testing.assert_array_equal(einsum(equation, x, w), expected)
    mesh = mesh_of("data=4 tensor=2")
    placement = Placement(mesh=mesh, layout=layout(batch="data", heads="tensor"))
    y = under(placement, lambda x, w: einsum(equation, x, w), x, w)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)  # another blocking of 6 fp32 terms
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "tensor")), 4)


def test_einsum_sums_over_names_that_the_result_leaves_out() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(einsum("batch embed -> embed", x), x.sum(0))
    np.testing.assert_array_equal(einsum("batch embed ->", x), x.sum())


def test_einsum_accumulates_in_the_preferred_type() -> None:
    x = jnp.ones((2, 512), jnp.bfloat16)
    y = einsum("batch embed, batch embed -> batch", x, x, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    assert einsum("batch embed, batch embed -> batch", x, x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("equation", "sentence"),
    [
        ("batch embed, embed mlp", "must have one '->'"),
        ("batch embed -> embed -> mlp", "must have one '->'"),
        ("batch embed -> batch", "names 1 operands and got 2; give one array for each"),
        ("batch embed, mlp -> batch", "'mlp' names 1 axes of the shape (3, 4); name each dim once"),
        ("batch embed, embed mlp -> batch vocab", "'vocab' is in the result and in no operand"),
    ],
)
def test_a_wrong_equation_is_one_sentence(equation: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        einsum(equation, jnp.ones((2, 3)), jnp.ones((3, 4)))
    assert repr(equation) in str(caught.value) and "\n" not in str(caught.value)
