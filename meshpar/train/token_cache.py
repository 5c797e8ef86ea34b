"""Text becomes tokens once: memory-mapped arrays in a cache folder, keyed by what decides their values.

    <root>/<content key>/   train.npy  validation.npy       uint16 or uint32 [tokens], every document ends with `eod`
                            train_offsets.npy  validation_offsets.npy   int64 [documents + 1], where each document
                            begins tokenizer.json  meta.json
    <root>/index/<cheap key>                                the content key

The content key hashes the text itself, the cheap key only the list of files with sizes and times. A cheap key that is
known answers without reading the text; files that were touched or moved, yet say the same, are read and hashed but not
tokenised. The sources of a mixture have a folder each and share one tokenizer; a BPE is trained on them all, which is
then a part of each key.

Nothing is held but a few MB of text: a corpus is read to survey it (`split.py`), read to train a BPE, and read to write
tokens as they come. A folder is written under a temporary name and renamed, so a reader never sees half of one; of two
processes that make the same folder at once, the one that renames last drops its copy. What a killed process left is
deleted a day later.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.train.corpus import find_corpus
from meshpar.train.split import Survey, documents, survey
from meshpar.train.tokenizer import Tokenizer, is_trained, load_tokenizer, make_tokenizer, tokenizer_identity

FORMAT = 3  # raise it when the files, the split, the cleaning of text or what stands around a document change
_CHUNK = 2**20  # characters for each call of the tokenizer: enough for its threads, and the progress bar still moves
_SPLITS = ("train", "validation")
_ABANDONED = 86_400  # seconds


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The tokens of one split, one document after another."""

    tokens: np.ndarray  # uint16 or uint32 [tokens], memory-mapped; every document ends with eod
    offsets: np.ndarray  # int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]]
    eod: int
    # bool [tokens]: which are to be learned, as of answers in conversations, whose documents may end with any token;
    # None: all
    learned: np.ndarray | None = None


def default_root() -> Path:
    """`$MESHPAR_CACHE/data`, or `~/.cache/meshpar/data` where the variable is not set."""
    return Path(os.environ.get("MESHPAR_CACHE") or Path.home() / ".cache" / "meshpar") / "data"


def cached_tokens(
    sources: Sequence[str], tokenizer: str, *, text_key: str, validation: float, root: Path, progress: bool | None
) -> list[Path]:
    """Returns for each source the folder of its tokens, which is made when it is not there.

    Args:
      sources: see `corpus.find_corpus`.
      tokenizer: one for all, see `tokenizer.check_tokenizer`; a BPE is trained on the training splits of all sources.
      text_key: where .jsonl and .parquet files hold the text.
      validation: its share of each source, see `fraction` in `split.survey`.
      root: the cache folder; made when missing.
      progress: show a progress bar on stderr; None: only where that is a terminal.
    Raises:
      ValueError: a source or the tokenizer is not known, or a source has no text.
    """
    corpora = [find_corpus(source, text_key=text_key) for source in sources]
    identity = tokenizer_identity(tokenizer)
    prints = [corpus.fingerprint() for corpus in corpora]
    together = sorted(prints) if is_trained(tokenizer) else []
    indexes = [root / "index" / _key(one, identity, repr(validation), *together) for one in prints]
    known = [root / index.read_text() for index in indexes if index.is_file()]
    if len(known) == len(indexes) and all(map(_complete, known)):
        return known
    _delete_abandoned(root)
    with _progress(progress) as report:
        surveys = []
        for corpus in corpora:
            told = f"reading {_short(corpus.name)}"
            surveys.append(survey(corpus, validation, lambda size, told=told: report(told, size, 0)))  # type: ignore[misc]
        contents = [found.identity() for found in surveys]
        together = sorted(contents) if is_trained(tokenizer) else []
        folders = [root / _key(content, identity, *together) for content in contents]
        made: Tokenizer | None = None
        if is_trained(tokenizer):  # a mixture that was interrupted has it already
            made = next((load_tokenizer(folder) for folder in folders if _complete(folder)), None)
        for folder, found in zip(folders, surveys, strict=True):
            if not _complete(folder):
                # in an order of their own, so that a mixture named the other way round has the same tokenizer
                ordered = [surveys[i] for i in sorted(range(len(surveys)), key=contents.__getitem__)]
                made = made or make_tokenizer(tokenizer, _training_text(ordered, tokenizer, report))
                _write(folder, found, tokenizer, made, report)
    for index, folder in zip(indexes, folders, strict=True):
        index.parent.mkdir(parents=True, exist_ok=True)
        temporary = index.with_name(f"{index.name}.{uuid.uuid4().hex}")
        temporary.write_text(folder.name)
        os.replace(temporary, index)
    return folders


