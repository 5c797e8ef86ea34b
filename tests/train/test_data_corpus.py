"""Corpora are found by name or path, read in a fixed order, and split by document without a leak."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar.train import corpus
from meshpar.train.corpus import find_corpus, read_documents, split_documents

texts = st.lists(st.text("aé漢\n", min_size=2, max_size=20).filter(str.strip), min_size=2, max_size=12, unique=True)


@given(documents=texts, fraction=st.floats(0.01, 0.9))
def test_split_is_a_partition_by_document(documents: list[str], fraction: float) -> None:
    train, validation = split_documents(documents, fraction)
    assert train
    assert validation
    assert sorted(train + validation) == sorted(documents)
    size = sum(len(text.encode()) for text in validation)
    smallest = min(len(text.encode()) for text in documents)
    assert size <= max(fraction * sum(len(text.encode()) for text in documents), smallest)


@given(documents=texts, data=st.data())
def test_split_does_not_depend_on_the_order_of_documents(documents: list[str], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(documents))
    (train, validation), (train2, validation2) = split_documents(documents, 0.3), split_documents(shuffled, 0.3)
    if len({len(text.encode()) for text in documents}) == len(documents):  # else the smallest may be a tie
        assert set(validation) == set(validation2)
    assert [text for text in documents if text in set(train)] == train  # each part keeps the order of the corpus
    assert [text for text in shuffled if text in set(train2)] == train2


def test_a_single_document_is_cut_at_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    (train,), (validation,) = split_documents([text], 0.1)
    assert train + validation == text
    assert train.endswith("\n")
    assert 0.05 * len(text) < len(validation) < 0.15 * len(text)
    assert split_documents(["ab"], 0.5) == (["a"], ["b"])
    with pytest.raises(ValueError, match="cannot be split in two"):
        split_documents(["a"], 0.5)


def test_a_folder_gives_its_text_files_in_order_without_blanks_and_repeats(tmp_path: Path) -> None:
    contents = {"b.txt": "two", "a.md": "one", "sub/c.py": "three", "d.txt": "two", "e.txt": " \n", "f.bin": "no"}
    contents |= {".hidden/g.txt": "no", "z.txt": "crlf\r\n"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    (tmp_path / "bad.txt").write_bytes(b"\xff!")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert read_documents(find_corpus(str(tmp_path))) == ["one", "two", "\ufffd!", "three", "crlf\r\n"]
    assert read_documents(find_corpus(str(tmp_path / "b.txt"))) == ["two"]


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
    alpha, beta = read_documents(find_corpus("botocore"))
    assert alpha == "First & bold.\nUse <name>.\n\nNewer.\n\nShared.\n"
    assert beta == "Own.\n"


def test_botocore_that_is_not_installed_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install botocore==1\.44\.8 --no-deps.*meshpar\[demo\]"):
        find_corpus("botocore")


def test_a_source_that_cannot_be_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"source='stdlb' is neither.*did you mean 'stdlib'"):
        find_corpus("stdlb")
    with pytest.raises(ValueError, match="use 'stdlib', 'botocore' or an existing path"):
        find_corpus("wikipedia")
    with pytest.raises(ValueError, match=r"holds no \.txt, \.md, \.py file"):
        find_corpus(str(tmp_path))
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"is not a \.txt, \.md, \.py file"):
        find_corpus(str(tmp_path / "a.csv"))
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"holds only blank text \(1 files\)"):
        read_documents(find_corpus(str(tmp_path)))
