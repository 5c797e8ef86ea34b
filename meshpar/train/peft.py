"""Adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`, which it loads onto the model
that they adapt. Where an adapter lies in theirs follows from where its kernel lies in the model's (`hf/mapping.py`).

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.hf.families import family_of_config
from meshpar.hf.mapping import Entry, Weights, check, fetch_from, load, outgoing, shapes_of
from meshpar.hf.safetensors import new_folder, read_file, write_file
from meshpar.interfaces import PyTree
from meshpar.train.lora import KERNEL, A, B, Lora

# The names of the files, and of a tensor after the module that it adapts.
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_THEIRS = {A: "lora_A.weight", B: "lora_B.weight"}


class NoPeftForm(ValueError):
    """Adapters that PEFT cannot have."""


def save_adapter(
    folder: Path | str, config: Any, adapters: PyTree, lora: Lora, *, base: str, dtype: Any = None
) -> None:
    """Writes a folder that PEFT loads onto the base model. Called by all processes; the first one writes.

    Args:
      folder: a new one, or empty.
      config: of the model, of a family in models/.
      adapters: the trained part of an adapted model's parameters.
      base: where the base model is, for `adapter_config.json`.
      dtype: to cast to; None: as they are.

    Raises:
      ValueError: the folder is there.
      NoPeftForm: an adapted kernel is a part of a tensor of theirs (GPT-2's q, k and v).
    """
    shapes = shapes_of(adapters)
    weights = _entries(config, shapes)
    dtype = np.dtype(jax.tree.leaves(adapters)[0].dtype if dtype is None else dtype)
    specs, chunks = outgoing(weights, shapes, dtype, fetch_from(adapters))
    if jax.process_index() != 0:
        for spec in specs:
            for _ in chunks(spec):
                pass
        return
    values = {  # modules with the name of what they are in: of GPT-2, attn and mlp have a c_proj each
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({".".join(entry.theirs.split(".")[-4:-2]) for entry in weights.entries}),
        "bias": "none",
        "fan_in_fan_out": any(_is_transposed(entry) for entry in family_of_config(config).weights(config).entries),
        "inference_mode": True,
    }
    with new_folder(Path(folder)) as new:
        (new / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        write_file(new / WEIGHTS, specs, chunks, {"format": "pt"})


def load_adapter(folder: Path | str, config: Any, target: PyTree) -> PyTree:
    """Reads what `save_adapter` wrote, or PEFT for the same kernels, into the shapes and shardings of `target`.

    Args:
      target: the trained part of an adapted model's parameters, as ShapeDtypeStructs.

    Raises:
      ValueError: one sentence. A file is missing or damaged, or adapts other kernels or with another rank.
    """
    folder = Path(folder)
    weights, tensors = _entries(config, shapes_of(target)), read_file(folder / WEIGHTS)
    check(weights, tensors, shapes_of(target), str(folder / WEIGHTS))
    return load(weights, tensors, target)


def _entries(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Where each adapter lies in PEFT's file: it follows from where its kernel lies in the model's."""
    of_model = family_of_config(config).weights(config)
    by_path = {entry.ours: entry for entry in of_model.entries}
    found = []
    for path in shapes:
        where, name = path.rsplit("/", 1)
        kernel = by_path[f"{where}/{KERNEL}"]
        left, _, right = kernel.dims.partition(" -> ")
        if "/" in left:
            raise NoPeftForm(
                f"{where} is a part of {kernel.theirs}, and PEFT has one adapter for all of it; "
                "use the merged weights, or choose other lora.targets"
            )
        ours, count = right.split(), len(shapes[path]) - 2  # beside layers and rank
        dims = ours[:count] if name == A else ours[-count:]
        theirs = _group(next(side for side in _sides(left) if side[0] in dims))
        if name == A:
            spelled = f"rank {theirs} -> {' '.join(dims)} rank"
        else:
            spelled = f"{theirs} rank -> rank {' '.join(dims)}"
        module = kernel.theirs.removesuffix(".weight")
        found.append(Entry(path, f"{_PREFIX}{module}.{_THEIRS[name]}", spelled))
    return Weights(entries=tuple(found))


def _sides(dims: str) -> list[list[str]]:
    """The dims of a tensor of theirs, each as the names it is made of."""
    found: list[list[str]] = []
    inside = False
    for word in dims.replace("(", "( ").replace(")", " )").split():
        if word in "()":
            inside = word == "("
            if inside:
                found.append([])
        elif inside:
            found[-1].append(word)
        else:
            found.append([word])
    return found


def _group(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def _is_transposed(entry: Entry) -> bool:
    """Whether a kernel lies as [in, out], as GPT-2's do."""
    left, _, right = entry.dims.partition(" -> ")
    return entry.ours == "blocks/mlp/up/kernel" and left == right
