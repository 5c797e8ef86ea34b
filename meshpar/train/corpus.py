"""Where text comes from: a named corpus, or files, folders and patterns of the user's own; alone or mixed by weight.

No corpus needs a download: `stdlib` is the source code of the running Python (about 12 MB), and `botocore` the English
prose in the installed botocore package (about 33 MB). A corpus is found first (names, sizes and times of its files:
milliseconds) and read only when its tokens are not in the cache, one document after another.
"""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import html
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from meshpar.layout.rules import did_you_mean
from meshpar.train.documents import READERS, cut_long_text, kind_of, read_files

# Folders that are never walked: tests repeat each other, and installed packages differ from machine to machine.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_BLOCK_TAGS = re.compile(r"</?(?:p|br|li|[uod]l|dt|dd|h\d|note|important|div|table|t[rdh])\b[^>]*>", re.IGNORECASE)
_TAGS = re.compile(r"</?[A-Za-z][^>]*>")
_KINDS = ", ".join(READERS)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that was found and is not read yet."""

    name: str  # the source as it was asked for
    version: str  # what decides the text beside the files: "Python 3.11.7", "text_key=text"
    files: tuple[Path, ...]  # in the order in which they are read
    read: Callable[[tuple[Path, ...]], Iterator[str]]  # files to documents, in a fixed order

    def fingerprint(self) -> str:
        """Hash of version and of each file's path, size and modification time: the text is not read."""
        lines = [self.version]
        for path in self.files:
            status = path.stat()
            lines.append(f"{path}\t{status.st_size}\t{status.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def parse_sources(source: str) -> dict[str, Fraction]:
    """The sources that a mixture names, in order, with their shares of the rows, which add up to 1.

    Args:
      source: one source as `find_corpus` takes it, or a mixture "stdlib=0.7 botocore=0.3" of several. Weights need not
        add up to 1. A path with blanks is quoted: "'my texts'=1 stdlib=2". A path that exists is never a mixture, nor
        is a single word with a "/" behind its last "=".
    Raises:
      ValueError: a weight is missing, no number or not above 0, or a source is named twice.
    """
    if "=" not in source or os.path.exists(os.path.expanduser(source)):
        return {source: Fraction(1)}
    try:
        words = shlex.split(source)
    except ValueError as error:
        raise ValueError(f"source={source!r} cannot be read ({error}); close the quote") from None
    if len(words) == 1 and "/" in words[0].rpartition("=")[2]:  # data/year=2024/*.parquet
        return {source: Fraction(1)}
    weights: dict[str, Fraction] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        if not name:
            raise ValueError(f"source={source!r} gives {word!r} no weight; write {word}=0.5, say")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ValueError(
                f"source={source!r} weighs {name} by {text!r}, which is no number above 0; write {name}=0.5, say"
            )
        if name in weights:
            raise ValueError(f"source={source!r} names {name} twice; add its weights up")
        weights[name] = Fraction(str(weight))  # 0.7 is 7/10
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def find_corpus(source: str, *, text_key: str = "text") -> Corpus:
    """Finds a corpus by name, path or pattern.

    Args:
      source: "stdlib" (each .py file of the Python standard library a document, tests left out), "botocore" (each AWS
        service's documentation a document), or the path of a file of a kind that `documents.READERS` has, of a folder
        of such files (hidden ones and other kinds left out), or a pattern of such files ("data/*.jsonl"; "**" is any
        depth).
      text_key: where .jsonl and .parquet files hold the text.
    Raises:
      ValueError: the name is unknown, the path or pattern holds no such file, or botocore is not installed.
    """
    if not source.strip():  # as a path it would be the current folder
        raise ValueError(f"source={source!r} is empty; name a folder, a file, {' or '.join(_NAMED)}")
    if source in _NAMED:
        return _NAMED[source]()
    path = Path(source).expanduser()
    if os.path.isdir(path):  # of os.path, because Path.is_dir raises for a name that is too long
        files = _walk(path.resolve(), tuple(READERS), lambda name: name.startswith(".") or name == "__pycache__")
        if not files:
            raise ValueError(f"source={source!r} holds no {_KINDS} file; name a folder or file that does")
    elif os.path.exists(path):
        if not (kind_of(path.name) and path.is_file()):
            hint = did_you_mean(path.suffix, READERS) or ";"
            raise ValueError(f"source={source!r} is not a {_KINDS} file{hint} convert or rename it, or name another")
        files = [path.resolve()]
    elif any(letter in source for letter in "*?["):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [one.resolve() for one in found if one.is_file() and kind_of(one.name)]
        if not files:
            what = f"matches {found[0].name} but no {_KINDS} file" if found else "matches nothing"
            raise ValueError(f"source={source!r} {what}; look for its files with ls")
    else:
        raise ValueError(f"source={source!r} is neither a known corpus nor an existing path{_near(source, path)}")
    keyed = any(kind_of(file.name).startswith((".jsonl", ".parquet")) for file in files)
    return Corpus(
        name=source,
        version=f"text_key={text_key}" if keyed else "",
        files=tuple(files),
        read=functools.partial(read_files, text_key=text_key),
    )


def _near(source: str, path: Path) -> str:
    """What to write instead of a source that is not there."""
    words = source.split()
    if len(words) > 1 and all(word in _NAMED or os.path.exists(word) for word in words):
        return f"; for a mixture write {' '.join(f'{word}=1' for word in words)!r}"
    try:
        beside = [str(path.parent / name) for name in os.listdir(path.parent)] if len(path.parts) > 1 else []
    except OSError:
        beside = []
    known = ", ".join(map(repr, _NAMED))
    return did_you_mean(source, _NAMED) or did_you_mean(str(path), beside) or f"; use {known} or an existing path"


def _stdlib() -> Corpus:
    files = tuple(_walk(Path(sysconfig.get_path("stdlib")), (".py",), _SKIPPED.__contains__))
    read = functools.partial(read_files, text_key="")
    return Corpus(name="stdlib", version=f"Python {platform.python_version()}", files=files, read=read)


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
        found += [Path(folder, name) for name in names if name.lower().endswith(suffixes) and not skip(name)]
    return sorted(path for path in found if path.is_file())  # not a dangling link


def _read_botocore(files: tuple[Path, ...], *, root: Path) -> Iterator[str]:
    """One document a service, over all versions of its API: they repeat each other, and must not straddle the split."""
    seen: set[str] = set()
    for _, versions in itertools.groupby(files, lambda path: path.relative_to(root).parts[0]):
        paragraphs = []
        for path in versions:
            for text in _documentation(json.loads(gzip.decompress(path.read_bytes()))):
                if text not in seen:
                    seen.add(text)
                    paragraphs.append(_plain(text))
        yield from cut_long_text("\n\n".join(filter(None, paragraphs)) + "\n")


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
