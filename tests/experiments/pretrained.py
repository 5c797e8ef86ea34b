"""A folder of Hugging Face with a tokenizer that is as small as its model, and a text that it can spell."""

from __future__ import annotations

import random
import shutil
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.hf.fixtures import FOLDER

LETTERS = string.ascii_lowercase + string.ascii_uppercase + ".,:"


def make_tokenizer(extra: tuple[str, ...] = ()) -> Tokenizer:
    """A token for each letter, as the byte-level alphabet spells it: blanks and ends of lines too."""
    tokens = ["<|endoftext|>", *extra, *LETTERS, "\u0120", "\u010a"]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", *extra])
    return tokenizer


def make_folder(folder: Path, name: str = "llama", extra: tuple[str, ...] = ()) -> Path:
    """A fixture of tests/fixtures/hf with a tokenizer."""
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(FOLDER / name / file, folder / file)
    make_tokenizer(extra).save(str(folder / "tokenizer.json"))
    return folder


def make_text(folder: Path, documents: int = 40) -> Path:
    """A folder of short documents of a few words."""
    words = ["the", "of", "a", "mesh", "layer", "device", "tensor", "splits", "rows", "and", "sums", "them", "over"]
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(documents):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(words, k=60)) + ".\n")
    return folder
