"""Text to token ids and back: plain bytes, or a byte-level BPE that is trained on the spot.

Both tokenizers are reversible on any text that UTF-8 can encode, and both have one token that no text produces: the
document separator `eod`. Byte-level BPE: Sennrich et al. 2016 (arXiv:1508.07909), section 3.2, over the 256 bytes as in
GPT-2 (Radford et al. 2019, section 2.2), so that there is no unknown token.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import tokenizers

# Names of the separator in a tokenizer.json, the first that it has: of GPT-2 and our own, Llama 3, Llama 2, Gemma. As
# plain text they are encoded like any other text.
EOD = "<|endoftext|>"
_SEPARATORS = (EOD, "<|end_of_text|>", "</s>", "<eos>")
_FILE = "tokenizer.json"
_MOST_IDS = 2**20  # several times the largest vocabularies in use; the trainer allocates for what it is asked


class Tokenizer(Protocol):
    """What the data pipeline and the sampler need of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Number of ids, `eod` included."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends every document."""
        ...

    @property
    def begin(self) -> tuple[int, ...]:
        """The ids that stand before every text, as the models of this tokenizer expect; for most there are none."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of one text, `[tokens]`, with nothing around it: uint16 while `vocab` is at most 65536, else uint32."""
        ...

    def encode_documents(self, documents: Sequence[str]) -> list[np.ndarray]:
        """Ids of each document, `[tokens]`: `begin`, those of `encode`, and `eod`."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids. `eod` yields nothing; bytes that are not UTF-8 (half a character) yield U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Writes `folder/tokenizer.json`, which `load_tokenizer` reads."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """The 256 bytes of UTF-8 are ids 0 to 255; `eod` is 256."""

    vocab: int = 257
    eod: int = 256
    begin: tuple[int, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_documents(self, documents: Sequence[str]) -> list[np.ndarray]:
        return [np.append(self.encode(text), np.uint16(self.eod)) for text in documents]

    def decode(self, ids: Iterable[int]) -> str:
        known = (i for i in map(int, ids) if i != self.eod)
        return bytes(i if i < 256 else 0xFF for i in known).decode(errors="replace")  # 0xFF is never valid: U+FFFD

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps({"type": "bytes"}))


class BpeTokenizer:
    """A tokenizer of the `tokenizers` package whose vocabulary has a separator."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        known = [tokenizer.token_to_id(name) for name in _SEPARATORS]
        eod = next((token for token in known if token is not None), None)
        if eod is None:
            names = ", ".join(_SEPARATORS)
            raise ValueError(f"the tokenizer has none of {names} to end a document with; add one to the vocabulary")
        tokenizer.encode_special_tokens = True  # a text that spells a special token is encoded as text, byte by byte
        tokenizer.no_padding()  # a tokenizer.json may ask for either, and both would change documents
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.eod = int(eod)
        self.begin = _before_a_text(tokenizer)
        self.vocab = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have holes
        self._dtype = np.uint16 if self.vocab <= 2**16 else np.uint32

    @property
    def pipeline(self) -> tokenizers.Tokenizer:
        """The tokenizer of the package; not to be changed."""
        return self._tokenizer

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, self._dtype)

    def encode_documents(self, documents: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        return [np.array([*self.begin, *one.ids, self.eod], self._dtype) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / _FILE))


def _before_a_text(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """What a tokenizer.json puts in front of each text: `<bos>` of Gemma, Llama and Mistral, without which they err."""
    plain, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    found = (at for at in range(len(full) - len(plain) + 1) if full[at : at + len(plain)] == plain)
    return tuple(full[: next(found, 0)]) if plain else ()


def check_tokenizer(spec: str) -> None:
    """Refuses a tokenizer name that `make_tokenizer` would not know, without touching a file.

    Args:
      spec: "bytes", "bpe:N" (N ids, 257 to 2^20; the bytes and `eod` are 257) or the path of a tokenizer.json or of
        its folder (it has a "/" or ends in ".json").
    Raises:
      ValueError: none of the three.
    """
    if spec == "bytes" or _is_path(spec):
        return
    name, colon, count = spec.partition(":")
    if name == "bpe" and colon:
        if not (count.isascii() and count.isdigit()) or not 257 <= int(count) <= _MOST_IDS:
            raise ValueError(
                f"tokenizer={spec!r} must be bpe:N with a whole N of at least 257 (the 256 bytes and the separator) "
                f"and at most {_MOST_IDS}; try 'bpe:4096'"
            )
        return
    meant = {"bytes": "bytes", "bpe": f"bpe:{count or 4096}"}
    close = difflib.get_close_matches(name, meant, n=1, cutoff=0.5)
    hint = f"did you mean {meant[close[0]]!r}?" if close else "use 'bytes', 'bpe:4096' or the path of a tokenizer.json"
    raise ValueError(f"tokenizer={spec!r} is not known; {hint}")


def tokenizer_identity(spec: str) -> str:
    """What, beside the training text, decides a tokenizer's ids: a part of the key of cached tokens."""
    if spec == "bytes":
        return spec
    if _is_path(spec):
        return "file " + hashlib.sha256(_file(Path(spec)).read_bytes()).hexdigest()
    import tokenizers

    return f"{spec} tokenizers {tokenizers.__version__}"


def is_trained(spec: str) -> bool:
    """Whether the tokenizer that `spec` names depends on the text."""
    return spec != "bytes" and not _is_path(spec)


def make_tokenizer(spec: str, documents: Iterable[str]) -> Tokenizer:
    """Makes the tokenizer that `spec` names (see `check_tokenizer`); a BPE is trained on `documents`, read once.

    A small text has fewer pairs to merge than `bpe:N` asks for; `vocab` is then smaller than N.
    """
    check_tokenizer(spec)
    if spec == "bytes":
        return ByteTokenizer()
    if _is_path(spec):
        return load_tokenizer(spec)
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, pre_tokenizers, trainers

    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(spec.removeprefix("bpe:")),
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte has an id, seen or not
        show_progress=False,
    )
    pipeline.train_from_iterator(documents, trainer)
    return BpeTokenizer(pipeline)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads what `save` wrote, or another tokenizer.json that has a separator (one of `_SEPARATORS`).

    Args:
      path: the file, or the folder that holds it as `tokenizer.json`.
    Raises:
      ValueError: there is no such file, it is not a tokenizer, or it has no separator.
    """
    file = _file(Path(path))
    text = file.read_text(encoding="utf-8")
    try:
        content: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}); name a tokenizer.json") from None
    if content == {"type": "bytes"}:
        return ByteTokenizer()
    from tokenizers import Tokenizer as Pipeline

    try:
        pipeline = Pipeline.from_str(text)
    except Exception as error:  # the package raises a bare Exception
        raise ValueError(f"{file} is not a file of the tokenizers package ({error}); name a tokenizer.json") from None
    try:
        return BpeTokenizer(pipeline)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _is_path(spec: str) -> bool:
    return "/" in spec or spec.endswith(".json")


def _file(path: Path) -> Path:
    path = path.expanduser()
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no tokenizer file {file}; name a tokenizer.json or the folder that holds one")
    return file
