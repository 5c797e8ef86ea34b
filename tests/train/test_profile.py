"""Which steps a profile names."""

from __future__ import annotations

import pytest

from meshpar.train.profile import parse_steps
from meshpar.train.run import RunConfig


@pytest.mark.parametrize(("text", "steps"), [("", []), ("12", [12]), ("12:15", [12, 13, 14, 15]), ("3:3", [3])])
def test_steps_are_written_as_one_or_from_to(text: str, steps: list[int]) -> None:
    assert list(parse_steps(text)) == steps


@pytest.mark.parametrize("text", ["0", "5:4", "a", "3-4", "1:2:3", ":4", "-1"])
def test_anything_else_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="names no steps; write one as 12, or several as 12:15"):
        RunConfig(steps=10, batch=1, profile=text)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"profile": "9:11"}, "train.profile=9:11 ends after train.steps=10"),
        ({"export": "fp8"}, "train.export='fp8' is not one of fp32, bf16, none"),
        ({"stall": -1.0}, "train.stall=-1.0 must be at least 0 seconds"),
        ({"keep_best": 1, "eval_every": 4, "checkpoint_every": 6}, "make train.checkpoint_every=6 a multiple of"),
        ({"keep_best": 1, "eval_every": 0}, "train.keep_best=1 needs losses to compare; set train.eval_every"),
    ],
)
def test_what_a_run_cannot_do_is_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RunConfig(steps=10, batch=1, **values)  # type: ignore[arg-type]
