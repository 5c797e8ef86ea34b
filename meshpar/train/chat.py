"""Conversations to train on: the model's own chat template writes them, and only what the assistant says counts.

A line of a .jsonl file is a conversation, `{"messages": [{"role": "user", "content": "..."}, ...]}`, or one question
and its answer, `{"prompt": "...", "completion": "..."}`. A Jinja template turns it into text, as `apply_chat_template`
of transformers does. Which part of that text is an answer, prefixes say: the text of the messages before it, with the
beginning of an answer that generation is given, and the text with it. So the loss sees what generation will have to
write: the answer, and what ends it. Conversations are then packed into rows as documents are (`rows.py`).

Templates come with weights from anywhere: they run in Jinja's sandbox and can change nothing.
Source: https://huggingface.co/docs/transformers/chat_templating.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshpar.layout.rules import did_you_mean
from meshpar.train.corpus import find_corpus, parse_sources
from meshpar.train.documents import json_lines, readable
from meshpar.train.token_cache import TokenStream
from meshpar.train.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import tokenizers

    from meshpar.train.data import DataConfig, Dataset

Messages = Sequence[Mapping[str, Any]]  # of a conversation: each has at least role and content
ASSISTANT = "assistant"
TEMPLATE, TOKENIZER_CONFIG, GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
# what code in a template can raise, beside Jinja's own errors
_OF_TEMPLATES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_EXAMPLE = ({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"})
_FORMS = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion": "..."}'


# --- conversations ---------------------------------------------------------------------------------------------------


def read_conversations(files: Sequence[Path]) -> Iterator[tuple[str, Messages]]:
    """The conversations of .jsonl files, each with where it stands.

    Raises:
      ValueError: a line is no conversation, or nobody answers in it; with its path and number.
    """
    for path in files:
        if not path.name.lower().endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(f"{path} is not a .jsonl file; write conversations there, a line {_FORMS}")
        with readable(path):
            for where, row in json_lines(path):
                yield where, _messages(row, where)


def _messages(row: Any, where: str) -> Messages:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no conversation; write {_FORMS}")
    if "messages" not in row and {"prompt", "completion"} <= row.keys():
        asked, said = row["prompt"], row["completion"]
        messages: Any = [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": said}]
    elif "messages" in row:
        messages = row["messages"]
    else:
        hint = next((close for name in row if (close := did_you_mean(name, ("messages", "prompt", "completion")))), ";")
        raise ValueError(f"{where} has {', '.join(row) or 'nothing'} and is no conversation{hint} write {_FORMS}")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where} has messages={messages!r:.60}, which is no list of messages; write {_FORMS}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"{where} has the message {message!r:.60} without a role and content of text; write {_FORMS}"
            )
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise ValueError(
            f"{where} has {', '.join(roles)} and no {ASSISTANT}, so nothing to learn"
            f"{did_you_mean(roles[-1], [ASSISTANT]) or ';'} add an answer or delete the line"
        )
    return messages


# --- the template ----------------------------------------------------------------------------------------------------


class ChatTemplate:
    """Writes conversations as a model was trained to read them."""

    def __init__(self, text: str, *, special: Mapping[str, str], where: str) -> None:
        """Args:
          text: Jinja.
          special: `bos_token`, `eos_token` and the like, which templates use.
          where: it is from, for errors.

        Raises:
          ValueError: it is not Jinja, or jinja2 is not installed.
        """
        try:
            from jinja2 import TemplateError, nodes
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise ValueError('chat templates need the package jinja2; pip install "meshpar[chat]"') from None

        def refuse(message: str) -> None:  # how templates say that a conversation is not of their form
            raise TemplateError(message)

        class Generation(Extension):  # a block around answers, which says nothing that prefixes do not
            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body).set_lineno(line)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
            value, ensure_ascii=ensure_ascii, **options
        )
        self._error, self._where, self._special = TemplateError, where, dict(special)
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ValueError(f"{where} is no Jinja template ({error}); fetch it again") from None

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        """The text of messages; with `prompt` also what stands before the assistant's next answer.

        Raises:
          ValueError: the template refuses them.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self._special)
        except (self._error, *_OF_TEMPLATES) as error:
            raise ValueError(f"the chat template of {self._where} does not take this conversation ({error})") from None

    def spans(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where in it each answer begins and ends, with what the template ends it by.

        Raises:
          ValueError: the text of the first messages is not the beginning of the text of all.
        """
        text, found = self.render(messages), []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:number], prompt=True)
            with_answer = self.render(messages[: number + 1])
            if not (text.startswith(with_answer) and with_answer.startswith(before)):
                raise ValueError(
                    f"the chat template of {self._where} writes the first {number + 1} messages otherwise when more "
                    "follow, so where an answer begins cannot be told; train on conversations of one answer, or give "
                    "a template that only adds with data.chat_template=FILE"
                )
            found.append((len(before), len(with_answer)))
        return text, found


def load_template(tokenizer: Path, named: str = "", *, flag: str = "data.chat_template=FILE") -> ChatTemplate:
    """The template that belongs to a tokenizer.

    Args:
      tokenizer: a tokenizer.json, or its folder; chat_template.jinja and tokenizer_config.json stand beside it.
      named: a file to take instead.
      flag: how another one is named, for the error.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        config = json.loads((folder / TOKENIZER_CONFIG).read_text())
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / TOKENIZER_CONFIG} cannot be read ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder / TOKENIZER_CONFIG} is no JSON object; fetch it again")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, dict | str)
    }
    file = Path(named).expanduser() if named else folder / TEMPLATE
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), special=special, where=str(file))
    if named:
        raise ValueError(f"data.chat_template={named} is not there; name a file with a Jinja template")
    text = config.get("chat_template")
    if isinstance(text, list):  # several by name
        by_name = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = by_name.get("default")
    if not isinstance(text, str):
        raise ValueError(
            f"{folder} has no chat template (neither {TEMPLATE} nor chat_template in {TOKENIZER_CONFIG}), as of "
            f"a model that was not trained on conversations; name one with {flag}"
        )
    return ChatTemplate(text, special=special, where=str(folder / TOKENIZER_CONFIG))


