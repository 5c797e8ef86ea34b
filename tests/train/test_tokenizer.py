"""Tokenizers lose nothing, keep the separator to themselves, and survive a save."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshpar.train.tokenizer import EOD, Tokenizer, check_tokenizer, load_tokenizer, make_tokenizer

TEXT = ["def add(a, b):\n    return a + b\n", "The cat sat on the mat. Ünïcödé 漢字.\n", "x = [1, 2, 3]\n\tprint(x)\n"]
SPECS = ["bytes", "bpe:300"]


@functools.cache
def made(spec: str) -> Tokenizer:
    return make_tokenizer(spec, TEXT)


@pytest.mark.parametrize("spec", SPECS)
@settings(deadline=None)
@given(text=st.text() | st.text(alphabet=" \r\n\tabé漢😀\x00<|endoftx>"))
def test_decode_inverts_encode_on_any_text(spec: str, text: str) -> None:
    tokenizer = made(spec)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids
    assert not len(ids) or ids.max() < tokenizer.vocab


@pytest.mark.parametrize("spec", SPECS)
def test_text_that_spells_the_separator_is_text(spec: str, tmp_path: Path) -> None:
    made(spec).save(tmp_path)
    for tokenizer in (made(spec), load_tokenizer(tmp_path)):
        ids = tokenizer.encode(f"a {EOD} b")
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == f"a {EOD} b"


@pytest.mark.parametrize("spec", SPECS)
def test_a_document_is_its_text_and_one_separator(spec: str) -> None:
    tokenizer = made(spec)
    for text, ids in zip([*TEXT, ""], tokenizer.encode_documents([*TEXT, ""]), strict=True):
        np.testing.assert_array_equal(ids, [*tokenizer.encode(text), tokenizer.eod])
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == text


def test_half_a_character_decodes_to_a_replacement() -> None:
    tokenizer = made("bytes")
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_bpe_reaches_the_vocabulary_it_was_asked_for_and_shortens_text() -> None:
    tokenizer = made("bpe:300")
    assert tokenizer.vocab == 300
    text = "".join(TEXT)
    assert len(tokenizer.encode(text)) < 0.8 * len(made("bytes").encode(text))


def test_bpe_of_a_small_text_says_how_many_ids_there_are() -> None:
    tokenizer = make_tokenizer("bpe:4096", ["ab ab ab"])
    assert 257 <= tokenizer.vocab < 270
    assert tokenizer.decode(tokenizer.encode("other téxt")) == "other téxt"


@pytest.mark.parametrize("spec", SPECS)
def test_save_and_load_keep_every_id(spec: str, tmp_path: Path) -> None:
    made(spec).save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        loaded = load_tokenizer(path)
        assert (loaded.vocab, loaded.eod) == (made(spec).vocab, made(spec).eod)
        for text in TEXT:
            np.testing.assert_array_equal(loaded.encode(text), made(spec).encode(text))
    again = make_tokenizer(str(tmp_path / "tokenizer.json"), ["other text"])  # a file as spec is not trained anew
    np.testing.assert_array_equal(again.encode(TEXT[0]), made(spec).encode(TEXT[0]))


def test_a_vocabulary_past_65536_ids_is_stored_in_32_bits(tmp_path: Path) -> None:
    made("bpe:300").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["never-merged"] = 70_000  # ids may have holes: vocab counts up to the last
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    wide = load_tokenizer(tmp_path)
    assert wide.vocab == 70_001
    assert wide.encode("a").dtype == np.uint32
    assert wide.encode_documents(["a"])[0].dtype == np.uint32


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("byte", "did you mean 'bytes'"),
        ("bpr:512", "did you mean 'bpe:512'"),
        ("bpe", "did you mean 'bpe:4096'"),
        ("bpe:100", "at least 257"),
        (f"bpe:{2**20 + 1}", "at most 1048576"),
        ("bpe:4k", "at least 257"),
        ("bpe:", "at least 257"),
        ("sentencepiece", "use 'bytes', 'bpe:4096' or the path"),
    ],
)
def test_an_unknown_tokenizer_is_refused_with_the_fix(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        check_tokenizer(spec)
    assert repr(spec) in str(error.value)


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="there is no tokenizer file"):
        load_tokenizer(tmp_path)
    for content, said in (("{", "is not JSON"), ('{"model": 3}', "is not a file of the tokenizers package")):
        file.write_text(content)
        with pytest.raises(ValueError, match=said) as error:
            load_tokenizer(file)
        assert str(file) in str(error.value)
    made("bpe:300").save(tmp_path)
    file.write_text(file.read_text().replace(EOD, "<s>"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer has none of <\|endoftext\|>, .*; add one"):
        load_tokenizer(file)


@pytest.mark.parametrize("name", ["<|end_of_text|>", "</s>", "<eos>"])
def test_separators_of_other_families_are_known(tmp_path: Path, name: str) -> None:
    made("bpe:300").save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(EOD, name))
    tokenizer = load_tokenizer(file)
    assert tokenizer.eod == made("bpe:300").eod
    ids = tokenizer.encode(f"a {name} b")
    assert tokenizer.eod not in ids and tokenizer.decode(ids) == f"a {name} b"


def test_a_bpe_is_trained_on_texts_that_come_once() -> None:
    once = make_tokenizer("bpe:300", (text for text in TEXT))
    for text in TEXT:
        np.testing.assert_array_equal(once.encode(text), made("bpe:300").encode(text))
