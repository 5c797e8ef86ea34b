"""Golden files are what `tests.golden.make` makes today; a failing test prints what moved."""

from __future__ import annotations

import difflib

import jax
import pytest

from tests.golden import make

WHEN = (
    "Where this change was meant to move arrays or communication, or jax is another one, make the file again and read "
    "the diff before you commit it: python -m tests.golden.make {part}. Where it was not meant to, the change is wrong."
)


def assert_golden(file: str) -> None:
    path = make.FOLDER / f"{file}.txt"
    expected, actual = path.read_text().splitlines(), make.text_of(file).splitlines()
    if expected[0] != actual[0] and expected[1:] != actual[1:]:
        pytest.skip(f"made with another jax, which compiles otherwise: {expected[0]!r}, and here {actual[0]!r}")
    moved = "\n".join(difflib.unified_diff(expected[1:], actual[1:], f"{file}.txt", "today", lineterm="", n=0))
    assert not moved, f"\n{moved}\n\n{WHEN.format(part=file.split('/')[0])}"


@pytest.mark.parametrize("file", make.files("layouts"))
def test_arrays_are_split_as_before(file: str) -> None:
    assert_golden(file)


@pytest.mark.parametrize("file", make.files("cpu"))
def test_a_step_on_cpu_communicates_as_before(file: str) -> None:
    assert_golden(file)


@pytest.mark.slow
@pytest.mark.parametrize("file", [*make.files("tpu"), *make.files("gpu")])
def test_a_step_on_accelerators_communicates_as_before(file: str) -> None:
    if why := make.missing(file.split("/")[0]):
        pytest.skip(why)
    assert_golden(file)


def test_every_golden_file_belongs_to_a_recipe() -> None:
    there = {str(path.relative_to(make.FOLDER).with_suffix("")) for path in make.FOLDER.rglob("*.txt")}
    assert there == {file for part in ("layouts", *make.COMPILED) for file in make.files(part)}


def test_what_moved_is_printed_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    file = make.files("layouts")[0]
    text = (make.FOLDER / f"{file}.txt").read_text()
    monkeypatch.setattr(make, "text_of", lambda file: text.replace("params(-, fsdp", "params(-, data", 1))
    with pytest.raises(
        AssertionError, match=r"(?s)\n *-\S+ .*params\(-, fsdp.*\n *\+\S+ .*params\(-, data.*golden.make layouts"
    ):
        assert_golden(file)
    monkeypatch.setattr(make, "text_of", lambda file: "# another jax\n[something else]\n")
    with pytest.raises(pytest.skip.Exception, match="made with another jax"):
        assert_golden(file)


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main(["layout"]) == 2
    assert "no part 'layout'; there are layouts, cpu" in capsys.readouterr().err
    assert jax.device_count() == 8
