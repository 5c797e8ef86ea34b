"""Where text comes from: a named corpus or a path becomes documents, split into training and validation.

No corpus needs a download: `stdlib` is the source code of the running Python (about 12 MB), `botocore` the English
prose in the installed botocore package (about 33 MB), and a path is the user's own text. A corpus is found first
(names, sizes and times of its files: milliseconds) and read only when its tokens are not in the cache. It is held in
memory while it is tokenised.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import hashlib
import html
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".txt", ".md", ".py")  # what a folder is searched for
# Folders that are never walked: tests repeat each other, and installed packages differ from machine to machine.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_BLOCK_TAGS = re.compile(r"</?(?:p|br|li|[uod]l|dt|dd|h\d|note|important|div|table|t[rdh])\b[^>]*>", re.IGNORECASE)
_TAGS = re.compile(r"</?[A-Za-z][^>]*>")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that was found and is not read yet."""

    name: str  # the source as it was asked for
    version: str  # of what holds the text, e.g. "Python 3.11.7"
    files: tuple[Path, ...]  # in the order in which they are read
    read: Callable[[tuple[Path, ...]], Iterator[str]]  # files to documents, in a fixed order

    def fingerprint(self) -> str:
        """Hash of version and of each file's path, size and modification time: the text is not read."""
        lines = [self.version]
        for path in self.files:
            status = path.stat()
            lines.append(f"{path}\t{status.st_size}\t{status.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def find_corpus(source: str) -> Corpus:
    """Finds a corpus by name or path.

    Args:
      source: "stdlib" (each .py file of the Python standard library a document, tests left out), "botocore" (each AWS
        service's documentation a document), or the path of a .txt, .md or .py file or of a folder of such files
        (hidden folders left out; each file a document). Bytes that are not UTF-8 are replaced.
    Raises:
      ValueError: the name is unknown, the path holds no such file, or botocore is not installed.
    """
    if not source.strip():  # as a path it would be the current folder
        raise ValueError(f"source={source!r} is empty; name a folder, a file, {' or '.join(_NAMED)}")
    if source in _NAMED:
        return _NAMED[source]()
    path = Path(source).expanduser()
    if path.is_file() and path.suffix in SUFFIXES:
        return Corpus(name=source, version="", files=(path.resolve(),), read=_read_files)
    if path.is_dir():
        root = path.resolve()
        files = tuple(_walk(root, SUFFIXES, lambda name: name.startswith(".") or name == "__pycache__"))
        if not files:
            raise ValueError(f"source={source!r} holds no {', '.join(SUFFIXES)} file; name a folder or file that does")
        return Corpus(name=source, version="", files=files, read=_read_files)
    if path.exists():
        raise ValueError(f"source={source!r} is not a {', '.join(SUFFIXES)} file; rename it or name another")
    close = difflib.get_close_matches(source, _NAMED, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"use {', '.join(map(repr, _NAMED))} or an existing path"
    raise ValueError(f"source={source!r} is neither a known corpus nor an existing path; {hint}")


def read_documents(corpus: Corpus) -> list[str]:
    """Reads a corpus in its fixed order, without blank documents and without repeats (the first one stays).

    Raises:
      ValueError: nothing is left.
    """
    documents = list(dict.fromkeys(text for text in corpus.read(corpus.files) if text.strip()))
    if not documents:
        raise ValueError(f"source={corpus.name!r} holds only blank text ({len(corpus.files)} files); use one with text")
    return documents


def split_documents(documents: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Splits whole documents into training and validation, both in corpus order.

    Documents are visited in the order of a hash of their text, so the choice does not depend on where they stand, and
    each goes to validation if validation stays within `fraction` of the bytes; when none fits, the smallest does. A
    corpus of a single document is cut in two after its first `1 - fraction`, or at a line's end in the half before.

    Args:
      documents: distinct, not blank.
      fraction: upper bound of the validation share, in (0, 1).
    Raises:
      ValueError: a single document has fewer than 2 characters.
    """
    if len(documents) == 1:
        (text,) = documents
        if len(text) < 2:
            raise ValueError(f"the only document is {text!r}, and 1 character cannot be split in two; use more text")
        limit = min(max(int(len(text) * (1 - fraction)), 1), len(text) - 1)
        cut = text.rfind("\n", limit // 2, limit) + 1 or limit
        return [text[:cut]], [text[cut:]]
    encoded = [text.encode() for text in documents]
    order = sorted(range(len(documents)), key=lambda i: hashlib.sha256(encoded[i]).digest())
    left = fraction * sum(map(len, encoded))
    chosen: set[int] = set()
    for i in order:
        if len(encoded[i]) <= left and len(chosen) < len(documents) - 1:
            chosen.add(i)
            left -= len(encoded[i])
    chosen = chosen or {min(order, key=lambda i: len(encoded[i]))}
    return [d for i, d in enumerate(documents) if i not in chosen], [d for i, d in enumerate(documents) if i in chosen]


def _stdlib() -> Corpus:
    files = tuple(_walk(Path(sysconfig.get_path("stdlib")), (".py",), _SKIPPED.__contains__))
    return Corpus(name="stdlib", version=f"Python {platform.python_version()}", files=files, read=_read_files)


def _botocore() -> Corpus:
    spec = importlib.util.find_spec("botocore")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "source='botocore' needs the botocore package, which is not installed; "
            "run `pip install botocore==1.44.8 --no-deps` (or the extra meshpar[demo]), or use source='stdlib'"
        )
    root = Path(spec.submodule_search_locations[0]) / "data"
    # <service>/<API version>/service-2.json.gz
    files = tuple(_walk(root, ("service-2.json.gz",), lambda name: name.startswith(".")))
    read = functools.partial(_read_botocore, root=root)
    return Corpus(name="botocore", version=f"botocore {importlib.metadata.version('botocore')}", files=files, read=read)


_NAMED: dict[str, Callable[[], Corpus]] = {"stdlib": _stdlib, "botocore": _botocore}


def _walk(root: Path, suffixes: tuple[str, ...], skip: Callable[[str], bool]) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]  # in place: os.walk does not enter the others
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(path for path in found if path.is_file())  # not a dangling link


def _read_files(files: tuple[Path, ...]) -> Iterator[str]:
    for path in files:
        yield path.read_bytes().decode("utf-8", errors="replace")


def _read_botocore(files: tuple[Path, ...], *, root: Path) -> Iterator[str]:
    """One document a service, over all versions of its API: they repeat each other, and must not straddle the split."""
    seen: set[str] = set()
    services: dict[str, list[str]] = {}
    for path in files:
        paragraphs = services.setdefault(path.relative_to(root).parts[0], [])
        for text in _documentation(json.loads(gzip.decompress(path.read_bytes()))):
            if text not in seen:
                seen.add(text)
                paragraphs.append(_plain(text))
    for paragraphs in services.values():
        yield "\n\n".join(filter(None, paragraphs)) + "\n"


def _documentation(node: Any) -> Iterator[str]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if key == "documentation" and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from _documentation(value)


def _plain(text: str) -> str:
    """HTML to text: block tags end a line, other tags vanish, runs of blanks become one."""
    text = html.unescape(_TAGS.sub("", _BLOCK_TAGS.sub("\n", text)))
    return "\n".join(line for line in (" ".join(raw.split()) for raw in text.split("\n")) if line)
