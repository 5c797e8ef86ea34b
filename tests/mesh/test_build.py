"""From devices to a Mesh: order, slices and nodes, sizes that do not fit. Devices of other machines are stand-ins."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.mesh.axes import AXES
from meshpar.mesh.build import abstract_mesh, arrange, build_mesh, split_over_slices
from meshpar.mesh.spec import MeshSpec


@dataclass(frozen=True)
class FakeDevice:
    """What build reads of a `jax.Device`."""

    id: int
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    platform: str = "gpu"
    device_kind: str = "fake"


def tpu_slices(n_slices: int, box: tuple[int, int, int], kind: str = "TPU v4") -> list[FakeDevice]:
    """`n_slices` full boxes of chips, ids counting x fastest."""
    x, y, z = box
    cells = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [
        FakeDevice(index, slice_index=s, coords=cell, platform="tpu", device_kind=kind)
        for index, (s, cell) in enumerate(itertools.product(range(n_slices), cells))
    ]


def gpu_nodes(n_nodes: int, per_node: int) -> list[FakeDevice]:
    """One process a node, ids across nodes, no slice_index."""
    return [FakeDevice(index, process_index=index // per_node) for index in range(n_nodes * per_node)]


def shuffled(devices: list[FakeDevice]) -> list[FakeDevice]:
    return random.Random(0).sample(devices, len(devices))


def test_every_axis_is_present_and_auto() -> None:
    mesh = build_mesh(MeshSpec(data=2, tensor=-1))
    assert dict(mesh.shape) == {"stage": 1, "data": 2, "fsdp": 1, "expert": 1, "sequence": 1, "tensor": 4}
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Auto,) * 6


def test_the_abstract_mesh_is_that_of_the_mesh() -> None:
    spec = MeshSpec(fsdp=4, tensor=2)
    abstract, mesh = abstract_mesh(spec), build_mesh(spec)
    assert abstract.shape_tuple == mesh.shape_tuple
    assert abstract.axis_types == mesh.axis_types
    with pytest.raises(ValueError, match="no shape while an axis is -1"):
        abstract_mesh(MeshSpec(fsdp=-1))


@pytest.mark.parametrize("order", [lambda d: d[::-1], shuffled, lambda d: d[3:] + d[:3]])
def test_the_order_in_which_devices_are_passed_changes_nothing(order: Callable[[list], list]) -> None:
    spec = MeshSpec(data=2, fsdp=2, tensor=2)
    mesh, other = build_mesh(spec), build_mesh(spec, order(jax.devices()))
    assert mesh == other
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P(("data", "tensor"))))
    y = jax.device_put(jnp.arange(8.0), NamedSharding(other, P()))
    np.testing.assert_array_equal(jax.jit(jnp.add)(x, y), 2 * np.arange(8.0))


def test_innermost_axis_holds_neighbouring_devices_on_cpu() -> None:
    mesh = build_mesh(MeshSpec(data=4, tensor=2))
    assert [[device.id for device in row] for row in mesh.devices.reshape(4, 2)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_mesh_smaller_than_the_devices_needs_to_be_asked_for() -> None:
    spec = MeshSpec(tensor=4)
    with pytest.raises(ValueError, match=r"4 devices but 8 are there.*--devices 4"):
        build_mesh(spec)
    expected = jax.devices()[:4]
    assert build_mesh(spec, jax.devices()[::-1]).devices.ravel().tolist() == expected
    assert build_mesh(spec, jax.devices()[4:]).devices.ravel().tolist() == jax.devices()[4:]


def test_a_mesh_larger_than_the_devices_is_refused() -> None:
    for devices in (None, jax.devices()):
        with pytest.raises(ValueError, match="16 devices but 8 are there"):
            build_mesh(MeshSpec(data=16), devices)


def test_devices_that_make_no_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match="no devices"):
        build_mesh(MeshSpec(), [])
    with pytest.raises(ValueError, match="given twice"):
        build_mesh(MeshSpec(data=2), [jax.devices()[0]] * 2)
    with pytest.raises(ValueError, match="devices of cpu and gpu"):
        build_mesh(MeshSpec(data=2), [jax.devices()[0], FakeDevice(1)])  # type: ignore[list-item]


@pytest.mark.parametrize("n_devices", [1, 8])
@pytest.mark.parametrize("manual", AXES)
def test_an_axis_of_size_one_can_be_manual_while_the_others_are_automatic(n_devices: int, manual: str) -> None:
    """Every algorithm written as a shard_map body relies on this where its own axis is unused."""
    busy = "data" if manual != "data" else "tensor"
    mesh = build_mesh(MeshSpec(**{busy: n_devices}), jax.devices()[:n_devices])
    sharding = NamedSharding(mesh, P(busy))

    def body(x: jax.Array) -> jax.Array:
        shifted = jax.lax.ppermute(jnp.sin(x), manual, [(0, 0)])
        gathered = jax.lax.all_gather(shifted, manual, axis=0, tiled=True)
        return jax.lax.psum_scatter(gathered, manual, scatter_dimension=0, tiled=True)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(manual), out_specs=P(manual), axis_names={manual})
    x = jnp.arange(16.0).reshape(8, 2)
    value, grad = jax.jit(jax.value_and_grad(lambda x: mapped(x).sum()))(jax.device_put(x, sharding))
    np.testing.assert_allclose(value, np.sin(x).sum(), rtol=1e-6)
    np.testing.assert_allclose(grad, np.cos(x), rtol=1e-6)


# Slices and nodes


@settings(deadline=None)
@given(st.data())
def test_across_times_inside_is_the_mesh_and_fills_the_slices(data: st.DataObject) -> None:
    sizes = [data.draw(st.sampled_from([1, 2, 3, 4, 6]), label=name) for name in AXES]
    spec = MeshSpec(**dict(zip(AXES, sizes, strict=True)))
    divisors = [data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])) for size in sizes]
    n_slices = math.prod(divisors)
    try:
        across, inside = split_over_slices(spec, n_slices)
    except ValueError:
        # Refused exactly when no prefix of the axes, its last one perhaps in part, makes up the slices.
        outer = [math.prod(sizes[:k]) for k in range(len(AXES) + 1)]
        assert not any(n_slices % a == 0 and b % n_slices == 0 for a, b in itertools.pairwise(outer))
        return
    assert tuple(a * i for a, i in zip(across, inside, strict=True)) == tuple(sizes)
    assert math.prod(across) == n_slices
    crossing = [k for k, a in enumerate(across) if a > 1]
    assert all(inside[k] == 1 for k in range(max(crossing, default=0)))


@pytest.mark.parametrize(
    ("text", "n_slices", "across"),
    [
        ("data=2 tensor=4", 2, (1, 2, 1, 1, 1, 1)),
        ("data=8 tensor=4", 2, (1, 2, 1, 1, 1, 1)),
        ("stage=2 data=6", 4, (2, 2, 1, 1, 1, 1)),
        ("tensor=16", 2, (1, 1, 1, 1, 1, 2)),  # legal, slow, and what the user wrote
        ("stage=4 data=2", 1, (1, 1, 1, 1, 1, 1)),
    ],
)
def test_slices_are_taken_from_the_outermost_axis(text: str, n_slices: int, across: tuple[int, ...]) -> None:
    assert split_over_slices(MeshSpec.parse(text), n_slices)[0] == across


def test_an_axis_that_would_straddle_slices_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"mesh data=3 tensor=2 does not fill 2 slices of 3 devices evenly.*data=3 meets 2 slices; choose data as",
    ):
        split_over_slices(MeshSpec(data=3, tensor=2), 2)
    with pytest.raises(ValueError, match=r"2 nodes of 3 devices"):
        arrange(MeshSpec(data=3, tensor=2), gpu_nodes(2, 3))  # type: ignore[arg-type]


def test_only_the_outermost_axes_cross_tpu_slices() -> None:
    devices = tpu_slices(4, (2, 2, 2))
    placed = arrange(MeshSpec(data=2, fsdp=4, tensor=4), shuffled(devices))  # type: ignore[arg-type]
    assert placed.shape == (1, 2, 4, 1, 1, 4)
    assert sorted(device.id for device in placed.flat) == list(range(32))
    slices = np.vectorize(lambda device: device.slice_index)(placed).reshape(2, 2, 2, 4)
    # data and the outer half of fsdp choose the slice; the inner half of fsdp and tensor stay in it.
    np.testing.assert_array_equal(slices, np.broadcast_to(np.arange(4).reshape(2, 2, 1, 1), slices.shape))
    np.testing.assert_array_equal(placed, arrange(MeshSpec(data=2, fsdp=4, tensor=4), devices))  # type: ignore[arg-type]


def test_tensor_neighbours_are_torus_neighbours_inside_a_tpu_slice() -> None:
    placed = arrange(MeshSpec(fsdp=4, sequence=4, tensor=4), shuffled(tpu_slices(1, (4, 4, 4))))  # type: ignore[arg-type]
    for row in placed.reshape(-1, 4):
        coords = np.array([device.coords for device in row])
        assert (np.ptp(coords, axis=0) > 0).sum() == 1, coords  # one whole ring of the torus


def test_a_tpu_torus_axis_is_split_where_no_whole_assignment_exists() -> None:
    placed = arrange(MeshSpec(data=2, tensor=8), tpu_slices(1, (4, 4, 1), "TPU v5 lite"))  # type: ignore[arg-type]
    assert placed.shape == (1, 2, 1, 1, 1, 8)
    assert len({device.id for device in placed.flat}) == 16


def test_tpu_chips_with_a_hole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh data=7 cannot be laid on the 7 TPU v4 devices.*form a full box"):
        arrange(MeshSpec(data=7), tpu_slices(1, (2, 2, 2))[:7])  # type: ignore[arg-type]


def test_only_the_outermost_axes_cross_gpu_nodes() -> None:
    placed = arrange(MeshSpec(data=4, tensor=8), shuffled(gpu_nodes(4, 8)))  # type: ignore[arg-type]
    assert [[device.id for device in row] for row in placed.reshape(4, 8)] == np.arange(32).reshape(4, 8).tolist()


def test_gpu_nodes_follow_slice_index_where_jax_gives_one() -> None:
    """One process a GPU: 8 processes on 2 nodes, whose ids are interleaved."""
    devices = [FakeDevice(index, process_index=index, slice_index=index % 2) for index in range(8)]
    placed = arrange(MeshSpec(data=2, tensor=4), devices)  # type: ignore[arg-type]
    assert [[device.id for device in row] for row in placed.reshape(2, 4)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_nodes_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh data=12 would lie on 2 nodes of unequal size, 4 to 8 devices"):
        arrange(MeshSpec(data=12), gpu_nodes(2, 8)[:12])  # type: ignore[arg-type]


def test_the_mesh_fixture_and_build_agree(mesh_of: Callable[[str], Mesh]) -> None:
    assert mesh_of("data=2 tensor=-1") == build_mesh(MeshSpec(data=2, tensor=4))
