"""The text of compiled programs: types, loops and their counts, where lines come from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from meshpar.collectives.hlo import Array, arrays_of, parse

LOOP = """HloModule jit_f

FileNames
1 "/here/outer.py"
2 "/here/inner.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=10 end_line=10 column=2 end_column=3}}
2 {{file_name_id=2 function_name_id=1 line=20 end_line=20 column=2 end_column=3}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}


%condition (carried: (s32[], s32[])) -> pred[] {{
  %carried = (s32[]{{:T(128)}}, s32[]{{:T(128)}}) parameter(0)
  %counter = s32[]{{:T(128)}} get-tuple-element(%carried), index=0
  %given = s32[]{{:T(128)}} get-tuple-element(%carried), index=1
  %seven = s32[]{{:T(128)}} constant(7)
  ROOT %test = pred[]{{:T(512)}} {test}
}}

%body (in: (s32[], s32[])) -> (s32[], s32[]) {{
  ROOT %in = (s32[], s32[]) parameter(0)
}}

ENTRY %main () -> (s32[], s32[]) {{
  %two = s32[] constant(2)
  %nine = s32[] constant(9)
  %copied = s32[] copy(%nine)
  %start = (s32[], s32[]) tuple(%two, %copied)
  %kernel = s32[] custom-call(%two), custom_call_target="tpu_custom_call", backend_config={{"a":{{
"settings":"{{}}"
}}}}, metadata={{op_name="jit(f)/kernel" stack_frame_id=2}}
  ROOT %loop = (s32[], s32[]) while(%start), condition=%condition, body=%body, metadata={{op_name="x" stack_frame_id=2}}
}}
"""


@pytest.mark.parametrize(
    ("test", "trips"),
    [
        ("compare(%counter, %seven), direction=LT", 5),  # starts at 2
        ("compare(%counter, %seven), direction=LE", 6),
        ("compare(%seven, %counter), direction=GT", 5),
        ("compare(%two, %seven), direction=LT", None),  # no counter
        ("compare(%counter, %given), direction=LT", 7),  # a bound that the loop carries
        ("compare(%counter, %seven), direction=NE", None),
        ("compare(%counter, %counter), direction=LT", 0),
        ("and(%counter, %seven)", None),
    ],
)
def test_a_loop_without_a_count_is_read_from_its_condition(test: str, trips: int | None) -> None:
    program = parse(LOOP.format(test=test))
    entry = program.computations[program.entry]
    assert program.trips(entry["loop"], entry) == trips


def test_a_line_that_begins_like_an_end_does_not_end_a_computation() -> None:
    program = parse(LOOP.format(test="compare(%counter, %seven), direction=LT"))
    assert [*program.computations["main"]] == ["two", "nine", "copied", "start", "kernel", "loop"]


def test_stack_frames_are_read_from_the_innermost_outwards() -> None:
    program = parse(LOOP.format(test="compare(%counter, %seven), direction=LT"))
    assert program.stack(program.computations["main"]["loop"]) == [("/here/inner.py", 20), ("/here/outer.py", 10)]
    direct = LOOP.replace("1 {{file_location_id=1 parent_frame_id=1}}", "1 {{file_location_id=1}}")
    program = parse(direct.replace("parent_frame_id=2", "parent_frame_id=1").format(test="and(%counter)"))
    assert program.stack(program.computations["main"]["loop"]) == [("/here/inner.py", 20), ("/here/outer.py", 10)]


def test_arrays_of_a_type() -> None:
    type_ = "(bf16[4,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f8e4m3fn[8]{0}, pred[], token[], s4[3,2], f32[<=4]{0})"
    found = arrays_of(type_)
    assert found == (
        Array(dtype="bf16", shape=(4, 128)),
        Array(dtype="f8e4m3fn", shape=(8,)),
        Array(dtype="pred", shape=()),
        Array(dtype="s4", shape=(3, 2)),
        Array(dtype="f32", shape=(4,)),
    )
    assert [array.bytes for array in found] == [1024, 8, 1, 3, 16]


def test_a_program_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match="it has no ENTRY computation; pass Compiled"):
        parse(jax.jit(jnp.sin).lower(1.0).as_text())


def test_xlas_own_count_is_used() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 12, lambda i, x: jnp.sin(x) * i, x)

    program = parse(jax.jit(f).lower(jnp.ones(4)).compile().as_text())
    (loop,) = [(i, c) for c in program.computations.values() for i in c.values() if i.opcode == "while"]
    assert "known_trip_count" in loop[0].attributes
    assert program.trips(*loop) == 12