def load_stream(folder: Path, split: str, eod: int) -> TokenStream:
    """Maps one split ("train" or "validation") of a cached folder into memory."""
    tokens, offsets = (np.load(folder / f"{split}{part}.npy", mmap_mode="r") for part in ("", "_offsets"))
    return TokenStream(tokens=tokens, offsets=offsets, eod=eod)


def join_streams(streams: Sequence[TokenStream]) -> TokenStream:
    """Several streams of one tokenizer as one; the tokens of more than one are copied into memory."""
    if len(streams) == 1:
        return streams[0]
    begins = np.cumsum([0, *(len(stream.tokens) for stream in streams)])
    offsets = [stream.offsets[1:] + begin for stream, begin in zip(streams, begins[:-1], strict=True)]
    tokens = np.concatenate([stream.tokens for stream in streams])
    learned = [stream.learned for stream in streams if stream.learned is not None]
    return TokenStream(
        tokens=tokens,
        offsets=np.concatenate([[0], *offsets]),
        eod=streams[0].eod,
        learned=np.concatenate(learned) if learned else None,
    )


_Report = Callable[[str, int, int], None]  # what is being done, bytes of text done, of how many (0: not known)


def _training_text(surveys: Sequence[Survey], spec: str, report: _Report) -> Iterator[str]:
    done, total = 0, sum(found.size for found in surveys)
    for found in surveys:
        for text, held_out in documents(found):
            done += len(text.encode())
            report(f"training {spec}", done, total)
            if not held_out:
                yield text


def _write(folder: Path, found: Survey, spec: str, tokenizer: Tokenizer, report: _Report) -> None:
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(_Writer(temporary, split, dtype)) for split in _SPLITS]
            done = 0
            for chunk in _chunks(documents(found)):
                encoded = tokenizer.encode_documents([text for text, _ in chunk])
                for (text, held_out), ids in zip(chunk, encoded, strict=True):
                    size = len(text.encode())
                    writers[held_out].add(ids, size)
                    done += size
                report(f"tokenising {_short(found.corpus.name)}", done, found.size)
        meta: dict[str, object] = dict(format=FORMAT, source=found.corpus.name, version=found.corpus.version)
        meta.update(tokenizer=spec, vocab=tokenizer.vocab, eod=tokenizer.eod)
        meta.update({split: writer.counts() for split, writer in zip(_SPLITS, writers, strict=True)})
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


class _Writer:
    """Writes the two arrays of a split, whose lengths are known at the end."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._offsets = array.array("q", [0])
        self._offsets_path = folder / f"{split}_offsets.npy"
        self._bytes = 0
        self._file = (folder / f"{split}.npy").open("wb")
        self._header = self._write_header()

    def __enter__(self) -> _Writer:
        return self

    def add(self, ids: np.ndarray, size: int) -> None:
        """Appends a document of `size` bytes."""
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        self._bytes += size

    def __exit__(self, *raised: object) -> None:
        with self._file:
            self._file.seek(0)
            assert self._write_header() == self._header  # numpy leaves room for any length
        np.save(self._offsets_path, np.array(self._offsets, np.int64))

    def counts(self) -> dict[str, int]:
        return dict(documents=len(self._offsets) - 1, tokens=self._offsets[-1], bytes=self._bytes)

    def _write_header(self) -> int:
        """Returns where the data begins."""
        header = dict(descr=self._dtype.str, fortran_order=False, shape=(self._offsets[-1],))
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


def _short(name: str) -> str:
    """The end of a path that is too long to stand before a progress bar."""
    return name if len(name) <= 24 else f"…{name[-23:]}"


def _chunks(texts: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    chunk: list[tuple[str, bool]] = []
    length = 0
    for one in texts:
        chunk.append(one)
        length += len(one[0])
        if length >= _CHUNK:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk


def _complete(folder: Path) -> bool:
    arrays = [f"{split}{part}.npy" for split in _SPLITS for part in ("", "_offsets")]
    return all((folder / name).is_file() for name in (*arrays, "tokenizer.json", "meta.json"))


def _delete_abandoned(root: Path) -> None:
    """Deletes temporary folders that nothing was written into for a day: a process that is killed leaves one."""
    for folder in root.glob("*.*"):
        with contextlib.suppress(OSError):  # its process has just renamed it
            if max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < time.time() - _ABANDONED:
                shutil.rmtree(folder)


def _key(*parts: str) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _progress(wanted: bool | None) -> Iterator[_Report]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    told = TextColumn("{task.description}", markup=False)  # a source may have brackets
    columns = (told, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reading", total=None)

        def report(what: str, done: int, total: int) -> None:
            if bar.tasks[0].description != what:  # another speed and time
                bar.reset(task, total=total or None)
            bar.update(task, description=what, completed=done, total=total or None)

        yield report
