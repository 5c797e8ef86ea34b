"""Dtypes by role, and what each mode of rematerialisation computes twice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.precision.policy import Policy
from meshpar.precision.remat import SAVE_NAMES, remat, save_name


@pytest.mark.parametrize(
    ("compute", "storage", "compute_dtype", "param_dtype", "has_master"),
    [
        ("fp32", "cast", "float32", "float32", False),
        ("fp32", "copy", "float32", "float32", False),  # a copy of equal dtype would be a second master
        ("bf16", "cast", "bfloat16", "float32", False),
        ("bf16", "copy", "bfloat16", "bfloat16", True),
    ],
)
def test_only_a_copy_of_fewer_bits_has_a_master_beside_it(
    compute: str, storage: str, compute_dtype: str, param_dtype: str, has_master: bool
) -> None:
    policy = Policy(compute=compute, storage=storage)  # type: ignore[arg-type]
    assert (policy.compute_dtype, policy.param_dtype, policy.has_master) == (compute_dtype, param_dtype, has_master)


@pytest.mark.parametrize("field", ["compute", "storage"])
def test_an_unknown_value_is_refused_with_those_there_are(field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"precision.{field}='fp8' is not one of ")):
        Policy(**{field: "fp8"})


def test_only_known_names_can_be_saved() -> None:
    with pytest.raises(ValueError, match="save_name='mlp_hiden' is not one of qkv, attention, mlp_hidden"):
        save_name(jnp.ones(2), "mlp_hiden")
    np.testing.assert_array_equal(save_name(jnp.ones(2), "qkv"), jnp.ones(2))


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """erf, sin and exp2 each once, of which the first two, whose derivatives need only their inputs, are tagged."""
    h = save_name(jax.lax.erf(x @ w), "mlp_hidden")
    h = save_name(jnp.sin(h), "attention")
    return jnp.exp2(h) @ w.T


def operations(mode: str, save: tuple[str, ...]) -> dict[str, int]:
    """How often the gradient computes each operation of `layer`."""
    wrapped = remat(layer, mode, save)  # type: ignore[arg-type]
    x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
    text = str(jax.make_jaxpr(jax.grad(lambda x, w: wrapped(x, w).sum(), (0, 1)))(x, w))
    return {name: len(re.findall(rf"= {name}\b", text)) for name in ("erf", "sin", "exp2")}


@pytest.mark.parametrize(
    ("mode", "save", "counts"),
    [
        ("none", (), (1, 1, 1)),
        ("full", (), (2, 2, 2)),
        ("full", ("mlp_hidden",), (2, 2, 2)),
        ("selective", ("mlp_hidden",), (1, 2, 2)),
        ("selective", ("mlp_hidden", "attention"), (1, 1, 2)),
        ("selective", ("attention",), (2, 1, 2)),
        ("selective", (), (2, 2, 2)),
    ],
)
def test_a_mode_computes_again_what_it_does_not_save(mode: str, save: tuple[str, ...], counts: tuple[int, ...]) -> None:
    assert tuple(operations(mode, save).values()) == counts


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_gradients_are_those_without_rematerialisation(mode: str) -> None:
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(2, 4)), jnp.float32), jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    expected = jax.grad(lambda x, w: layer(x, w).sum(), (0, 1))(x, w)
    wrapped = remat(layer, mode, tuple(SAVE_NAMES))  # type: ignore[arg-type]
    for got, want in zip(jax.grad(lambda x, w: wrapped(x, w).sum(), (0, 1))(x, w), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_dropout_drops_the_same_elements_when_it_is_computed_again_on_shards(mesh_of: Callable[[str], Mesh]) -> None:
    sharding = NamedSharding(mesh_of("fsdp=4"), PartitionSpec("fsdp"))
    x = jax.device_put(np.ones((16, 8), np.float32), sharding)

    def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        # The product keeps the output's own value in the gradient: zero exactly where the output is.
        return jnp.where(keep, x * x, jnp.float32(0))

    def run(mode: str) -> tuple[np.ndarray, np.ndarray]:
        function = remat(dropped, mode)  # type: ignore[arg-type]

        @jax.jit
        def both(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            out, pull = jax.vjp(lambda x: function(x, key), x)
            return out, pull(jnp.ones_like(out))[0]

        out, gradient = both(x, jax.random.key(3))
        return np.asarray(out), np.asarray(gradient)

    results = {mode: run(mode) for mode in ("none", "full", "selective")}
    for out, gradient in results.values():
        assert 0.3 < (out == 0).mean() < 0.7
        np.testing.assert_array_equal(gradient == 0, out == 0)
    for (out, _), (other, _) in itertools.pairwise(results.values()):
        np.testing.assert_array_equal(out, other)
