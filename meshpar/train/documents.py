"""Files become documents, one after another: what a suffix means.

    .txt .md .py     the file is one document                               .txt may be .txt.gz
    .jsonl           one JSON object a line; its `text_key` is a document   .jsonl.gz
    .parquet         one document a row, in the column `text_key`           needs pyarrow

A text of more than a million characters is cut at ends of lines into documents of about that length, so that neither
reading nor tokenising it holds more. Bytes that are not UTF-8 become U+FFFD. A null is no document.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from meshpar.layout.rules import did_you_mean

LONGEST = 2**20  # characters; a document may be longer by the rest of its line
_ROWS = 256  # of a Parquet file, decoded at a time


def read_files(files: Iterable[Path], *, text_key: str) -> Iterator[str]:
    """The documents of files, in the order of the files.

    Raises:
      ValueError: a file cannot be read, or is not what its suffix says; with its path, and the line where there are
        lines.
    """
    for path in files:
        with readable(path):
            yield from READERS[kind_of(path.name)](path, text_key)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what a damaged or missing file raises into one sentence, a ValueError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        told = getattr(error, "strerror", None) or error  # without the path again
        raise ValueError(f"{path} cannot be read ({told}); repair the file or leave it out") from None


def kind_of(name: str) -> str:
    """The suffix of `READERS` that a file's name ends with; empty: none."""
    return next((suffix for suffix in READERS if name.lower().endswith(suffix)), "")


def cut_long(stream: TextIO) -> Iterator[str]:
    """A text in documents of `LONGEST` characters and the rest of the line; a line twice as long is cut inside."""
    while block := stream.read(LONGEST):
        yield block + stream.readline(LONGEST)


def cut_long_text(text: str) -> Iterator[str]:
    """`cut_long` of a text that is in memory."""
    return iter([text]) if len(text) <= LONGEST else cut_long(io.StringIO(text, newline="\n"))


def _open(path: Path) -> TextIO:
    # newline="\n": lines end there alone, and every character stays
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="\n")
    return path.open(encoding="utf-8", errors="replace", newline="\n")


def _read_text(path: Path, text_key: str) -> Iterator[str]:
    with _open(path) as stream:
        yield from cut_long(stream)


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a .jsonl or .jsonl.gz file, each with where it stands. Raises ValueError for what is not JSON."""
    with _open(path) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            where = f"{path} line {number}"
            try:
                value = json.loads(line.removeprefix("\ufeff"))  # a byte-order mark
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON ({error}); repair or delete the line") from None
            yield where, value


def _read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    for where, row in json_lines(path):
        if not isinstance(row, dict):
            raise ValueError(f'{where} is not a JSON object; write the text as {{"{text_key}": "..."}}')
        if text_key not in row:
            raise ValueError(_no_text(where, "key", text_key, row))
        text = row[text_key]
        if text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(
                f"{where} has {text_key}={text!r:.40}, which is no text; set data.text_key to a key of text"
            )
        if not text.isascii():  # \ud800 is legal JSON and half a character: UTF-8 cannot encode it
            text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        yield from cut_long_text(text)


def _read_parquet(path: Path, text_key: str) -> Iterator[str]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(
            f"{path} needs the pyarrow package, which is not installed; run `pip install pyarrow` (or the extra "
            "meshpar[parquet])"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file ({error}); repair the file or leave it out") from None
    with file:
        schema = file.schema_arrow
        if text_key not in schema.names:
            raise ValueError(_no_text(str(path), "column", text_key, schema.names))
        kind = schema.field(text_key).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if str(kind).removeprefix("large_").removesuffix("_view") not in ("string", "binary"):
            raise ValueError(
                f"{path} has {text_key} of type {kind}, which is no text; set data.text_key to a column of text"
            )
        try:
            for batch in file.iter_batches(batch_size=_ROWS, columns=[text_key], use_threads=False):
                column = batch.column(0)
                if arrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                for data in column.cast(arrow.large_binary()).to_pylist():
                    if data is not None:
                        yield from cut_long_text(data.decode("utf-8", "replace"))
        except arrow.ArrowException as error:
            raise ValueError(f"{path} cannot be read ({error}); repair the file or leave it out") from None


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".txt.gz": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".parquet": _read_parquet,
}


def _no_text(where: str, what: str, text_key: str, names: Iterable[str]) -> str:
    names = [str(name) for name in names]
    hint = did_you_mean(text_key, names) or ";"
    return f"{where} has no {what} {text_key!r}{hint} set data.text_key to one of {', '.join(names) or '(it has none)'}"
