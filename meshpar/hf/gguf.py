"""A GGUF file as a folder of Hugging Face: its metadata as config.json, its tensors under their names, its tokenizer.

llama.cpp's conversion permutes the rows of q and k of the Llama architecture, because its RoPE turns neighbouring pairs
(2i, 2i + 1) instead of (i, i + head_dim/2); reading undoes it. Quantised tensors are dequantised as they are read, by
rows. The `gguf` package parses the file: `pip install "meshpar[gguf]"`.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from meshpar.hf.safetensors import Index
from meshpar.hf.values import Values

if TYPE_CHECKING:
    import tokenizers

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # the words are those of transformers too
_PERMUTED = ("llama",)
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
# How a text is cut before its bytes are merged, by the name that the file gives. Digits come one by one or in threes.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _WORDS.format(digits=r"\p{N}{1,3}"), "qwen2": _WORDS.format(digits=r"\p{N}")}
_BYTE_LEVEL = {"default": False, "gpt-2": False, "smollm": True}  # whether digits are cut one by one first


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file; see `meshpar.hf.safetensors.Stored`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: Path
    offset: int  # bytes from the start of the file
    kind: str  # "F32" or "Q4_1", as the file says
    interleaved: int = 0  # rows of a head, where its two halves are interleaved

    def read(self, index: Index = ()) -> np.ndarray:
        rows = index[0] if index else slice(None)
        start, end, _ = rows.indices(self.shape[0])
        unit = self.interleaved or 1  # whole heads are read, since a half lies all over one
        low, high = start // unit * unit, -(-end // unit) * unit
        array = self._rows(low, high)
        if self.interleaved:
            inner = array.shape[1:]
            array = array.reshape(-1, unit // 2, 2, *inner).swapaxes(1, 2).reshape(-1, *inner)
        return np.array(array[start - low : end - low][(slice(None), *index[1:])])

    def _rows(self, start: int, end: int) -> np.ndarray:
        if self.kind in _PLAIN:
            mapped = np.memmap(self.file, self.dtype, "r", offset=self.offset, shape=self.shape)
            return np.array(mapped[start:end], copy=True, subok=False)
        gguf = _package()
        kind = gguf.GGMLQuantizationType[self.kind]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        stored = (*self.shape[:-1], self.shape[-1] // elements * size)
        mapped = np.memmap(self.file, np.uint8, "r", offset=self.offset, shape=stored)
        found: np.ndarray = gguf.dequantize(np.array(mapped[start:end], subok=False), kind)
        return found


def read_gguf(path: Path) -> tuple[Values, dict[str, GgufTensor]]:
    """What a folder's config.json and safetensors would say.

    Raises:
      ValueError: the file is missing, damaged, of an architecture or a quantisation that is not read, or the package
        is not installed.
    """
    fields, stored = _parse(path)
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{path}: the architecture {arch!r} is not read from GGUF, only {', '.join(ARCHITECTURES)}; "
            "use the safetensors of the model"
        )
    size = path.stat().st_size
    tensors = {}
    for tensor in stored:
        kind, shape = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape))
        name = _name(tensor.name)
        if kind not in (*_PLAIN, *QUANTISED):
            raise ValueError(
                f"{path}: {tensor.name} {shape} is quantised as {kind}, which is not read; "
                f"use a file of {', '.join((*_PLAIN, *QUANTISED))}"
            )
        if int(tensor.data_offset) + int(tensor.n_bytes) > size:
            raise ValueError(f"{path} is cut off: {tensor.name} {shape} ends after the file; fetch the file again")
        key = "attention.head_count" if ".q_proj." in name else "attention.head_count_kv"
        permuted = arch in _PERMUTED and (".q_proj." in name or ".k_proj." in name)
        heads = fields.get(f"{arch}.{key}") or fields.get(f"{arch}.attention.head_count")
        if permuted and (not isinstance(heads, int) or shape[0] % (2 * heads)):
            raise ValueError(f"{path}: {tensor.name} {shape} is not of {heads} heads; fetch the file again")
        tensors[name] = GgufTensor(
            name=name,
            shape=shape,
            dtype=_PLAIN.get(kind, np.dtype(np.float32)),
            file=path,
            offset=int(tensor.data_offset),
            kind=kind,
            interleaved=shape[0] // heads if permuted and isinstance(heads, int) else 0,
        )
    return Values(values=_config(fields, tensors, str(arch)), file=str(path)), tensors


def _config(fields: Mapping[str, Any], tensors: Mapping[str, GgufTensor], arch: str) -> dict[str, Any]:
    """Metadata in the words of config.json; what is missing is left out."""
    table = tensors.get("model.embed_tokens.weight")
    of_arch = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
    }
    found = {theirs: fields.get(f"{arch}.{key}") for theirs, key in of_arch.items()}
    found |= {
        f"{kind}_token_id": fields.get(f"tokenizer.ggml.{key}_token_id")
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    if found["rms_norm_eps"] is not None:
        found["rms_norm_eps"] = float(str(np.float32(found["rms_norm_eps"])))  # 1e-5, which fp32 is not
    scaling = fields.get(f"{arch}.rope.scaling.type")
    if scaling not in (None, "none"):
        keys = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
        values = {theirs: fields.get(f"{arch}.rope.scaling.{key}") for theirs, key in keys.items()}
        found["rope_scaling"] = {"rope_type": scaling, **{k: v for k, v in values.items() if v is not None}}
    return {
        "model_type": arch,
        "vocab_size": fields.get(f"{arch}.vocab_size") if table is None else table.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": arch == "llama" and "model.layers.0.self_attn.q_proj.bias" in tensors,
        **{key: value for key, value in found.items() if value is not None},
    }


def _name(theirs: str) -> str:
    """llama.cpp's name of a tensor as transformers'; one that is not known stays as it is."""
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", theirs)
    if parts is None or parts[2] not in _NAMES:
        return theirs
    layer = "" if parts[1] is None else f"model.layers.{parts[1]}."
    return f"{layer}{_NAMES[parts[2]]}.{parts[3]}"


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file, to be saved as tokenizer.json.

    Raises:
      ValueError: it is no byte-level BPE, or cuts texts in a way that is not known.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors
    from tokenizers import pre_tokenizers as pre

    fields, _ = _parse(path)
    kind, cut = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or cut not in (*_SPLITS, *_BYTE_LEVEL):
        raise ValueError(
            f"{path}: its tokenizer is {kind!r} with {cut!r}, and only 'gpt2' with "
            f"{', '.join((*_SPLITS, *_BYTE_LEVEL))} is read; take tokenizer.json from where the model is from"
        )
    tokens, merges = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.merges", [])
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    if cut in _SPLITS:
        steps = [pre.Split(Regex(_SPLITS[cut]), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        steps = [pre.Digits(individual_digits=True)] if _BYTE_LEVEL[cut] else []
        steps = [*steps, pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type", [])
    kinds = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == _USER_DEFINED])
    first = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", False) and first is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return tokenizer


def write_tokenizer(path: Path, folder: Path) -> None:
    """The files about text that a folder of Hugging Face has, from a GGUF file: the tokenizer, its special tokens, and
    the chat template where there is one.

    Raises:
      ValueError: see `read_tokenizer`.
    """
    fields, _ = _parse(path)
    tokens = fields.get("tokenizer.ggml.tokens", [])
    ids = {kind: fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    special = {f"{kind}_token": tokens[number] for kind, number in ids.items() if number is not None}
    read_tokenizer(path).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template)


def _parse(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Metadata by key, and the tensors as the package describes them."""
    gguf = _package()
    try:
        reader = gguf.GGUFReader(path)
        return {key: field.contents() for key, field in reader.fields.items()}, list(reader.tensors)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a GGUF file") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is cut off or no GGUF file ({error}); fetch the file again") from None


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError('reading GGUF needs the package gguf; pip install "meshpar[gguf]"') from None
    return gguf
