"""What a checkpoint holds, as JSON: reading it needs no device and no Orbax.

    <folder>/300/manifest.json   this file
    <folder>/300/state/          the arrays, written by Orbax

The manifest is written last, and only then does the step's folder get its name: a folder called 300 is whole, unless
something damaged it later. So it also lists every file with its size and its CRC-32, which `damage` compares: Orbax
and tensorstore checksum their indices, not the arrays.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshpar.interfaces import Axes

FORMAT = 1
NAME = "manifest.json"
STATE = "state"  # the folder of the arrays, inside a step's folder
_CHUNK = 1 << 22  # bytes read at a time for a checksum


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str  # as jax spells it; "key<fry>" is a typed PRNG key, of which the key data are stored
    axes: Axes | None = None  # the logical axis of each dim; None: not a parameter, or not told
    spec: tuple[tuple[str, ...], ...] = ()  # the mesh axes that split each dim; shorter than shape: the rest is whole


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One checkpoint. `extra` is the caller's: plan, recipe, versions and what else a person or a resumed run asks."""

    format: int = FORMAT
    step: int
    mesh: Mapping[str, int] = field(default_factory=dict)  # degree of each mesh axis that the state lay on
    leaves: Mapping[str, Leaf] = field(default_factory=dict)  # by path: "params/blocks/mlp/up/kernel"
    metric: float | None = None  # what the best checkpoints are chosen by, lower is better; None: not measured
    extra: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # under the step's folder: bytes, CRC-32


def read_manifest(folder: Path, step: int) -> Manifest:
    """Reads what the checkpoint of a step holds.

    Raises:
      ValueError: there is none, it cannot be read, or a newer meshpar wrote it.
    """
    path = folder / str(step) / NAME
    try:
        values = json.loads(path.read_text())
        if values["format"] > FORMAT:
            raise ValueError(
                f"{path} has format {values['format']} and this meshpar reads up to {FORMAT}; update meshpar"
            )
        leaves = {
            name: Leaf(
                shape=tuple(leaf["shape"]),
                dtype=leaf["dtype"],
                axes=None if leaf["axes"] is None else tuple(leaf["axes"]),
                spec=tuple(map(tuple, leaf["spec"])),
            )
            for name, leaf in values["leaves"].items()
        }
        files = {name: (size, checksum) for name, (size, checksum) in values["files"].items()}
        return Manifest(**{**values, "leaves": leaves, "files": files})
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; the step is not a whole checkpoint, use another") from None
    except (OSError, TypeError, KeyError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); use another step") from None


def to_text(manifest: Manifest) -> str:
    """The JSON that `read_manifest` reads.

    Raises:
      ValueError: `extra` holds something that has no JSON form.
    """
    try:
        return json.dumps(dataclasses.asdict(manifest), indent=1)
    except TypeError as error:
        raise ValueError(f"extra cannot be written ({error}); give numbers, text, lists and dicts only") from None


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def damage(folder: Path, manifest: Manifest, *, read: Iterable[str]) -> str | None:
    """The first thing that is wrong with a checkpoint's files, None for a whole one.

    Args:
      read: the files whose checksums are compared, which reads them; of the others the size is enough.
    """
    root = folder / str(manifest.step)
    for name, (size, _) in manifest.files.items():
        try:
            found = (root / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    for name in read:
        try:
            if checksum(root / name) != manifest.files[name]:
                return f"{name} has another checksum than when it was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None
