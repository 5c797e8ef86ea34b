"""Rows of a tree, and the three forms that show them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from meshpar.layout.describe import Leaf, as_json, as_table, describe, format_bytes, leaf_of, totals
from meshpar.layout.rules import Layout, Rule
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.spec import MeshSpec

SHAPES = {
    "blocks": {
        "up": jax.ShapeDtypeStruct((4, 6, 16), jnp.bfloat16),
        "scale": jax.ShapeDtypeStruct((4, 6), jnp.float32),
    },
    "table": jax.ShapeDtypeStruct((32, 6), jnp.float32),
    "temperature": jax.ShapeDtypeStruct((), jnp.float32),
}
AXES = {
    "blocks": {"up": ("layers", "embed", "mlp"), "scale": ("layers", "embed")},
    "table": ("vocab", None),
    "temperature": (),
}
LAYOUT = Layout(rules=(Rule(logical="mlp", mesh_axes=("tensor",), source="a test"),), spread=("fsdp",))
MESH = abstract_mesh(MeshSpec(fsdp=4, tensor=2))

ROWS = """\
blocks/scale: layers=4 embed=6, 96, whole over fsdp: no dim of embed=6 divides by 4
blocks/up: layers=4 embed=6 mlp=16/tensor/fsdp, 96,
table: vocab=32/fsdp _=6, 192,
temperature: scalar, 4, whole over fsdp: no dim to split"""


def rows() -> list[Leaf]:
    return describe(LAYOUT, AXES, SHAPES, MESH)


def test_a_row_says_where_an_array_lies_and_what_it_costs_a_device() -> None:
    assert rows()[1] == Leaf(
        path="blocks/up",
        shape=(4, 6, 16),
        dtype="bfloat16",
        axes=("layers", "embed", "mlp"),
        spec=PartitionSpec(None, None, ("tensor", "fsdp")),
        bytes=2 * 4 * 6 * 16,
        bytes_per_device=2 * 4 * 6 * 16 // 8,
        note="",
    )


def test_rows_are_sorted_by_path_and_spell_split_bytes_and_note() -> None:
    lines = [f"{row.path}: {row.dims}, {row.bytes_per_device}, {row.note}".rstrip() for row in rows()]
    assert "\n".join(lines) == ROWS


def test_totals_count_whole_leaves_apart_from_leaves_not_split_as_asked() -> None:
    replicated = describe(Layout(), AXES, SHAPES, MESH)
    assert (totals(replicated).whole, totals(replicated).noted) == (4, 0)
    assert totals(replicated).bytes_per_device == totals(replicated).whole_bytes == totals(replicated).bytes == 1636
    sums = totals(rows())
    assert (sums.leaves, sums.whole, sums.noted, sums.whole_bytes) == (4, 2, 2, 100)
    assert totals([]).bytes == 0


def test_bytes_are_those_of_the_shards_that_jax_makes(mesh_of: object) -> None:
    mesh = mesh_of("fsdp=4 tensor=2")  # type: ignore[operator]
    for row in rows():
        array = jax.device_put(np.zeros(row.shape, row.dtype), NamedSharding(mesh, row.spec))
        assert {shard.data.nbytes for shard in array.addressable_shards} == {row.bytes_per_device}
        assert array.nbytes == row.bytes


def test_keys_of_random_streams_have_bytes_too() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert leaf_of("key", key.shape, key.dtype, (), PartitionSpec(), MESH).bytes_per_device == 8


def test_json_round_trips_and_lists_the_mesh_axes_of_each_dim() -> None:
    values = json.loads(json.dumps(as_json(rows())))
    assert values["leaves"][1]["spec"] == [[], [], ["tensor", "fsdp"]]
    assert values["leaves"][2]["axes"] == ["vocab", None]
    assert values["totals"]["bytes_per_device"] == 388
    assert sum(leaf["bytes_per_device"] for leaf in values["leaves"]) == 388


def shown(table: object) -> list[str]:
    console = Console(width=120, record=True, file=None, quiet=False, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_table_of_a_large_model_fits_120_columns_with_a_line_a_leaf() -> None:
    long = leaf_of(
        "0/mu/blocks/attention/out/kernel",
        (128, 128, 128, 16384),
        jnp.dtype(jnp.bfloat16),
        ("layers", "heads", "head_dim", "embed"),
        PartitionSpec(None, "tensor", None, ("data", "fsdp")),
        abstract_mesh(MeshSpec(data=2, fsdp=4, tensor=8)),
    )
    lines = shown(as_table([long, *rows()], title="optimizer"))
    assert max(len(line) for line in lines) <= 120
    assert next(line for line in lines if line.startswith(long.path)).split() == [
        long.path,
        "layers=128",
        "heads=128/tensor",
        "head_dim=128",
        "embed=16384/data/fsdp",
        "bfloat16",
        "1.00",
        "GiB",
    ]


def test_table_ends_with_totals_and_the_leaves_that_are_not_split_as_asked() -> None:
    lines = [line.strip() for line in shown(as_table(rows(), title="params"))]
    assert lines[0] == "params"
    assert lines[-4].split() == ["total", "388", "B"]
    assert lines[-3:] == [
        "1.60 KiB in all; 2 of 4 leaves are whole on each device, 6.1% of the bytes; 2 not split as asked (*)",
        "* blocks/scale: whole over fsdp: no dim of embed=6 divides by 4",
        "* temperature: whole over fsdp: no dim to split",
    ]
    assert shown(as_table([]))[-1].startswith("0 B in all; 0 of 0 leaves are whole on each device, none of the bytes")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**60, "1024.00 PiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
