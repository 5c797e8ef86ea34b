"""Conversations: what a template writes, which tokens are learned, how they are packed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

pytest.importorskip("jinja2", reason='pip install -e ".[chat]"')

from meshpar.train.chat import (
    ChatTemplate,
    encode,
    encode_prompt,
    load_template,
    name_what_ends_answers,
    read_conversations,
    with_special_tokens,
)
from meshpar.train.data import DataConfig, Dataset, open_dataset, train_batches, validation_batches
from meshpar.train.tokenizer import load_tokenizer
from tests.experiments.pretrained import make_tokenizer

CHATML = Path(__file__).parents[1] / "fixtures" / "chatml.jinja"  # SmolLM2-135M-Instruct's
SPECIAL = ("<|im_start|>", "<|im_end|>")
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is a mesh"},
    {"role": "assistant", "content": "devices with names"},
    {"role": "user", "content": "and an axis"},
    {"role": "assistant", "content": "one of them"},
]


def template(text: str | None = None, **special: str) -> ChatTemplate:
    return ChatTemplate(CHATML.read_text() if text is None else text, special=special, where="here")


def folder(path: Path, *, named: bool = True) -> Path:
    """A tokenizer with a template beside it."""
    path.mkdir(exist_ok=True)
    make_tokenizer(SPECIAL).save(str(path / "tokenizer.json"))
    if named:
        (path / "chat_template.jinja").write_text(CHATML.read_text())
    return path


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(tmp_path: Path, rows: list[Any], **changes: Any) -> Dataset:
    values = {"seq": 128, "packed": True, "chat": True, "shuffle": False, "prefetch": 0, **changes}
    source = write(tmp_path / "chat.jsonl", rows)
    return open_dataset(DataConfig(source=str(source), tokenizer=str(folder(tmp_path) / "tokenizer.json"), **values))


def question(number: int) -> dict[str, str]:
    word = "abcdefghijklmnopqrstuvwxyz"[number]
    return {"prompt": f"ask {word}", "completion": f"say {word * 3}"}


def test_the_text_is_that_of_apply_chat_template() -> None:
    assert template().render(TURNS[1:3], prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nwhat is a mesh<|im_end|>\n<|im_start|>assistant\ndevices with names<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_answers_and_what_ends_them_are_found() -> None:
    text, spans = template().spans(TURNS)
    assert [text[begin:end] for begin, end in spans] == ["devices with names<|im_end|>\n", "one of them<|im_end|>\n"]


def test_blocks_special_tokens_and_refusals_are_as_in_transformers() -> None:
    text = "{{ bos_token }}{% for m in messages %}\n{% if m.role == 'tool' %}\n{{ raise_exception('no tools') }}\n"
    text += "{% endif %}\n[{{ m.content }}]{% endfor %}"
    one = template(text, bos_token="<s>")
    assert one.render([{"role": "user", "content": "a"}]) == "<s>[a]"
    with pytest.raises(ValueError, match=r"the chat template of here does not take this conversation \(no tools\)"):
        one.render([{"role": "tool", "content": "a"}])


def test_a_template_runs_in_a_sandbox() -> None:
    for text in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(ValueError, match="unsafe"):
            template(text).render(TURNS)


def test_a_template_that_writes_earlier_turns_otherwise_is_refused() -> None:
    forgetful = "{% for m in messages %}{{ m.role }}:{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %};"
    with pytest.raises(ValueError, match="writes the first 3 messages otherwise when more follow"):
        template(forgetful + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}").spans(TURNS)


def test_only_answers_have_weights_and_conversations_do_not_see_each_other(tmp_path: Path) -> None:
    dataset = opened(tmp_path, [{"messages": TURNS}, *map(question, range(9))], seq=256)
    read = dataset.tokenizer.pipeline.id_to_token
    learned: list[str] = []
    batches = [
        *validation_batches(dataset, batch=1),
        *(b for b, _ in zip(train_batches(dataset, batch=1), range(9), strict=False)),
    ]
    for batch in batches:
        tokens, targets, weights, segments = (
            np.asarray(x)[0] for x in (batch.tokens, batch.targets, batch.weights, batch.segments)
        )
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            assert read(int(tokens[inside][0])) == "<|im_start|>"
            spelled = [read(int(token)) for token in targets[inside & (weights > 0)]]
            learned.append("".join(spelled).replace("\u0120", " ").replace("\u010a", "\n"))
        assert not weights[segments == 0].any()
        assert set(np.unique(weights)) <= {0.0, 1.0}
    expected = {f"say {'abcdefghi'[n] * 3}<|im_end|>\n" for n in range(9)}
    assert set(learned) == {*expected, "devices with names<|im_end|>\none of them<|im_end|>\n"}


def test_what_a_tokenizer_puts_around_a_text_is_left_to_the_template(tmp_path: Path) -> None:
    """As a tokenizer that begins each text with a token, which a template writes itself."""
    tokenizer = make_tokenizer(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer.encode("a").ids[0] == 0
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    encoded = encode(template(), with_special_tokens(loaded), TURNS)
    assert encoded.tokens[0] == encode_prompt(template(), loaded, TURNS[:2])[0] == 1
    assert not np.isin(0, encoded.tokens)


def test_a_token_that_begins_before_an_answer_is_not_learned() -> None:
    """Generation is given the prompt, and never has to write a token that is partly of it."""
    tokenizer = make_tokenizer(SPECIAL)
    ids = tokenizer.encode("ab").ids
    pieces = Tokenizer(models.BPE(vocab={**tokenizer.get_vocab(), "ab": 99}, merges=[("a", "b")]))
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    one = encode(template(text), pieces, [{"role": "user", "content": "ba"}, {"role": "assistant", "content": "bb"}])
    assert one.tokens.tolist() == [ids[1], 99, ids[1]]
    assert one.learned.tolist() == [False, False, True]


def test_what_transformers_has_in_templates_is_here_too() -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content | tojson(ensure_ascii=False) }}{% endgeneration %}"
    assert template(text + "{% endfor %}{{ strftime_now('%Y') | length }}").render(TURNS[1:2]) == '"what is a mesh"4'


@pytest.mark.parametrize("text", ["{{ range(10**9) }}", "{{ messages.foo.bar }}", "{{ 'a' + 1 }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="does not take this conversation"):
        template(text).render(TURNS)


def test_what_does_not_fit_into_a_row_is_told(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a" * 500, "completion": "b"},
        {"prompt": "a", "completion": "b" * 500},
        question(1),
        question(2),
    ]
    (note,) = opened(tmp_path, rows).notes
    assert note.startswith("of 4 conversations of")
    assert note.endswith("1 have no answer within data.seq=128 tokens and are left out, and 1 are cut there")


def test_a_folder_names_the_token_that_ends_answers_and_has_the_template(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(CHATML.read_text())
    tokenizer = folder(tmp_path / "model", named=False) / "tokenizer.json"
    (tmp_path / "left").mkdir()
    config = DataConfig(source="x", tokenizer=str(tokenizer), packed=True, chat=True, chat_template=str(own))
    name_what_ends_answers(tmp_path / "left", config, load_tokenizer(tokenizer), stop=(0,))
    left = json.loads((tmp_path / "left" / "generation_config.json").read_text())
    assert left["eos_token_id"] == [2, 0]  # <|im_end|> and <|endoftext|>
    assert (tmp_path / "left" / "chat_template.jinja").read_text() == own.read_text()


def test_splits_share_no_conversation_and_repeats_are_dropped(tmp_path: Path) -> None:
    rows = [question(n) for n in range(20)]
    dataset = opened(tmp_path, rows + rows, validation_fraction=0.25)
    counts = [len(stream.offsets) - 1 for stream in (dataset.train, dataset.validation)]
    assert counts == [15, 5]
    again = opened(tmp_path, rows[::-1], validation_fraction=0.25)
    np.testing.assert_array_equal(np.sort(again.validation.tokens), np.sort(dataset.validation.tokens))


def test_a_long_conversation_is_cut_at_its_end_and_one_without_an_answer_left_is_dropped(tmp_path: Path) -> None:
    long_question = {"prompt": "a" * 500, "completion": "b"}
    long_answer = {"prompt": "a", "completion": "b" * 500}
    dataset = opened(tmp_path, [long_question, long_answer, question(1), question(2)], validation_fraction=0.01)
    lengths = [*np.diff(dataset.train.offsets), *np.diff(dataset.validation.offsets)]
    assert len(lengths) == 3 and max(lengths) == 128


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([1], "line 1 is no conversation; write {"),
        ({"mesages": []}, "did you mean 'messages'?"),
        ({"text": "a"}, "line 1 has text and is no conversation; write {"),
        ({"messages": "hello"}, "messages='hello', which is no list"),
        ({"messages": [{"role": "user"}]}, "without a role and content of text"),
        ({"prompt": "a", "completion": 3}, "without a role and content of text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has user and no assistant, so nothing to learn"),
    ],
)
def test_a_line_of_the_wrong_form_is_one_sentence(tmp_path: Path, row: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"chat.jsonl line 1") as raised:
        list(read_conversations([write(tmp_path / "chat.jsonl", [row])]))
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_files_and_settings_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a .jsonl file"):
        list(read_conversations([tmp_path / "a.txt"]))
    with pytest.raises(ValueError, match=r"set data.packed=true too"):
        DataConfig(chat=True, tokenizer="a/tokenizer.json")
    with pytest.raises(ValueError, match=r"has no template; name a model's tokenizer.json"):
        DataConfig(chat=True, packed=True)
    with pytest.raises(ValueError, match="has 1 conversations with an answer"):
        opened(tmp_path, [question(1)])


def test_a_template_is_found_beside_the_tokenizer(tmp_path: Path) -> None:
    where = folder(tmp_path / "model", named=False)
    with pytest.raises(ValueError, match="has no chat template"):
        load_template(where / "tokenizer.json")
    config = {"chat_template": [{"name": "default", "template": "{{ eos_token }}"}], "eos_token": {"content": "</s>"}}
    (where / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template(where / "tokenizer.json").render(TURNS) == "</s>"
    (where / "chat_template.jinja").write_text("file")
    assert load_template(where).render(TURNS) == "file"
    (tmp_path / "own.jinja").write_text("{{ own }}!")
    assert load_template(where, str(tmp_path / "own.jinja")).render(TURNS) == "!"
    with pytest.raises(ValueError, match="is not there; name a file"):
        load_template(where, "nowhere.jinja")
    with pytest.raises(ValueError, match="is no Jinja template"):
        template("{% for %}")
