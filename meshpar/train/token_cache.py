"""Text becomes tokens once: memory-mapped arrays in a cache folder, keyed by what decides their values.

    <root>/<content key>/   train.npy  validation.npy       uint16 or uint32 [tokens], every document ends with `eod`
                            train_offsets.npy  validation_offsets.npy   int64 [documents + 1], where each document
                            begins tokenizer.json  meta.json
    <root>/index/<cheap key>                                the content key

The content key hashes the text itself, the cheap key only the list of files with sizes and times. A cheap key that is
known answers without reading the text; files that were touched or moved, yet say the same, are read and hashed but not
tokenised. A folder is written under a temporary name and renamed, so a reader never sees half of one; of two processes
that make the same folder at once, the one that renames last drops its copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.train.corpus import Corpus, find_corpus, read_documents, split_documents
from meshpar.train.tokenizer import Tokenizer, make_tokenizer, tokenizer_identity

FORMAT = 1  # raise it when the files, the split or the cleaning of text change
_CHUNK = 64  # documents per call of the tokenizer: enough for its threads, and the progress bar still moves


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The tokens of one split, one document after another."""

    tokens: np.ndarray  # uint16 or uint32 [tokens], memory-mapped; every document ends with eod
    offsets: np.ndarray  # int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]]
    eod: int


def default_root() -> Path:
    """`$MESHPAR_CACHE/data`, or `~/.cache/meshpar/data` where the variable is not set."""
    return Path(os.environ.get("MESHPAR_CACHE") or Path.home() / ".cache" / "meshpar") / "data"


def cached_tokens(source: str, tokenizer: str, *, validation: float, root: Path, progress: bool | None) -> Path:
    """Returns the folder of tokens of a corpus, which is made when it is not there.

    Args:
      source: see `corpus.find_corpus`.
      tokenizer: see `tokenizer.check_tokenizer`; a BPE is trained on the training split alone.
      validation: its share, see `fraction` in `corpus.split_documents`.
      root: the cache folder; made when missing.
      progress: show a progress bar on stderr; None: only where that is a terminal.
    Raises:
      ValueError: the corpus or the tokenizer is not known, or the corpus has no text.
    """
    corpus = find_corpus(source)
    identity = tokenizer_identity(tokenizer)
    cheap = _key(corpus.fingerprint(), identity, repr(validation))
    index = root / "index" / cheap
    if index.is_file():
        folder = root / index.read_text()
        if _complete(folder):
            return folder
    splits = split_documents(read_documents(corpus), validation)
    content = _key(*map(_hash_documents, splits), identity)
    folder = root / content
    if not _complete(folder):
        with _progress(progress) as report:
            _write(folder, corpus, tokenizer, *splits, report)
    index.parent.mkdir(parents=True, exist_ok=True)
    temporary = index.with_name(f"{cheap}.{uuid.uuid4().hex}")
    temporary.write_text(content)
    os.replace(temporary, index)
    return folder


def load_stream(folder: Path, split: str, eod: int) -> TokenStream:
    """Maps one split ("train" or "validation") of a cached folder into memory."""
    tokens, offsets = (np.load(folder / f"{split}{part}.npy", mmap_mode="r") for part in ("", "_offsets"))
    return TokenStream(tokens=tokens, offsets=offsets, eod=eod)


_Report = Callable[[str, int, int], None]  # what is being done, how many are done, of how many (0: not known)


def _write(folder: Path, corpus: Corpus, spec: str, train: list[str], validation: list[str], report: _Report) -> None:
    report(f"making tokenizer {spec}", 0, 0)
    tokenizer = make_tokenizer(spec, train)
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        meta: dict[str, object] = dict(format=FORMAT, source=corpus.name, version=corpus.version, tokenizer=spec)
        meta.update(vocab=tokenizer.vocab, eod=tokenizer.eod)
        for split, documents in (("train", train), ("validation", validation)):
            parts = list(_encode(tokenizer, documents, split, report))
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            np.save(temporary / f"{split}.npy", np.concatenate(parts))
            np.save(temporary / f"{split}_offsets.npy", offsets)
            size = sum(len(text.encode()) for text in documents)
            meta[split] = dict(documents=len(documents), tokens=int(offsets[-1]), bytes=size)
        tokenizer.save(temporary)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
        try:
            os.rename(temporary, folder)
        except OSError:  # the folder is there: another process was faster, or someone emptied it
            if not _complete(folder):
                shutil.rmtree(folder)
                os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encode(tokenizer: Tokenizer, documents: Sequence[str], split: str, report: _Report) -> Iterator[np.ndarray]:
    for begin in range(0, len(documents), _CHUNK):
        yield from tokenizer.encode_documents(documents[begin : begin + _CHUNK])
        report(f"tokenising {split}", min(begin + _CHUNK, len(documents)), len(documents))


def _complete(folder: Path) -> bool:
    arrays = [f"{split}{part}.npy" for split in ("train", "validation") for part in ("", "_offsets")]
    return all((folder / name).is_file() for name in (*arrays, "tokenizer.json", "meta.json"))


def _hash_documents(documents: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in documents:
        data = text.encode()
        digest.update(b"%d\n" % len(data))  # where a document ends counts
        digest.update(data)
    return digest.hexdigest()


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _progress(wanted: bool | None) -> Iterator[_Report]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
