"""Megatron's rules: each product of a block has one split side, and only kv heads may be fewer than the degree."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec

from meshpar.layout.resolve import place
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.spec import MeshSpec
from meshpar.parallel.compose import compose
from meshpar.parallel.data import data_parallel
from meshpar.parallel.sequence import megatron_sp
from meshpar.parallel.tensor import megatron

P = PartitionSpec
MESH = abstract_mesh(MeshSpec(data=2, tensor=4))


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ("embed heads head_dim", P(None, "tensor")),  # column-split
        ("heads head_dim embed", P("tensor")),  # row-split
        ("embed mlp", P(None, "tensor")),
        ("mlp embed", P("tensor")),
        ("vocab embed", P("tensor")),
        ("embed", P()),
    ],
)
def test_weights_are_split_by_columns_into_a_block_and_by_rows_out_of_it(axes: str, spec: PartitionSpec) -> None:
    names = tuple(axes.split())
    assert place(compose([megatron()]).params, names, (8,) * len(names), MESH, path="w").spec == spec


def test_fewer_kv_heads_are_kept_whole_and_other_axes_are_refused() -> None:
    layout = compose([megatron()]).compute
    assert place(layout, ("embed", "kv_heads", "head_dim"), (8, 2, 8), MESH, path="k").spec == P()
    for axis in ("heads", "mlp", "vocab"):
        with pytest.raises(ValueError, match=f"{axis}=2 is not divisible by tensor=4"):
            place(layout, (axis,), (2,), MESH, path="w")


@pytest.mark.parametrize(
    ("axes", "plain", "sequence_parallel"),
    [
        ("batch seq_residual embed", P("data"), P("data", "tensor")),
        ("batch seq embed", P("data"), P("data")),
        ("batch seq mlp", P("data", None, "tensor"), P("data", None, "tensor")),
        ("batch seq vocab", P("data", None, "tensor"), P("data", None, "tensor")),
    ],
)
def test_sequence_parallelism_splits_only_what_tensor_parallelism_leaves_whole(
    axes: str, plain: PartitionSpec, sequence_parallel: PartitionSpec
) -> None:
    fragments = [data_parallel(("data", "fsdp")), megatron()]
    for layouts, spec in ((compose(fragments), plain), (compose([*fragments, megatron_sp()]), sequence_parallel)):
        assert place(layouts.compute, tuple(axes.split()), (8, 8, 8), MESH, path="x").spec == spec


def test_an_axis_of_another_name_carries_the_same_rules() -> None:
    rules = compose([megatron("expert"), megatron_sp("expert")]).compute
    assert {rule.mesh_axes for rule in rules} == {("expert",)}
