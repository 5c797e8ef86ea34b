"""Text is tokenised once, whatever runs next to it, and again only when what decides the tokens has changed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshpar.train import corpus, token_cache
from meshpar.train.data import DataConfig, open_dataset
from meshpar.train.token_cache import cached_tokens, default_root


def write_corpus(folder: Path, count: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " + "word " * (i % 7) + "\n")
    return folder


def tokens_of(text: Path, root: Path, tokenizer: str = "bytes", validation: float = 0.2) -> Path:
    return cached_tokens(str(text), tokenizer, validation=validation, root=root, progress=None)


@pytest.fixture
def forbid_tokenising(monkeypatch: pytest.MonkeyPatch):
    def forbid() -> None:
        monkeypatch.setattr(token_cache, "_write", lambda *args: pytest.fail("tokenised again"))

    return forbid


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_is_on_disk_once_and_decodes_to_its_text(tmp_path: Path, tokenizer: str) -> None:
    text = write_corpus(tmp_path / "text")
    data = open_dataset(DataConfig(source=str(text), tokenizer=tokenizer), cache=tmp_path / "cache")
    decoded = []
    for stream in (data.train, data.validation):
        assert isinstance(stream.tokens, np.memmap)
        assert stream.tokens.dtype == np.uint16
        assert stream.offsets[0] == 0 and stream.offsets[-1] == len(stream.tokens)
        for begin, end in itertools.pairwise(stream.offsets):
            document = stream.tokens[begin:end]
            assert document[-1] == data.tokenizer.eod and data.tokenizer.eod not in document[:-1]
            decoded.append(data.tokenizer.decode(document))
    assert sorted(decoded) == sorted(path.read_text() for path in text.iterdir())
    meta = json.loads((data.folder / "meta.json").read_text())
    assert meta["vocab"] == data.vocab and meta["train"]["tokens"] == len(data.train.tokens)
    assert meta["train"]["bytes"] + meta["validation"]["bytes"] == sum(p.stat().st_size for p in text.iterdir())


def test_bpe_is_trained_on_the_training_split_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    make = token_cache.make_tokenizer
    monkeypatch.setattr(token_cache, "make_tokenizer", lambda spec, text: seen.update(text=text) or make(spec, text))
    text = write_corpus(tmp_path / "text")
    data = open_dataset(DataConfig(source=str(text), tokenizer="bpe:300"), cache=tmp_path / "cache")
    train = [data.tokenizer.decode(data.train.tokens[a:b]) for a, b in itertools.pairwise(data.train.offsets)]
    assert seen["text"] == train
    assert 0 < len(train) < 40


def test_the_second_open_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    first = tokens_of(text, root)
    monkeypatch.setattr(token_cache, "read_documents", lambda *args: pytest.fail("read the text again"))
    assert tokens_of(text, root) == first


def test_touched_or_moved_files_are_hashed_but_not_tokenised(tmp_path: Path, forbid_tokenising) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    first = tokens_of(text, root)
    forbid_tokenising()
    os.utime(text / "000.txt", ns=(1, 1))
    assert tokens_of(text, root) == first
    assert tokens_of(text.rename(tmp_path / "moved"), root) == first


def test_text_tokenizer_and_split_each_have_their_own_tokens(tmp_path: Path) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    folders = {tokens_of(text, root), tokens_of(text, root, "bpe:300"), tokens_of(text, root, "bpe:301")}
    folders.add(tokens_of(text, root, validation=0.5))
    (text / "000.txt").write_text("changed!")
    folders.add(tokens_of(text, root))
    assert len(folders) == 5


def test_a_damaged_folder_is_made_again(tmp_path: Path) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    folder = tokens_of(text, root)
    content = (folder / "train.npy").read_bytes()
    (folder / "train.npy").unlink()
    assert tokens_of(text, root) == folder
    assert (folder / "train.npy").read_bytes() == content


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    monkeypatch.setattr(token_cache.json, "dumps", failing(token_cache.json.dumps, on="format"))
    with pytest.raises(OSError, match="disk full"):
        tokens_of(text, root)
    assert list(root.iterdir()) == []


def failing(dumps, on: str):
    def wrapped(value, **kwargs):
        if isinstance(value, dict) and on in value:
            raise OSError("disk full")
        return dumps(value, **kwargs)

    return wrapped


def test_the_slower_of_two_writers_drops_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    folder = tokens_of(text, tmp_path / "other")
    rename = os.rename

    def rename_late(source: Path, target: Path) -> None:
        shutil.copytree(folder, target)  # the other process finishes just now
        (target / "winner").touch()
        rename(source, target)

    monkeypatch.setattr(token_cache.os, "rename", rename_late)
    assert tokens_of(text, root) == root / folder.name
    assert (root / folder.name / "winner").exists()
    assert {path.name for path in root.iterdir()} == {folder.name, "index"}


def test_processes_at_once_end_with_one_folder(tmp_path: Path) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    program = (
        "from pathlib import Path; from meshpar.train.token_cache import cached_tokens; "
        f"print(cached_tokens({str(text)!r}, 'bpe:300', validation=0.2, root=Path({str(root)!r}), progress=None))"
    )
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    (folder,) = folders
    assert {path.name for path in root.iterdir()} == {Path(folder).name, "index"}
    assert len(list((root / "index").iterdir())) == 1


def test_a_warm_open_of_many_files_takes_under_three_tenths_of_a_second(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", count=1000)
    config = DataConfig(source=str(tmp_path / "text"), tokenizer="bpe:300")
    open_dataset(config, cache=tmp_path / "cache")
    begin = time.process_time()
    open_dataset(config, cache=tmp_path / "cache")
    assert time.process_time() - begin < 0.3


def test_the_environment_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path))
    assert default_root() == tmp_path / "data"
    data = open_dataset(DataConfig(source=str(write_corpus(tmp_path / "text")), tokenizer="bytes"))
    assert data.folder.parent == tmp_path / "data"
    monkeypatch.delenv("MESHPAR_CACHE")
    assert default_root() == Path.home() / ".cache" / "meshpar" / "data"


def test_progress_shows_only_when_asked_or_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_corpus(tmp_path / "text")
    for progress, shown in ((None, False), (False, False), (True, True)):
        cached_tokens(str(text), "bytes", validation=0.2, root=tmp_path / str(progress), progress=progress)
        assert ("tokenising" in capsys.readouterr().err) == shown


def test_the_split_shares_no_document(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text")
    shutil.copy(text / "000.txt", text / "copy.txt")
    train, validation = corpus.split_documents(corpus.read_documents(corpus.find_corpus(str(text))), 0.3)
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 40
