"""MeshSpec: its string, its arithmetic and what it answers to mistakes."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshpar.mesh.axes import AXES, BATCH_AXES, MEANING, OTHER_NAMES
from meshpar.mesh.spec import MeshSpec

SIZES = st.fixed_dictionaries({name: st.integers(1, 64) for name in AXES})


@st.composite
def specs(draw: st.DrawFn) -> MeshSpec:
    """A MeshSpec, with a free axis half of the time."""
    sizes = draw(SIZES)
    free = draw(st.sampled_from([None, *AXES]))
    return MeshSpec(**(sizes | ({} if free is None else {free: -1})))


@settings(deadline=None)
@given(specs())
def test_the_string_of_a_spec_reads_back_as_the_spec(spec: MeshSpec) -> None:
    assert MeshSpec.parse(str(spec)) == spec


@settings(deadline=None)
@given(specs(), st.data())
def test_order_and_separators_of_entries_do_not_matter(spec: MeshSpec, data: st.DataObject) -> None:
    entries = data.draw(st.permutations([f"{name}={size}" for name, size in spec.sizes.items()]))
    separator = data.draw(st.sampled_from([" ", ",", ", ", "  ", " , "]))
    assert MeshSpec.parse(separator.join(entries).replace("=", data.draw(st.sampled_from(["=", " = "])))) == spec


@settings(deadline=None)
@given(SIZES, st.sampled_from(AXES))
def test_resolve_finds_the_size_that_was_left_free(sizes: dict[str, int], free: str) -> None:
    full = MeshSpec(**sizes)
    assert dataclasses.replace(full, **{free: -1}).resolve(full.product) == full
    assert full.resolve(full.product) == full


@settings(deadline=None)
@given(specs(), st.integers(1, 4096))
def test_resolve_returns_a_mesh_of_exactly_the_devices_or_refuses(spec: MeshSpec, n_devices: int) -> None:
    named = math.prod(size for size in spec.sizes.values() if size != -1)
    fits = n_devices % named == 0 if spec.has_free_axis else n_devices == named
    if fits:
        assert spec.resolve(n_devices).product == n_devices
    else:
        with pytest.raises(ValueError, match=str(n_devices)):
            spec.resolve(n_devices)


@settings(deadline=None)
@given(SIZES, st.integers(1, 4096))
def test_the_mesh_an_error_suggests_fits_the_devices(sizes: dict[str, int], n_devices: int) -> None:
    spec = MeshSpec(**sizes)
    assume(spec.product != n_devices)
    with pytest.raises(ValueError, match="set one axis to -1") as caught:
        spec.resolve(n_devices)
    _, quote, rest = str(caught.value).partition('for example "')
    if quote:
        assert MeshSpec.parse(rest.partition('"')[0]).product == n_devices


def test_an_empty_string_is_one_device() -> None:
    assert MeshSpec.parse("") == MeshSpec() == MeshSpec.parse("data=1")
    assert str(MeshSpec()) == "data=1"
    assert MeshSpec().product == 1


def test_sizes_list_all_axes_from_the_slowest_link_to_the_fastest() -> None:
    assert list(MeshSpec(tensor=2).sizes.items()) == [
        ("stage", 1), ("data", 1), ("fsdp", 1), ("expert", 1), ("sequence", 1), ("tensor", 2),
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(MeshSpec)] == list(AXES)


def test_every_axis_has_a_meaning_and_every_other_name_an_axis() -> None:
    assert tuple(MEANING) == AXES
    assert set(OTHER_NAMES.values()) <= set(AXES)
    assert not set(OTHER_NAMES) & set(AXES)
    assert set(BATCH_AXES) <= set(AXES)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tensr=2", "unknown mesh axis 'tensr'; did you mean 'tensor'?"),
        ("Data=2", "unknown mesh axis 'Data'; did you mean 'data'?"),
        ("pp=2", "unknown mesh axis 'pp'; did you mean 'stage'?"),
        ("rows=2", "unknown mesh axis 'rows'; the axes are stage, data, fsdp, expert, sequence, tensor"),
        ("data=2 data=3", "mesh axis data is named twice in 'data=2 data=3'; give it one size"),
        ("data=two", "mesh axis data=two is not an integer; give a positive integer"),
        ("data=1.5", "mesh axis data=1.5 is not an integer; give a positive integer"),
        ("data=0", "mesh axis data=0 has no devices; give a positive integer"),
        (f"data={2**20 + 1}", "mesh axis data=1048577 is more than the 1048576 devices that an axis may have"),
        ("data=-2", "mesh axis data=-2 has no devices; give a positive integer"),
        ("data=-1 tensor=-1", "mesh data=-1 tensor=-1 leaves data and tensor open, but only one may be -1"),
        ("tensor", "mesh entry 'tensor' is not axis=size; write for example \"data=2 tensor=4\""),
        ("data=2 tensor=", "mesh entry 'tensor=' is not axis=size"),
        ("=2", "mesh entry '=2' is not axis=size"),
        ("tensor=2x2", "mesh axis tensor=2x2 is a grid, not available yet; give the axis one size, tensor=4"),
    ],
)
def test_a_wrong_string_is_answered_by_value_rule_and_fix(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="mesh") as caught:
        MeshSpec.parse(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_a_size_that_is_not_an_integer_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="is not an integer"):
        MeshSpec(data=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "n_devices", "sentence"),
    [
        (
            "data=2 tensor=3",
            8,
            "mesh data=2 tensor=3 is 6 devices but 8 are there; set one axis to -1 or change the sizes, "
            'for example "data=2 tensor=4", or use fewer devices (--devices 6)',
        ),
        (
            "",
            8,
            'mesh data=1 is 1 device but 8 are there; set one axis to -1 or change the sizes, for example "fsdp=8"',
        ),
        ("data=16", 1, "mesh data=16 is 16 devices but 1 is there; set one axis to -1"),
        ("stage=3 data=3", 8, "change the sizes so that they multiply to 8"),
        ("data=-1 tensor=3", 8, "the axes beside data=-1 are 3 devices, which does not divide 8"),
        ("data=-1", 0, "mesh data=-1 was resolved for 0 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_answered_by_value_rule_and_fix(text: str, n_devices: int, sentence: str) -> None:
    with pytest.raises(ValueError, match="mesh") as caught:
        MeshSpec.parse(text).resolve(n_devices)
    assert sentence in str(caught.value)


def test_a_mesh_too_large_is_not_told_to_use_fewer_devices() -> None:
    with pytest.raises(ValueError, match="16 devices but 8 are there") as caught:
        MeshSpec(data=16).resolve(8)
    assert "fewer" not in str(caught.value)


def test_a_free_axis_has_no_product() -> None:
    assert MeshSpec(data=-1).has_free_axis
    assert not MeshSpec(data=2).has_free_axis
    with pytest.raises(ValueError, match="no number of devices while an axis is -1"):
        _ = MeshSpec(data=-1).product
