"""Pictures: the blocks that jax makes, one colour and one label each, readable for many devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.interfaces import Axes
from meshpar.layout.draw import blocks, compact, draw_array, draw_text, save_png
from meshpar.mesh.build import abstract_mesh
from meshpar.mesh.spec import MeshSpec

P = PartitionSpec
MeshOf = Callable[[str], Mesh]

PICTURE = """\
embedding/table
mesh data=2 fsdp=2 tensor=2
4 blocks, each of 8 x 3 on 2 devices (copies over data)

                    embed=6: fsdp=2
                    ┌───────┬───────┐
vocab=16: tensor=2  │  0,4  │  2,6  │
                    ├───────┼───────┤
                    │  1,5  │  3,7  │
                    └───────┴───────┘
"""


def test_text_picture() -> None:
    mesh = abstract_mesh(MeshSpec(data=2, fsdp=2, tensor=2))
    assert draw_text("embedding/table", (16, 6), ("vocab", "embed"), P("tensor", "fsdp"), mesh) == PICTURE


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((8, 8), ("vocab", "embed"), P("tensor", "fsdp")),
        ((8, 8), ("vocab", "embed"), P(("fsdp", "tensor"))),
        ((8, 8), ("vocab", "embed"), P(None, ("tensor", "data"))),
        ((3, 8, 5), ("layers", "mlp", "embed"), P(None, ("data", "fsdp", "tensor"))),
        ((2, 8, 2, 5), ("layers", "mlp", "embed", None), P("data", "fsdp", "tensor")),
        ((8,), ("embed",), P("data")),
        ((5,), ("embed",), P()),
        ((), (), P()),
    ],
)
def test_blocks_are_those_of_the_array_that_jax_makes(
    mesh_of: MeshOf, shape: tuple[int, ...], axes: Axes, spec: PartitionSpec
) -> None:
    mesh = mesh_of("data=2 fsdp=2 tensor=2")
    picture = blocks(shape, axes, spec, mesh)
    drawn = [
        dim
        for dim, axis in enumerate(axes)
        if (axis or "_", shape[dim]) in {(s.axis, s.size) for s in (picture.rows, picture.columns)}
    ]
    of_device = {device.id: index for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items()}
    cells = [cell for row in picture.holders for cell in row]
    assert sorted(itertools.chain(*cells)) == list(range(8))
    for r, row in enumerate(picture.holders):
        for c, cell in enumerate(row):
            at = ([r] * bool(picture.rows.size)) + ([c] * bool(picture.columns.size))
            for device in cell:
                for dim, block in zip(drawn, at, strict=True):
                    size = (
                        shape[dim] // (picture.rows if dim == drawn[0] and len(drawn) == 2 else picture.columns).blocks
                    )
                    assert (of_device[device][dim].start or 0) == block * size


def test_ids_are_those_of_the_devices_or_places_in_a_mesh_without_devices(mesh_of: MeshOf) -> None:
    mesh = mesh_of("fsdp=2")
    swapped = Mesh(mesh.devices[:, :, ::-1], mesh.axis_names, axis_types=mesh.axis_types)
    assert blocks((4,), ("embed",), P("fsdp"), swapped).holders == (((1,), (0,)),)
    assert blocks((4,), ("embed",), P("fsdp"), abstract_mesh(MeshSpec(fsdp=2))).holders == (((0,), (1,)),)


def test_the_two_dims_that_are_split_most_are_drawn_and_a_third_is_named() -> None:
    mesh = abstract_mesh(MeshSpec(data=2, fsdp=4, tensor=3))
    axes = ("layers", "embed", "heads", "head_dim")
    picture = blocks((2, 4, 6, 4), axes, P(None, "data", "tensor", "fsdp"), mesh)
    assert (str(picture.rows), str(picture.columns)) == ("heads=6: tensor=3", "head_dim=4: fsdp=4")
    assert picture.holders[0][0] == (0, 12)
    assert picture.caption[-1] == "split and not drawn: embed=4: data=2"
    # without splits the large dims are shown, layers last
    whole = blocks((9, 4, 6, 5), axes, P(), mesh)
    assert (whole.rows.axis, whole.columns.axis) == ("heads", "head_dim")
    assert whole.holders == ((tuple(range(24)),),)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([5], "5"),
        ([0, 1], "0,1"),
        ([0, 4], "0,4"),
        (range(8), "0-7"),
        ([0, 2, 4], "0,2,4"),
        ([0, 4, 8, 12, 16, 20, 24, 28], "0,4..28"),
        ([0, 1, 4, 5], "0-1,4-5"),
        ([0, 1, 2, 3, 8, 9, 10, 11], "0-3,8-11"),
        ([0, 1, 4, 5, 8, 9, 12, 13, 16, 17], "0..17 (10)"),
    ],
)
def test_ids_in_few_characters(ids: list[int], text: str) -> None:
    assert compact(ids) == text


@given(st.sets(st.integers(0, 999), min_size=1))
def test_many_ids_never_take_many_characters(ids: set[int]) -> None:
    assert len(compact(sorted(ids))) <= 31


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("spec", [P("fsdp", "tensor"), P(("fsdp", "tensor")), P(None, ("fsdp", "tensor"))])
def test_text_of_many_devices_fits_the_terminal(spec: PartitionSpec, width: int) -> None:
    mesh = abstract_mesh(MeshSpec(data=4, fsdp=16, tensor=16))
    lines = draw_text("w", (1024, 1024), ("vocab", "embed"), spec, mesh, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 32
    assert "…" in "".join(lines)
    assert "255,511..1023" in "".join(lines)  # the last block is shown


SPECS = {
    "fsdp=4 tensor=2": P("fsdp", "tensor"),
    "fsdp=8 tensor=8": P("fsdp", "tensor"),
    "data=4 fsdp=16 tensor=4": P("tensor", "fsdp"),
    "fsdp=64": P(None, "fsdp"),
    "fsdp=256": P("fsdp"),
    "data=256": P(None, "data"),
    "data=8": P(),
}


@pytest.mark.parametrize("mesh", SPECS)
def test_figure_has_a_colour_for_each_block_and_labels_that_do_not_overlap(mesh: str) -> None:
    spec = MeshSpec.parse(mesh)
    figure = draw_array("table", (1024, 1024), ("vocab", "embed"), SPECS[mesh], abstract_mesh(spec))
    figure.set_dpi(100)  # of what is measured below
    (plot,) = figure.axes
    colours = {patch.get_facecolor() for patch in plot.patches}
    n_blocks = math.prod(spec.sizes[axis] for axis in SPECS[mesh] if axis)
    assert len(plot.patches) == len(colours) == n_blocks
    figure.draw_without_rendering()
    page = figure.bbox
    texts = [*figure.texts, *plot.texts, plot.xaxis.label, plot.yaxis.label]
    texts += [*plot.xaxis.get_ticklabels(), *plot.yaxis.get_ticklabels()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(plot.texts) >= min(n_blocks, 16)
    for text, box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (first, second)


def test_a_png_is_written_without_a_display(tmp_path: Path) -> None:
    figure = draw_array("w", (4, 4), ("vocab", "embed"), P("fsdp"), abstract_mesh(MeshSpec(fsdp=2)))
    save_png(figure, tmp_path / "w.png")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1"]
