"""Corpora are found by name, path or pattern, alone or with weights, and read in a fixed order."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from fractions import Fraction
from pathlib import Path

import pytest

from meshpar.train import corpus
from meshpar.train.corpus import find_corpus, parse_sources


def read(source: str, **options: str) -> list[str]:
    corpus = find_corpus(source, **options)
    return list(corpus.read(corpus.files))


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    contents = {"b.txt": "two", "a.md": "one", "sub/c.py": "three", "d.txt": "two", "e.txt": " \n", "f.bin": "no"}
    contents |= {".hidden/g.txt": "no", "z.txt": "crlf\r\n"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    (tmp_path / "bad.txt").write_bytes(b"\xff!")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert read(str(tmp_path)) == ["one", "two", "\ufffd!", "two", " \n", "three", "crlf\r\n"]
    assert read(str(tmp_path / "b.txt")) == ["two"]


def test_a_fingerprint_changes_with_content_time_and_names(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, ns=(1, 1))

    def fingerprint() -> str:
        return find_corpus(str(tmp_path)).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    seen = {first}
    for change in (
        lambda: os.utime(file, ns=(2, 2)),
        lambda: (file.write_text("four"), os.utime(file, ns=(2, 2))),
        lambda: (tmp_path / "b.txt").write_text(""),
    ):
        change()
        seen.add(fingerprint())
    assert len(seen) == 4


def test_stdlib_is_python_source_without_its_tests() -> None:
    found = find_corpus("stdlib")
    names = {path.name for path in found.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    folders = {part for path in found.files for part in path.parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}
    assert 5e6 < sum(path.stat().st_size for path in found.files) < 30e6
    assert found.files == find_corpus("stdlib").files


def fake_botocore(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of botocore's layout in place of the real one, which not every installation has."""
    services = {
        "alpha/2020-01-01": {"documentation": "<p>First &amp; <b>bold</b>.</p><p>Use &lt;name&gt;.</p>"},
        "alpha/2021-01-01": {"shapes": [{"documentation": "Newer."}, {"documentation": "<p>Shared.</p>"}]},
        "beta/2020-01-01": {"documentation": "<p>Shared.</p>", "operations": {"Do": {"documentation": "Own."}}},
    }
    for name, content in services.items():
        folder = root / "data" / name
        folder.mkdir(parents=True)
        (folder / "service-2.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    spec = importlib.util.spec_from_loader("botocore", loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(root)]
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(corpus.importlib.metadata, "version", lambda name: "1.0")


def test_botocore_gives_one_document_a_service_and_no_paragraph_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_botocore(tmp_path, monkeypatch)
    alpha, beta = read("botocore")
    assert alpha == "First & bold.\nUse <name>.\n\nNewer.\n\nShared.\n"
    assert beta == "Own.\n"


def test_botocore_that_is_not_installed_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install botocore==1\.44\.8 --no-deps.*meshpar\[demo\]"):
        find_corpus("botocore")


def test_a_source_that_cannot_be_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    def refused(source: str) -> str:
        with pytest.raises(ValueError, match="source=") as error:
            find_corpus(source)
        return str(error.value)

    assert "source='stdlb' is neither a known corpus nor an existing path; did you mean 'stdlib'?" in refused("stdlb")
    assert "use 'stdlib', 'botocore' or an existing path" in refused("wikipedia")
    assert "for a mixture write 'stdlib=1 botocore=1'" in refused("stdlib botocore")
    assert "is empty; name a folder" in refused(" ")
    assert "is neither" in refused("a" * 5000)
    assert "holds no .txt, .md, .py, .txt.gz, .jsonl, .jsonl.gz, .parquet file" in refused(str(tmp_path))
    (tmp_path / "a.json").write_text("[1, 2]")
    assert "is not a .txt, .md, .py, .txt.gz, .jsonl" in refused(str(tmp_path / "a.json"))
    assert "did you mean '.jsonl'? convert or rename it" in refused(str(tmp_path / "a.json"))
    assert f"did you mean '{tmp_path}/a.json'?" in refused(str(tmp_path / "a.jsn"))
    assert "matches nothing; look for its files with ls" in refused(str(tmp_path / "*.txt"))
    assert "matches a.json but no .txt, .md" in refused(str(tmp_path / "*"))


def test_a_pattern_finds_files_of_known_kinds_at_any_depth(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", "b/d/f.csv", "b/.g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(f"{tmp_path}/*") == ["a.txt"]
    assert read(f"{tmp_path}/b/*.txt") == ["b/c.txt"]
    assert read(f"{tmp_path}/**/*.txt") == read(f"{tmp_path}/**") == ["a.txt", "b/c.txt", "b/d/e.txt"]
    assert read(f"{tmp_path}/[ab].txt") == ["a.txt"]


def test_the_key_of_the_text_is_part_of_the_fingerprint_only_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    plain = {find_corpus(str(tmp_path), text_key=key).fingerprint() for key in ("text", "body")}
    (tmp_path / "b.jsonl").write_text('{"text": "one", "body": "two"}')
    keyed = {find_corpus(str(tmp_path), text_key=key).fingerprint() for key in ("text", "body")}
    assert (len(plain), len(keyed)) == (1, 2)


def test_weights_are_exact_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_sources("stdlib") == {"stdlib": 1}
    assert parse_sources("stdlib=0.7 botocore=0.3") == {"stdlib": Fraction(7, 10), "botocore": Fraction(3, 10)}
    assert parse_sources("a/*.jsonl=2  b=1 'my texts'=1e0") == {
        "a/*.jsonl": Fraction(1, 2),
        "b": Fraction(1, 4),
        "my texts": Fraction(1, 4),
    }
    assert parse_sources("stdlib=3") == {"stdlib": 1}
    assert parse_sources("a/year=2024/*.parquet") == {"a/year=2024/*.parquet": 1}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=1.txt").touch()
    assert parse_sources("a=1.txt") == {"a=1.txt": 1}  # it exists
    assert parse_sources("a=1.txt=2 b=2") == {"a=1.txt": Fraction(1, 2), "b": Fraction(1, 2)}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("stdlib=0.7 botocore", "gives 'botocore' no weight; write botocore=0.5, say"),
        ("stdlib=0 botocore=1", "weighs stdlib by '0', which is no number above 0"),
        ("stdlib=-1 botocore=1", "weighs stdlib by '-1'"),
        ("stdlib=nan botocore=1", "weighs stdlib by 'nan'"),
        ("stdlib=inf botocore=1", "weighs stdlib by 'inf'"),
        ("stdlib=70% botocore=1", "weighs stdlib by '70%'"),
        ("stdlib= botocore=1", "weighs stdlib by ''"),
        ("stdlib=1 stdlib=2", "names stdlib twice; add its weights up"),
        ("stdlib=1 'botocore=2", "close the quote"),
    ],
)
def test_a_bad_mixture_is_refused_with_the_fix(source: str, said: str) -> None:
    with pytest.raises(ValueError, match="source=") as error:
        parse_sources(source)
    assert said in str(error.value)
