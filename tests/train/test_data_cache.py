"""Text is tokenised once, whatever runs next to it, and again only when what decides the tokens has changed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from meshpar.train import documents, split, token_cache
from meshpar.train.corpus import find_corpus
from meshpar.train.data import DataConfig, open_dataset
from meshpar.train.split import survey
from meshpar.train.token_cache import cached_tokens, default_root
from meshpar.train.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer


def write_corpus(folder: Path, count: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " + "word " * (i % 7) + "\n")
    return folder


def tokens_of(text: Path, root: Path, tokenizer: str = "bytes", validation: float = 0.2) -> Path:
    (folder,) = folders_of([text], root, tokenizer, validation)
    return folder


def folders_of(texts: list[Path], root: Path, tokenizer: str = "bytes", validation: float = 0.2) -> list[Path]:
    sources = [str(text) for text in texts]
    return cached_tokens(sources, tokenizer, text_key="text", validation=validation, root=root, progress=None)


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
    meta = json.loads((data.sources[0].folder / "meta.json").read_text())
    assert meta["vocab"] == data.vocab and meta["train"]["tokens"] == len(data.train.tokens)
    assert meta["train"]["bytes"] + meta["validation"]["bytes"] == sum(p.stat().st_size for p in text.iterdir())


def test_bpe_is_trained_on_the_training_split_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = training_texts(monkeypatch)
    text = write_corpus(tmp_path / "text")
    data = open_dataset(DataConfig(source=str(text), tokenizer="bpe:300"), cache=tmp_path / "cache")
    train = [data.tokenizer.decode(data.train.tokens[a:b]) for a, b in itertools.pairwise(data.train.offsets)]
    assert seen == train
    assert 0 < len(train) < 40


def training_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What tokenizers are trained on from now on."""
    seen: list[str] = []
    make = token_cache.make_tokenizer

    def watched(spec: str, texts: Iterable[str]) -> Tokenizer:
        return make(spec, (seen.append(text) or text for text in texts))

    monkeypatch.setattr(token_cache, "make_tokenizer", watched)
    return seen


def test_the_second_open_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    first = tokens_of(text, root)
    monkeypatch.setattr(token_cache, "survey", lambda *args: pytest.fail("read the text again"))
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
        f"options = dict(text_key='text', validation=0.2, root=Path({str(root)!r}), progress=None); "
        f"print(*cached_tokens([{str(text)!r}], 'bpe:300', **options))"
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
    assert data.sources[0].folder.parent == tmp_path / "data"
    monkeypatch.delenv("MESHPAR_CACHE")
    assert default_root() == Path.home() / ".cache" / "meshpar" / "data"


def test_progress_shows_only_when_asked_or_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_corpus(tmp_path / "text")
    for progress, shown in ((None, False), (False, False), (True, True)):
        root = tmp_path / str(progress)
        cached_tokens([str(text)], "bytes", text_key="text", validation=0.2, root=root, progress=progress)
        written = capsys.readouterr().err
        assert ("tokenising" in written) == shown and ("1.1/1.1 kB" in written) == shown, written


def test_long_text_is_never_held_and_comes_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST", 1000)
    monkeypatch.setattr(token_cache, "_CHUNK", 3000)
    longest = []
    encode = ByteTokenizer.encode_documents
    monkeypatch.setattr(
        ByteTokenizer,
        "encode_documents",
        lambda self, texts: longest.append(sum(map(len, texts))) or encode(self, texts),
    )
    (tmp_path / "long.txt").write_text("".join(f"{i}: a line\n" for i in range(5000)))
    data = open_dataset(DataConfig(source=str(tmp_path / "long.txt"), tokenizer="bytes"), cache=tmp_path / "cache")
    assert max(longest) < 3000 + 1000 + 20 and len(longest) > 10
    lines = []
    for stream in (data.train, data.validation):
        texts = [data.tokenizer.decode(stream.tokens[a:b]) for a, b in itertools.pairwise(stream.offsets)]
        assert all(text.endswith("\n") for text in texts)
        lines += "".join(texts).splitlines()
    assert sorted(lines) == sorted(f"{i}: a line" for i in range(5000))
    assert len(data.validation.tokens) == pytest.approx(0.05 * len(data.train.tokens), rel=0.5)


