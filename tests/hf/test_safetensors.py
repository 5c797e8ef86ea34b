"""Files of tensors are described without being read, read by slice, written whole or not at all, and refused in a
sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from meshpar.hf import safetensors as st


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(6, 4)).astype(np.float32),
        "b": rng.normal(size=(3, 2, 5)).astype(ml_dtypes.bfloat16),
        "c": rng.normal(size=(7,)).astype(np.float16),
        "d": np.array(rng.normal(), np.float32),
        "e": np.zeros((0, 3), np.float32),
    }


def specs(arrays: dict[str, Any]) -> list[st.Spec]:
    return [st.Spec(name=name, shape=array.shape, dtype=array.dtype) for name, array in arrays.items()]


def write(folder: Path, **options: int) -> None:
    written = arrays()
    st.write_folder(folder, specs(written), lambda spec: [written[spec.name]], **options)


def test_what_is_written_is_read_by_this_reader_and_by_the_package(tmp_path: Path) -> None:
    write(tmp_path)
    theirs, ours = safetensors.numpy.load_file(tmp_path / "model.safetensors"), st.read_folder(tmp_path)
    for name, array in arrays().items():
        assert ours[name].shape == array.shape
        assert ours[name].dtype == array.dtype
        assert ours[name].read().tobytes() == array.tobytes() == theirs[name].tobytes()
    assert st.read_metadata(tmp_path / "model.safetensors") == {"format": "pt"}


def test_the_package_s_files_are_read(tmp_path: Path) -> None:
    safetensors.numpy.save_file(arrays(), tmp_path / "model.safetensors")
    read = st.read_folder(tmp_path)
    assert {name: tensor.read().tobytes() for name, tensor in read.items()} == {
        name: array.tobytes() for name, array in arrays().items()
    }


def test_a_slice_is_that_slice_and_a_copy(tmp_path: Path) -> None:
    write(tmp_path)
    read, whole = st.read_folder(tmp_path), arrays()
    for name, index in {
        "a": (slice(2, 5), slice(1, 3)),
        "b": (slice(1, 2), slice(0, 2), slice(4, 5)),
        "c": (slice(3, 3),),
    }.items():
        piece = read[name].read(index)
        assert piece.tobytes() == whole[name][index].tobytes()
        assert type(piece) is np.ndarray
        assert piece.flags.owndata


def test_shards_have_an_index_and_at_most_the_size_that_was_asked_for(tmp_path: Path) -> None:
    write(tmp_path, shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index["weight_map"] == {"a": files[0], **dict.fromkeys("bcde", files[1])}
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in arrays().values())}
    read = st.read_folder(tmp_path)
    assert {name: tensor.file.name for name, tensor in read.items()} == index["weight_map"]
    assert all(read[name].read().tobytes() == array.tobytes() for name, array in arrays().items())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(spec: st.Spec) -> Iterator[np.ndarray]:
        yield arrays()[spec.name]
        if spec.name == "b":
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        st.write_file(tmp_path / "x.safetensors", specs(arrays()), broken, {})
    with pytest.raises(OSError, match="no space left"), st.new_folder(tmp_path / "new") as folder:
        st.write_folder(folder, specs(arrays()), broken, shard_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with st.new_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("text")
        assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    with pytest.raises(ValueError, match="new is there already and not empty; name a new folder"):
        st.new_folder(tmp_path / "new").__enter__()


def header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a safetensors file"),
        (b"PK\x03\x04 this is another kind of file", "is not a safetensors file"),
        ((200).to_bytes(8, "little") + b"{}", "is cut off: its header takes 200 bytes and the file has 10"),
        ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
        (header({"a": GOOD}) + b"1234567", r"is cut off: a \(2,\) ends at byte \d+ and the file at \d+; fetch"),
        (header({"a": {**GOOD, "dtype": "F7"}}) + bytes(8), r"a \(2,\) has the unknown dtype 'F7'; known are F32"),
        (header({"a": {**GOOD, "shape": [3]}}) + bytes(8), r"a \(3,\) of F32 takes 12 bytes and has 8; fetch"),
        (header({"a": {"dtype": "F32", "shape": [2]}}) + bytes(8), "is not a safetensors file"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors.*{sentence}") as error:
        st.read_folder(tmp_path)
    assert str(file) in str(error.value)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    write(tmp_path, shard_bytes=100)
    index, second = tmp_path / "model.safetensors.index.json", tmp_path / "model-00002-of-00002.safetensors"
    places = json.loads(index.read_text())["weight_map"]

    def refused(changed: Any, sentence: str) -> None:
        index.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=sentence):
            st.read_folder(tmp_path)

    refused({"weight_map": {**places, "z": second.name}}, r"00002.safetensors lacks z, which .* places there")
    first = "model-00001-of-00002.safetensors"
    refused({"weight_map": {**places, "b": first}}, r"holds b \(3, 2, 5\), which .* in model-00001")
    refused({"weight_map": {n: f for n, f in places.items() if n != "c"}}, r"holds c \(7,\), which .* in no file")
    refused({"weight_map": {**places, "a": "../a.safetensors"}}, r"names ../a.safetensors, and there is no such file")
    refused({}, "has no weight_map")
    index.write_text(json.dumps({"weight_map": places}))
    second.unlink()
    with pytest.raises(
        ValueError, match=r"names model-00002-of-00002.safetensors, and there is no such file beside it"
    ):
        st.read_folder(tmp_path)


def test_a_folder_without_weights_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*missing"):
        st.read_folder(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor model.safetensors.index.json; write"):
        st.read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"but pytorch_model.bin, which is not read; write the model again"):
        st.read_folder(tmp_path)