# --- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A conversation as tokens."""

    tokens: np.ndarray  # int64 [tokens]
    learned: np.ndarray  # bool [tokens]: whether a token is of an answer


def encode_prompt(template: ChatTemplate, tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Tokens of messages and of what stands before the answer, for generation.

    Raises:
      ValueError: the template refuses them, or the tokenizer has no special tokens.
    """
    text = template.render(messages, prompt=True)
    return list(with_special_tokens(tokenizer).encode(text, add_special_tokens=False).ids)


def encode(template: ChatTemplate, tokenizer: tokenizers.Tokenizer, messages: Messages) -> Encoded:
    """Tokens of a conversation. A special token that a message spells is that token, as in transformers.

    Args:
      tokenizer: with `encode_special_tokens` off, so that the special tokens of the template are read as such.
    """
    text, spans = template.spans(messages)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    learned = np.zeros(len(ends), bool)
    for begin, end in spans:  # a token that begins before an answer is one that generation is given
        learned |= (begins >= begin) & (ends > begin) & (ends <= end)
    return Encoded(tokens=np.array(encoding.ids, np.int64), learned=learned)


def open_chat(config: DataConfig) -> Dataset:
    """A dataset of conversations, tokenised in memory: tens of thousands take seconds.

    What is longer than a row is cut at its end, since an answer without its question is not to be learned; the
    dataset's notes count these. Held out are those whose hashes are lowest, whatever their order.

    Raises:
      ValueError: what `read_conversations`, `load_template` and `ChatTemplate.spans` say; there are fewer than two
        conversations, or none with an answer inside a row.
    """
    from meshpar.train.data import Dataset, Source

    path = Path(config.tokenizer).expanduser()
    template, tokenizer = load_template(path, config.chat_template), load_tokenizer(path)
    pipeline = with_special_tokens(tokenizer)
    sources, notes = [], []
    for name, share in parse_sources(config.source).items():
        kept, seen, cut = [], set(), 0
        for where, messages in read_conversations(find_corpus(name).files):
            key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
            if key in seen:
                continue
            seen.add(key)
            try:
                one = encode(template, pipeline, messages)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if one.learned[1 : config.seq].any():
                kept.append((key, one))
                cut += len(one.tokens) > config.seq
        if len(kept) < 2:
            raise ValueError(
                f"source={name!r} has {len(kept)} conversations with an answer within data.seq={config.seq} tokens of "
                f"{len(seen)}, and both splits need one; give more of them, or a longer data.seq"
            )
        if cut or len(kept) < len(seen):
            notes.append(
                f"of {len(seen)} conversations of {name}, {len(seen) - len(kept)} have no answer within "
                f"data.seq={config.seq} tokens and are left out, and {cut} are cut there"
            )
        order = sorted(key for key, _ in kept)
        held_out = set(order[: max(1, int(len(order) * config.validation_fraction))])
        streams = {
            part: _stream([one for key, one in kept if (key in held_out) is wanted], config.seq, tokenizer)
            for part, wanted in (("train", False), ("validation", True))
        }
        sources.append(Source(name=name, share=share, folder=path.parent, **streams))
    return Dataset(config=config, tokenizer=tokenizer, sources=tuple(sources), notes=tuple(notes))


def name_what_ends_answers(folder: Path, config: DataConfig, tokenizer: Tokenizer, stop: Sequence[int]) -> None:
    """Completes a folder that was written for transformers: its template, and in generation_config.json the special
    token that the template ends answers with, beside `stop`. Without, generation would not end where training did.
    """
    template = load_template(Path(config.tokenizer).expanduser(), config.chat_template)
    if config.chat_template:
        shutil.copyfile(Path(config.chat_template).expanduser(), folder / TEMPLATE)
    one = encode(template, with_special_tokens(tokenizer), _EXAMPLE)
    added = with_special_tokens(tokenizer).get_added_tokens_decoder()
    ends = [int(t) for t in one.tokens[one.learned] if int(t) in added and added[int(t)].special][-1:]
    file = folder / GENERATION
    values = json.loads(file.read_text()) if file.is_file() else {}
    values["eos_token_id"] = list(dict.fromkeys([*ends, *stop]))
    file.write_text(json.dumps(values, indent=2) + "\n")


def with_special_tokens(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A copy of the pipeline that reads special tokens in a text as such, which a run's tokenizer never does."""
    import tokenizers

    pipeline = getattr(tokenizer, "pipeline", None)
    if pipeline is None:
        raise ValueError("the tokenizer of bytes has no special tokens to tell messages apart; name a tokenizer.json")
    copy = tokenizers.Tokenizer.from_str(pipeline.to_str())
    copy.encode_special_tokens = False
    return copy


def _stream(conversations: Sequence[Encoded], seq: int, tokenizer: Any) -> TokenStream:
    parts = [one.tokens[:seq] for one in conversations]
    dtype = np.uint16 if tokenizer.vocab <= 2**16 else np.uint32
    return TokenStream(
        tokens=np.concatenate(parts).astype(dtype),
        offsets=np.cumsum([0, *map(len, parts)], dtype=np.int64),
        eod=tokenizer.eod,
        learned=np.concatenate([one.learned[:seq] for one in conversations]),
    )
