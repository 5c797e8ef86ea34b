"""ZeRO stages as spreads, and what they leave on each device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from meshpar.layout.describe import describe, totals
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.parallel.compose import compose
from meshpar.parallel.tensor import megatron
from meshpar.parallel.zero import zero

AXES = ("data", "fsdp")


@pytest.mark.parametrize(
    ("stage", "optimizer", "grads", "params"),
    [(0, (), (), ()), (1, AXES, (), ()), (2, AXES, AXES, ()), (3, AXES, AXES, AXES)],
)
def test_each_stage_spreads_one_more_tree(stage: int, optimizer: tuple, grads: tuple, params: tuple) -> None:
    fragment = zero(stage, AXES)
    assert (fragment.spread_optimizer, fragment.spread_grads, fragment.spread_params) == (optimizer, grads, params)
    assert fragment.weights == fragment.activations == ()


SHAPES = {"up": jax.ShapeDtypeStruct((6, 8, 32), jnp.float32), "scale": jax.ShapeDtypeStruct((6, 8), jnp.float32)}
NAMES = {"up": ("layers", "embed", "mlp"), "scale": ("layers", "embed")}
WHOLE = 4 * (6 * 8 * 32 + 6 * 8)


@pytest.mark.parametrize(
    ("stage", "divided"), [(0, ""), (1, "optimizer"), (2, "optimizer grads"), (3, "optimizer grads params")]
)
def test_a_spread_tree_has_an_nth_of_its_bytes_on_each_device(stage: int, divided: str) -> None:
    mesh, layouts = abstract_mesh(MeshSpec(data=2, fsdp=4)), compose([zero(stage, AXES)])
    for tree in ("params", "compute", "grads", "optimizer"):
        per_device = totals(describe(getattr(layouts, tree), NAMES, SHAPES, mesh)).bytes_per_device
        assert per_device == (WHOLE // 8 if tree in divided.split() else WHOLE), tree


def test_zero_divides_what_tensor_parallelism_has_left() -> None:
    mesh, layouts = abstract_mesh(MeshSpec(fsdp=4, tensor=2)), compose([megatron(), zero(3, ("fsdp",))])
    scale, up = describe(layouts.params, NAMES, SHAPES, mesh)
    assert (up.dims, scale.dims) == ("layers=6 embed=8/fsdp mlp=32/tensor", "layers=6 embed=8/fsdp")
    assert totals([scale, up]).bytes_per_device == 4 * (6 * 8 * 32 // 8 + 6 * 8 // 4)
