"""A manifest tells what a checkpoint holds without devices, and finds every file that changed since."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.checkpoint.manifest import FORMAT, NAME, Leaf, Manifest, checksum, damage, read_manifest, to_text

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def written(tmp_path: Path) -> Manifest:
    """A step 7 with two small files, and its manifest."""
    data = tmp_path / "7" / "state" / "d"
    data.mkdir(parents=True)
    (data / "a").write_bytes(bytes(range(256)) * 40)
    (data / "b").write_bytes(b"")
    manifest = Manifest(
        step=7,
        mesh={"fsdp": 4, "tensor": 2},
        leaves={
            "params/w": Leaf(shape=(8, 6), dtype="bfloat16", axes=("embed", "mlp"), spec=(("fsdp",), ("tensor",))),
            "step": Leaf(shape=(), dtype="int32"),
        },
        metric=2.5,
        extra={"plan": {"zero": 2}, "seed": 3},
        files={f"state/d/{name}": checksum(data / name) for name in ("a", "b")},
    )
    (tmp_path / "7" / NAME).write_text(to_text(manifest))
    return manifest


def test_what_is_read_equals_what_was_written(written: Manifest, tmp_path: Path) -> None:
    assert read_manifest(tmp_path, 7) == written


def test_reading_needs_no_device_and_no_orbax(written: Manifest, tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from meshpar.checkpoint.manifest import read_manifest
from meshpar.checkpoint.manager import Checkpoints
manifest = read_manifest(Path({str(tmp_path)!r}), 7)
assert manifest.leaves["params/w"].shape == (8, 6)
checkpoints = Checkpoints(Path({str(tmp_path)!r}))
assert (checkpoints.latest(), checkpoints.best_step(), checkpoints.manifest(7)) == (7, 7, manifest)
assert not {{"orbax", "tensorstore"}} & set(sys.modules)
"""
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}  # asking for a device would fail
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, env=environment, check=True, timeout=60)


def test_what_has_no_json_form_is_refused(written: Manifest) -> None:
    with pytest.raises(ValueError, match=r"extra cannot be written .*give numbers"):
        to_text(dataclasses.replace(written, extra={"plan": object()}))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "is missing; the step is not a whole checkpoint"),
        ("", "cannot be read"),
        ('{"format": 1, "step": 7, "mesh": {}, "lea', "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 1, "step": 7, "leaves": {"w": {}}, "files": {}}', "cannot be read"),
        (json.dumps({"format": FORMAT + 1}), f"has format {FORMAT + 1} and this meshpar reads up to {FORMAT}"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_one_sentence(text: str | None, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7" / NAME).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_manifest(tmp_path, 7)


def test_whole_files_show_no_damage(written: Manifest, tmp_path: Path) -> None:
    assert damage(tmp_path, written, read=written.files) is None


def test_a_file_that_is_gone_cut_or_longer_is_found_without_reading(written: Manifest, tmp_path: Path) -> None:
    file = tmp_path / "7" / "state" / "d" / "a"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert damage(tmp_path, written, read=()) == "state/d/a has 10239 bytes instead of 10240"
    file.write_bytes(content + b"x")
    assert damage(tmp_path, written, read=()) == "state/d/a has 10241 bytes instead of 10240"
    file.unlink()
    assert damage(tmp_path, written, read=()) == "state/d/a: No such file or directory"


@pytest.mark.parametrize("place", [0, 5000, 10239])
def test_one_flipped_bit_is_found(place: int, written: Manifest, tmp_path: Path) -> None:
    file = tmp_path / "7" / "state" / "d" / "a"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert damage(tmp_path, written, read=()) is None
    assert damage(tmp_path, written, read=written.files) == "state/d/a has another checksum than when it was written"
