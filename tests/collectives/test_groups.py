"""Replica groups in each way that XLA writes them, and the mesh axes that they cross."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.collectives.groups import axes_of, between_slices, groups_of

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
FSDP = ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(
    "text",
    [
        "replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}",
        "channel_id=3, replica_groups=[4,2]<=[2,2,2]T(0,2,1), use_global_device_ids=true",
        "replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}, dimensions={0}",
        "replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(0,2,1)) {'c'}",
        "replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=(0,2,1,3,4,6,5,7) {'c'}",
        "replica_groups=mesh['a'=8] {'a':(2)2}",
    ],
)
def test_each_way_to_write_groups_names_the_same_axis(text: str) -> None:
    groups = groups_of(text, 8)
    assert sorted(groups) == list(FSDP)
    assert axes_of(groups, MESH) == ("fsdp",)


def test_pairs_of_a_permute_name_the_axis_along_which_they_move() -> None:
    pairs = groups_of("channel_id=1, source_target_pairs={{0,2},{2,0},{1,3},{3,1},{5,5}}", 8)
    assert pairs == ((0, 2), (2, 0), (1, 3), (3, 1))  # what stays moves nothing
    assert axes_of(pairs, MESH) == ("fsdp",)
    assert axes_of(((0, 3),), MESH) == ("fsdp", "tensor")


def test_groups_that_are_not_named_are_one_of_all_devices() -> None:
    everyone = (tuple(range(8)),)
    assert groups_of("replica_groups={}, to_apply=%add", 8) == everyone
    assert groups_of("channel_id=1, replica_groups={{0}}, to_apply=%add", 8) == everyone  # one replica, all partitions
    assert groups_of("replica_groups={{0}}, to_apply=%add", 8) == ((0,),)
    assert axes_of(everyone, MESH) == ("data", "fsdp", "tensor")
    assert axes_of(((0,), (1,)), MESH) == ()


def test_slices_are_runs_of_positions() -> None:
    assert between_slices(2, 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert axes_of(between_slices(2, 8), MESH) == ("data",)
    assert axes_of(between_slices(4, 8), MESH) == ("data", "fsdp")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_over_any_axes_of_any_mesh_are_named_in_all_ways(sizes: list[int], data: st.DataObject) -> None:
    mesh = {f"axis{place}": size for place, size in enumerate(sizes)}
    dims = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
    rest = [dim for dim in range(len(sizes)) if dim not in dims]
    devices, members = math.prod(sizes), math.prod(sizes[dim] for dim in dims)
    rows = np.arange(devices).reshape(sizes).transpose(*rest, *dims).reshape(-1, members)
    lists = ",".join("{" + ",".join(map(str, row)) + "}" for row in rows)
    shape, order = ",".join(map(str, sizes)), ",".join(map(str, [*rest, *dims]))
    own = ",".join(f"'{name}'={size}" for name, size in mesh.items())
    chosen = ",".join(f"'axis{dim}'" for dim in dims)
    pairs = ",".join(f"{{{a},{b}}}" for row in rows for a, b in itertools.permutations(row.tolist(), 2))
    crossed = tuple(f"axis{dim}" for dim in dims if sizes[dim] > 1)
    for text in (
        f"replica_groups={{{lists}}}",
        f"replica_groups=[{len(rows)},{members}]<=[{shape}]T({order})",
        f"replica_groups=mesh[{own}] {{{chosen}}}",
        f"source_target_pairs={{{pairs}}}",
    ):
        assert axes_of(groups_of(text, devices), mesh) == crossed, text
        if "pairs" not in text:
            assert groups_of(text, devices) == tuple(map(tuple, rows.tolist())), text
