"""A report counts what the formulas say: on emulated devices for known plans, and in texts for TPU and GPU.

Bytes are those that one device sends in one step, Ψ the number of parameters.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from meshpar.collectives.collective import Collective, sent
from meshpar.collectives.report import Report, report
from meshpar.collectives.scopes import phase_of, scopes_of
from meshpar.layout.resolve import path_name
from meshpar.mesh.build import abstract_mesh, build_mesh
from meshpar.mesh.spec import MeshSpec
from tests.collectives import programs
from tests.collectives.programs import CONFIG, report_of
from tests.conformance.runs import model_of
from tests.fixtures import make_hlo


def sizes(config: object) -> dict[str, int]:
    """Elements of each parameter by path, those of stacked layers for all layers."""
    return {path_name(path): leaf.size for path, leaf in jax.tree.leaves_with_path(model_of(config).shapes)}


def fixture(name: str, mesh: str, config: object = make_hlo.CONFIG) -> Report:
    """The report of a committed text."""
    return report(make_hlo.read(name), abstract_mesh(MeshSpec.parse(mesh)), sizes(config))


def bytes_of(collectives: list[Collective], large: int = 1000) -> int:
    """Bytes sent, without sums of losses and norms."""
    return sum(one.bytes for one in collectives if one.buffer_bytes >= large)


# --- plans on emulated devices ---------------------------------------------------------------------------------------


def test_data_parallelism_reduces_each_gradient_once() -> None:
    found = report_of("data=8")
    assert {one.axes for one in found.collectives} == {("data",)}
    assert {one.kind for one in found.collectives} == {"all-reduce"}
    gradients = [one for one in found.collectives if one.phase == "backward"]
    assert sum(one.bytes for one in gradients) == 2 * 7 * 4 * sum(sizes(CONFIG).values()) // 8
    kernels = {path for path in sizes(CONFIG) if path.endswith(("kernel", "table"))}
    assert {one.of for one in gradients if one.buffer_bytes > 1000} == kernels
    for one in gradients:
        if one.of in kernels:
            assert one.times * math.prod(one.shape) == sizes(CONFIG)[one.of]


def test_zero_3_gathers_each_weight_in_each_pass() -> None:
    found = report_of("fsdp=8")
    gathers = found.select(kind="all-gather")
    passes: dict[str, int] = {}
    for one in gathers:
        assert (one.axes, one.degree, one.sent_bytes) == (("fsdp",), 8, one.buffer_bytes * 7 // 8)
        passes[one.of] = passes.get(one.of, 0) + one.times * math.prod(one.shape)
    for path, size in sizes(CONFIG).items():
        again = path.startswith("blocks/") and path.endswith("kernel")  # norms and what is used once are kept
        assert passes[path] == size * (2 if again else 1), path
    assert set(passes) == set(sizes(CONFIG))
    gradients = [one for one in found.collectives if one.phase == "backward"]
    assert sum(one.bytes for one in gradients) == 2 * 7 * 4 * sum(sizes(CONFIG).values()) // 8  # CPU: no scatter


@pytest.mark.parametrize("unroll", [1, 0], ids=["in a loop", "written out"])
def test_tensor_parallelism_reduces_twice_a_layer_in_each_direction(unroll: int) -> None:
    """XLA:CPU merges the gradients of inputs that several products share into one operation and sums them after."""
    found = report_of("data=2 tensor=2", unroll=unroll)
    one_activation = programs.BATCH // 2 * programs.SEQ * CONFIG.embed * 4
    for phase, shared in (("forward", 1 + 1), ("backward", 3 + 2)):  # q, k, v and gate, up
        layers = [one for one in found.select(axis="tensor", inside="blocks") if one.phase == phase]
        assert {one.buffer_bytes for one in layers} == {one_activation}
        assert sum({one.op: one.times for one in layers}.values()) == 2 * CONFIG.layers
        assert sum(one.bytes for one in layers) == CONFIG.layers * shared * one_activation  # 2 (n-1)/n is 1 for n=2
    names = {one.of for one in found.select(axis="tensor", inside="blocks") if one.phase == "forward"}
    assert names == {"blocks/attention/out", "blocks/mlp/down"}


def test_a_loop_and_the_same_layers_written_out_send_the_same() -> None:
    loop, flat = report_of("data=2 tensor=2"), report_of("data=2 tensor=2", unroll=0)
    assert max(one.times for one in loop.collectives) == 2
    assert max(one.times for one in flat.collectives) == 1
    for total, other in zip(loop.totals(), flat.totals(), strict=True):
        assert (total.kind, total.axis, total.buffers, total.bytes) == (
            other.kind,
            other.axis,
            other.buffers,
            other.bytes,
        )
    assert loop.bytes == flat.bytes > 0


def test_lines_and_scopes_are_those_of_our_code() -> None:
    found = report_of("fsdp=8")
    (gather,) = [one for one in found.select(kind="all-gather", inside="mlp/up") if one.phase == "forward"]
    assert gather.scopes == ("blocks/weights/mlp/up/kernel",)
    assert gather.parameters == ("blocks/mlp/up/kernel",)
    file, line = gather.source.split(":")
    assert file == "meshpar/forward.py"
    assert "split_as(weight" in Path(file).read_text().splitlines()[int(line) - 1]
    assert {"blocks", "attention", "mlp", "loss", "optimizer", "gradient_norm"} <= found.scopes


def test_name_scopes_change_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(**options: bool) -> str:
        return programs.training("data=2 fsdp=2 tensor=2").trace().lower().as_text(**options)

    named, with_names = program(), program(debug_info=True)
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    assert program() == named
    assert "weights/mlp/up/kernel" in with_names and "weights/mlp/up/kernel" not in program(debug_info=True)


def test_positions_in_the_mesh_count_and_not_the_numbers_of_devices() -> None:
    devices = np.array(jax.devices())[[3, 1, 6, 0, 7, 5, 2, 4]].reshape(2, 4)
    mesh = Mesh(devices, ("rows", "columns"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("rows", "columns")))
    compiled = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, PartitionSpec("rows"))).lower(x).compile()
    (one,) = report(compiled, mesh).collectives
    assert (one.kind, one.axes, one.degree) == ("all-gather", ("columns",), 4)
    assert (one.shape, one.sent_bytes) == ((4, 8), 4 * 8 * 4 * 3 // 4)


# --- every kind of collective, on every platform ---------------------------------------------------------------------

# (sent in one step, times) of the programs of `make_hlo.exchange` for data=2 tensor=4
_B = make_hlo.SIZE**2 * 4 // 4  # bytes of the local buffer
EXCHANGED = {
    ("collective-permute", "tensor", "ring"): (15 * _B, 15),
    ("all-to-all", "tensor", "swap"): (_B * 3 // 4, 1),
    ("reduce-scatter", "data", "scatter"): (_B // 2, 1),
    ("all-gather", "data", "gather"): (_B // 2, 1),
    ("all-reduce", "data*tensor", "sum"): (2 * _B * 7 // 8, 1),
}


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_every_kind_of_collective_is_read_alike_on_each_platform(platform: str) -> None:
    mesh = build_mesh(MeshSpec(data=2, tensor=4), jax.devices())
    text = make_hlo.exchanged(jax.devices()) if platform == "cpu" else make_hlo.read(f"{platform}_exchange")
    found = report(text, mesh)
    by_place = {(one.kind, one.axis, one.of): (one.bytes, one.times) for one in found.collectives}
    assert by_place == EXCHANGED
    assert found.unknown_loops == ()
    assert {one.source.split(":")[0] for one in found.collectives} == {"tests/fixtures/make_hlo.py"}


def test_bytes_by_kind() -> None:
    assert sent("all-gather", 80, 8) == sent("reduce-scatter", 80, 8) == sent("all-to-all", 80, 8) == 70
    assert sent("all-reduce", 80, 8) == 140
    assert sent("collective-permute", 80, 8) == 80


# --- training steps for TPU and GPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_texts_of_accelerators_show_two_reductions_a_layer_over_tensor(platform: str) -> None:
    config = make_hlo.CONFIG
    found = fixture(f"{platform}_tensor", "data=2 fsdp=2 tensor=2")
    one_activation = make_hlo.BATCH // 4 * make_hlo.SEQ * config.embed * 2
    for phase in ("forward", "backward"):
        layers = [one for one in found.select(axis="tensor", inside="blocks") if one.phase == phase]
        assert sum(one.times for one in layers) == 2 * config.layers
        assert {(one.kind, one.dtype, one.buffer_bytes) for one in layers} == {("all-reduce", "bf16", one_activation)}


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_texts_of_accelerators_show_each_gather_of_zero_3_once(platform: str) -> None:
    """Though asynchronous ones stand in the text several times. In bf16; the head may be gathered in fp32."""
    found = fixture(f"{platform}_tensor", "data=2 fsdp=2 tensor=2")
    gathers = found.select(kind="all-gather", inside="blocks")
    of_layers = sum(size for path, size in sizes(make_hlo.CONFIG).items() if re.match(r"blocks/.*kernel", path))
    assert bytes_of(gathers) == 2 * of_layers // 2 * 2 // 2  # two passes, half by tensor, bf16, half is sent
    assert {one.axis for one in gathers} == {"fsdp"}
    phases = {phase: bytes_of([one for one in gathers if one.phase == phase]) for phase in ("forward", "again")}
    assert phases["forward"] == phases["again"]


def test_a_tpu_scatters_gradients_in_a_fusion() -> None:
    found = fixture("tpu_zero2", "data=8", make_hlo.WIDE)
    scatters = found.select(kind="reduce-scatter")
    for one in scatters:
        assert one.sent_bytes == one.buffer_bytes * 7 // 8
        assert one.times * math.prod(one.shape) == sizes(make_hlo.WIDE)[one.of]
    # each gradient of a kernel is reduced once, by one of the two
    reduced = {one.of: one.kind for one in found.collectives if one.phase == "backward" and one.parameters}
    kernels = {path for path in sizes(make_hlo.WIDE) if path.endswith(("kernel", "table"))}
    assert kernels <= set(reduced)
    assert {kind for path, kind in reduced.items() if "attention/" in path} == {"reduce-scatter"}
    gathered = {one.of.removeprefix("optimizer/"): one for one in found.select(kind="all-gather", axis="data")}
    for path in kernels:  # the new parameters, in fp32
        assert gathered[path].bytes == 7 * 4 * sizes(make_hlo.WIDE)[path] // 8


def test_what_crosses_slices_is_told_apart() -> None:
    found = fixture("tpu_slices", "data=2 fsdp=4")
    between = [one for one in found.collectives if one.between_slices]
    assert {(one.kind, one.axis, one.degree) for one in between} == {("all-reduce", "data (slices)", 2)}
    inside = [one for one in found.collectives if not one.between_slices]
    assert {one.axis for one in inside} == {"fsdp"}
    # HSDP: a quarter of each gradient crosses, in bf16; those with a head_dim of 32 are padded to the 128 lanes
    for path, size in sizes(make_hlo.CONFIG).items():
        if path.endswith("kernel") and "attention" not in path:
            assert sum(one.bytes for one in between if one.of == path) == size * 2 // 4, path


# --- names and rendering ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scopes", "phase"),
    [
        (
            "jit(step)/jvp(blocks)/while/body/closed_call/attention/out/dot_general",
            ("blocks/attention/out",),
            "forward",
        ),
        (
            "jit(step)/transpose(jvp(blocks))/while/body/eval_jaxpr/checkpoint/rematted_computation/weights/mlp/up/x",
            ("blocks/weights/mlp/up",),
            "again",
        ),
        (
            "jit(step)/transpose(jvp(blocks))/a/(k/kernel/dot_general:norm/reduce_sum)",
            ("blocks/a/k/kernel", "blocks/a/norm"),
            "backward",
        ),
        ("jit(step)/(transpose(jvp(loss))/a/x:jvp(loss)/reduce_sum)", ("loss/a", "loss"), "backward"),
        ("jit(step)/transpose(jvp(blocks))/blocks/mlp/input/dot_general", ("blocks/mlp/input",), "backward"),
        ("jit(step)/gradient_norm/reduce_sum", ("gradient_norm",), "step"),
        ("jit(step)/jit(clip)/reduce_sum", ("",), "step"),
        ("", ("",), ""),
    ],
)
def test_scopes_and_phase_in_the_name_of_an_operation(name: str, scopes: tuple[str, ...], phase: str) -> None:
    assert scopes_of(name) == scopes
    assert phase_of(name) == phase


def printed(table: object) -> list[str]:
    console = Console(width=160, file=io.StringIO())
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_table_fits_and_ends_with_totals() -> None:
    lines = printed(report_of("data=2 tensor=2").as_table(rows=3, title="collectives"))
    assert lines[0].strip() == "collectives"
    assert "meshpar/" in lines[2] or "models/" in lines[2]
    (rest,) = [line for line in lines if "smaller" in line]
    assert re.search(r"\d+ smaller +\d+ +[\d.]+ KiB", rest)
    assert lines[-1].endswith("sent by each device in one step: tensor 83.0%, data 17.0%")
    assert [line.split()[:2] for line in lines[-3:-1]] == [["all-reduce", "tensor"], ["all-reduce", "data"]]


def test_json_has_the_same_sums() -> None:
    found = report_of("data=2 tensor=2")
    values = json.loads(json.dumps(found.as_json()))
    assert values["bytes"] == found.bytes == sum(one["bytes"] for one in values["collectives"])
    assert sum(total["bytes"] for total in values["totals"]) == found.bytes
    assert values["mesh"]["tensor"] == 2


def test_a_loop_of_unknown_length_is_listed() -> None:
    mesh = build_mesh(MeshSpec(data=8), jax.devices())

    def f(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 100.0, lambda x: x * 2, x)

    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = report(jax.jit(f).lower(x).compile(), mesh)
    assert len(found.unknown_loops) == 1
    assert found.select(kind="all-reduce")
    assert (
        printed(found.as_table())[-1] == f"loop {found.unknown_loops[0]} has no known length: what is in it counts once"
    )


SENDS = """HloModule jit_f

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %start = token[] after-all()
  %send = (f32[4,8]{1,0}, u32[], token[]) send(%x, %start), channel_id=1, frontend_attributes={FIRST}
  %done = token[] send-done(%send), channel_id=1, is_host_transfer=true
  ROOT %y = f32[4,8]{1,0} copy(%x)
}
"""


@pytest.mark.parametrize(
    ("attributes", "kind", "axes", "shape", "bytes"),
    [
        # of the gathered two buffers one is sent; of a buffer that is summed, each half twice
        ('_xla_megascale_transfer_type="ALL_GATHER"', "all-gather", ("data",), (2, 4, 8), 128),
        ('_xla_megascale_transfer_type="ALL_REDUCE"', "all-reduce", ("data",), (4, 8), 128),
        ('_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3}}"', "collective-permute", ("tensor",), (4, 8), 128),
    ],
)
def test_sends_are_the_collectives_that_they_stand_for(
    attributes: str, kind: str, axes: tuple[str, ...], shape: tuple[int, ...], bytes: int
) -> None:
    attributes += ',_xla_megascale_target="{1,2}x{0:3}"' if "megascale" in attributes else ""
    mesh = abstract_mesh(MeshSpec(data=2, tensor=4))
    (one,) = report(SENDS.replace("FIRST", attributes), mesh).collectives
    assert (one.kind, one.axes, one.shape, one.bytes) == (kind, axes, shape, bytes)
    assert one.between_slices == ("megascale" in attributes)
