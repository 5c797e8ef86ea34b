"""Tensors of safetensors files: described without reading them, read alone or by slice, and written whole or not at
all.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and byte range of each
tensor) and the bytes. A large model is several files and an index that says which tensor is where.
Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # of one file of a written model, as transformers splits them
# What stands for each dtype in a header. Weights are one of the first three; buffers that nobody reads may be others.
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the format

Index = tuple[slice, ...]


class Stored(Protocol):
    """A tensor that lies in a file."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what `read` returns."""
        ...

    @property
    def file(self) -> Path: ...

    def read(self, index: Index = ()) -> np.ndarray:
        """A copy of the tensor, or of a slice of it: one slice for each of its first dims."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a safetensors file; see `Stored`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: Path
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: Index = ()) -> np.ndarray:
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)[index]
        # A mapping of this tensor alone: only pages of the slice are read, and none stays when it is closed.
        mapped = np.memmap(self.file, self.dtype, "r", offset=self.offset, shape=self.shape)
        return np.array(mapped[index], copy=True, subok=False)


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name.

    Raises:
      ValueError: it is missing, is no safetensors file, is cut off, or has a dtype that is not known.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if size >= 8 and length <= _LONGEST_HEADER else b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a safetensors file") from None
    if size < 8 or length > _LONGEST_HEADER:
        raise ValueError(f"{path} is not a safetensors file; name one, or fetch it again")
    if len(header) < length:
        raise ValueError(
            f"{path} is cut off: its header takes {length} bytes and the file has {size}; fetch the file again"
        )
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        found = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a safetensors file ({error}); name one, or fetch it again") from None
    for tensor in found.values():
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise ValueError(
                f"{path} is cut off: {tensor.name} {tensor.shape} ends at byte {end} and the file at {size}; "
                "fetch the file again"
            )
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """The free text of a file's header, for a file that `read_file` accepts."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return dict(header.get("__metadata__", {}))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model by name: of `model.safetensors`, or of the files that its index names.

    Args:
      folder: also a safetensors file.

    Raises:
      ValueError: there are none, a file is missing or damaged, or index and files disagree.
    """
    if folder.is_file():
        return read_file(folder)
    if (folder / SINGLE).is_file():  # as transformers, which then does not look at an index
        return read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_index(folder / INDEX)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name one that holds config.json and {SINGLE}")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".h5", ".msgpack"))
    instead = f" but {others[0]}, which is not read" if others else ""
    raise ValueError(
        f"{folder} holds neither {SINGLE} nor {INDEX}{instead}; "
        "write the model again with transformers' save_pretrained, which makes safetensors"
    )


def _read_index(index: Path) -> dict[str, Tensor]:
    try:
        places = json.loads(index.read_text())["weight_map"]
        files = sorted(set(places.values()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{index} has no weight_map of tensors and files; fetch it again") from None
    found: dict[str, Tensor] = {}
    for name in files:
        file = index.parent / name
        if file.parent != index.parent or not file.is_file():
            raise ValueError(f"{index} names {name}, and there is no such file beside it; fetch it too")
        for tensor in read_file(file).values():
            if places.get(tensor.name) != name:
                raise ValueError(
                    f"{file} holds {tensor.name} {tensor.shape}, which {index.name} "
                    f"places in {places.get(tensor.name, 'no file')}; fetch index and files of one version"
                )
            found[tensor.name] = tensor
    missing = sorted(set(places) - set(found))
    if missing:
        raise ValueError(
            f"{index.parent / places[missing[0]]} lacks {missing[0]}, which {index.name} places there; fetch it again"
        )
    return found


def _tensor(path: Path, name: str, entry: Mapping[str, Any], start: int) -> Tensor:
    dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name} {shape} has the unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    tensor = Tensor(name=name, shape=shape, dtype=DTYPES[dtype], file=path, offset=start + begin)
    if end - begin != tensor.nbytes or begin < 0 or any(size < 0 for size in shape):
        raise ValueError(
            f"{path}: {name} {shape} of {dtype} takes {tensor.nbytes} bytes and has {end - begin}; fetch the file again"
        )
    return tensor


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes that it will take."""
        return math.prod(self.shape) * self.dtype.itemsize


Chunks = Callable[[Spec], Iterable[np.ndarray]]  # the parts of a tensor, one after another in memory order


def write_file(path: Path, specs: Sequence[Spec], chunks: Chunks, metadata: Mapping[str, str]) -> None:
    """Writes one file, tensor by tensor; it is whole or not there.

    Args:
      chunks: called for each spec in order, when its bytes are due.
    """
    temporary = path.with_name(f"{path.name}.writing")
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spec in specs:
                start = file.tell()
                for chunk in chunks(spec):
                    assert chunk.dtype == spec.dtype, (spec, chunk.dtype)
                    file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
                assert file.tell() - start == spec.nbytes, spec
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_folder(folder: Path, specs: Sequence[Spec], chunks: Chunks, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model into a folder: one file, or files of at most `shard_bytes` (one tensor at least) and their index.

    The folder itself is whole or not there inside `new_folder`.
    """
    groups: list[list[Spec]] = [[]]
    for spec in specs:
        if groups[-1] and sum(one.nbytes for one in groups[-1]) + spec.nbytes > shard_bytes:
            groups.append([])
        groups[-1].append(spec)
    metadata = {"format": "pt"}  # transformers asks for it
    if len(groups) == 1:
        write_file(folder / SINGLE, specs, chunks, metadata)
        return
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / name, group, chunks, metadata)
        places |= {spec.name: name for spec in group}
    total = {"total_size": sum(spec.nbytes for spec in specs)}
    (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": places}, indent=1))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written, and is gone after an error.

    Raises:
      ValueError: something is there already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty; name a new folder")
    temporary = folder.with_name(f"{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}); name another folder") from None
    try:
        yield temporary
        temporary.rename(folder)  # over an empty folder too
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
