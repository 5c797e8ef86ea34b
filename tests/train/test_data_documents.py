"""What each kind of file gives, and what is said about one that is broken."""

from __future__ import annotations

import builtins
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshpar.train import documents
from meshpar.train.documents import kind_of, read_files


def read(path: Path, text_key: str = "text") -> list[str]:
    return list(read_files([path], text_key=text_key))


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refused(path: Path, text_key: str = "text") -> str:
    with pytest.raises(ValueError, match=path.name) as error:
        read(path, text_key)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    return str(error.value).removeprefix(str(path)).strip()


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a.md", "a.py", "a.txt.gz"])
def test_a_text_is_one_document_with_every_character(tmp_path: Path, name: str) -> None:
    text = "one\r\ntwo\rthree\u2028four\x1c\n漢"
    assert read(write(tmp_path / name, text)) == [text]
    assert read(write(tmp_path / name, b"\xff!")) == ["\ufffd!"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_each_line_of_a_jsonl_file_is_a_document(tmp_path: Path, name: str) -> None:
    texts = ["one\ntwo", "漢", "", "u2028 \u2028 in a line"]
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    lines += ["", '{"text": null}', "  ", '\t{"text": "last"}']
    path = write(tmp_path / name, "\n".join(lines) + "\r\n")
    assert read(path) == [*texts, "last"]
    assert read(write(tmp_path / name, '{"body": "b", "text": 3}'), "body") == ["b"]


def test_half_a_character_in_json_becomes_replacements(tmp_path: Path) -> None:
    (text,) = read(write(tmp_path / "a.jsonl", r'{"text": "a\ud800b \ud83d\ude00"}'))
    assert text.startswith("a\ufffd") and text.endswith("b 😀")
    assert text.encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'text': 'a'}", "line 2 is not JSON (Expecting property name"),
        ('{"text": "a"', "line 2 is not JSON (Expecting ',' delimiter"),
        ("[" * 100_000, "line 2 is not JSON ("),
        ('["text"]', 'line 2 is not a JSON object; write the text as {"text": "..."}'),
        ('{"txt": "a", "id": 1}', "line 2 has no key 'text'; did you mean 'txt'? set data.text_key to one of txt, id"),
        ("{}", "line 2 has no key 'text'; set data.text_key to one of (it has none)"),
        ('{"text": ["a"]}', "line 2 has text=['a'], which is no text; set data.text_key to a key of text"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_the_fix(tmp_path: Path, line: str, said: str) -> None:
    assert said in refused(write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + "\n"))


def test_a_column_of_a_parquet_file_is_read_row_by_row(tmp_path: Path) -> None:
    texts = [f"text {i} 漢" for i in range(1000)]
    table = pa.table({"id": list(range(1001)), "text": [*texts, None], "body": ["b"] * 1001})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert read(tmp_path / "a.parquet") == texts
    assert read(tmp_path / "a.parquet", "body") == ["b"] * 1001


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"])
def test_a_column_may_be_any_kind_of_string(tmp_path: Path, kind: str) -> None:
    column = pa.array(["one", "漢", "one"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pa, kind)())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", "漢", "one"]


def test_a_parquet_file_without_text_is_refused_with_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"texts": ["a"], "id": [1], "list": [["a"]]}), path)
    assert refused(path) == "has no column 'text'; did you mean 'texts'? set data.text_key to one of texts, id, list"
    assert refused(path, "id") == "has id of type int64, which is no text; set data.text_key to a column of text"
    assert "has list of type list<" in refused(path, "list")
    assert refused(write(path, "text")).startswith("is not a Parquet file (")
    whole = io.BytesIO()
    pq.write_table(pa.table({"text": [str(i) * 50 for i in range(1000)]}), whole)
    damaged = whole.getvalue()
    assert "cannot be read (" in refused(
        write(path, damaged[:50] + bytes(len(damaged) // 2) + damaged[50 + len(damaged) // 2 :])
    )


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert refused(tmp_path / "a.parquet").endswith("run `pip install pyarrow` (or the extra meshpar[parquet])")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "gone.txt") == (
        "cannot be read (No such file or directory); repair the file or leave it out"
    )
    whole = gzip.compress(b"text " * 1000)
    for content in (whole[:-20], b"text", whole[:30] + b"....." + whole[35:]):
        (tmp_path / "a.txt.gz").write_bytes(content)
        assert refused(tmp_path / "a.txt.gz").startswith("cannot be read (")


def test_long_texts_of_every_kind_are_cut_at_ends_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST", 100)
    text = "".join(f"{i} a line\r\n" for i in range(100))
    write(tmp_path / "a.txt", text)
    write(tmp_path / "a.jsonl", json.dumps({"text": text}))
    pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet")
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        parts = read(tmp_path / name)
        assert "".join(parts) == text
        assert all(part.endswith("\n") and len(part) <= 111 for part in parts) and len(parts) > 9
    parts = read(write(tmp_path / "b.txt", "x" * 1000))  # no line ends
    assert "".join(parts) == "x" * 1000 and max(map(len, parts)) == 200


def test_kinds_are_known_by_the_end_of_the_name() -> None:
    assert [kind_of(name) for name in ("a.b.txt", "a.JSONL.gz", "a.gz", "txt", "a.json")] == [
        ".txt",
        ".jsonl.gz",
        "",
        "",
        "",
    ]