def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"

    def after_the_survey(spec: str, texts: Iterable[str]) -> Tokenizer:
        (text / "020.txt").write_text("other text")
        return ByteTokenizer()

    monkeypatch.setattr(token_cache, "make_tokenizer", after_the_survey)
    with pytest.raises(ValueError, match=r"changed while it was read; run again"):
        tokens_of(text, root)
    assert not list(root.iterdir())


def test_text_that_is_cut_short_between_two_readings_is_refused(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {i}"}) + "\n" for i in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    found = survey(find_corpus(str(tmp_path / "a.jsonl")), 0.2)
    assert len(list(split.documents(found))) == 9
    for count in (8, 10):
        (tmp_path / "a.jsonl").write_text("".join([*lines, '{"text": "one more"}'][:count]))
        with pytest.raises(ValueError, match=r"a\.jsonl' changed while it was read; run again"):
            list(split.documents(found))


def test_what_a_killed_process_left_is_deleted_a_day_later(tmp_path: Path) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"
    for name, age in (("old.1234", 90_000), ("live.1234", 60)):
        (root / name).mkdir(parents=True)
        (root / name / "train.npy").touch()
        for path in (root / name / "train.npy", root / name):
            os.utime(path, (time.time() - age,) * 2)
    folder = tokens_of(text, root)
    assert {path.name for path in root.iterdir()} == {folder.name, "index", "live.1234"}


def test_an_interrupt_while_tokens_are_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, root = write_corpus(tmp_path / "text"), tmp_path / "cache"

    def interrupted(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_documents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens_of(text, root)
    assert list(root.iterdir()) == []
    assert tokens_of(text, root).is_dir()


def test_a_mixture_has_one_tokenizer_of_all_training_text_and_a_folder_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = training_texts(monkeypatch)
    one, two = write_corpus(tmp_path / "one"), write_corpus(tmp_path / "two", count=7)
    (two / "zebra.txt").write_text("zebra " * 50)
    root = tmp_path / "cache"
    folders = folders_of([one, two], root, "bpe:300")
    assert len(set(folders)) == 2 and len({(folder / "tokenizer.json").read_text() for folder in folders}) == 1
    train = []
    for folder in folders:
        stream = token_cache.load_stream(folder, "train", 0)
        tokenizer = load_tokenizer(folder)
        train += [tokenizer.decode(stream.tokens[a:b]) for a, b in itertools.pairwise(stream.offsets)]
    assert sorted(seen) == sorted(train)
    seen.clear()
    assert folders_of([two, one], root, "bpe:300") == folders[::-1]  # the order of the sources decides nothing
    shutil.rmtree(folders[1])
    assert folders_of([one, two], root, "bpe:300") == folders  # of an interrupted mixture only the rest is made
    assert seen == []
    assert tokens_of(one, root, "bpe:300") not in folders and seen
    # bytes depend on no text: a source alone and in a mixture has the same tokens
    assert folders_of([one, two], root, "bytes")[0] == tokens_of(one, root, "bytes")


def test_more_than_65536_ids_are_stored_in_32_bits(tmp_path: Path) -> None:
    make_tokenizer("bpe:300", ["some text"]).save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["never-merged"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    folder = tokens_of(write_corpus(tmp_path / "text"), tmp_path / "cache", str(tmp_path / "tokenizer.json"))
    for name in ("train", "validation"):
        stream = token_cache.load_stream(folder, name, 0)
        assert stream.tokens.dtype == np.uint32 and len(stream.tokens) == stream.offsets[-1]
