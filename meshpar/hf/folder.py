"""A model in Hugging Face's form, opened, loaded and saved: a folder of config.json and safetensors, or a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshpar.hf.families import family_of, family_of_config
from meshpar.hf.mapping import OnRead, Weights, check, fetch_from, load, outgoing, shapes_of
from meshpar.hf.safetensors import SHARD_BYTES, Stored, new_folder, read_folder, write_folder
from meshpar.hf.values import Values, read_values
from meshpar.interfaces import PyTree
from meshpar.layout.resolve import shardings
from meshpar.mesh.build import build_mesh
from meshpar.module import Model, abstract
from meshpar.plan import Plan

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
# What belongs to a model beside its weights, and is copied with it.
COMPANIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION,
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json, which our configs do not have


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A model on disk that was checked and not read. Made by `open_hf`."""

    path: Path
    config: Any  # of one of the families in models/
    model: Model
    values: Values  # config.json
    tensors: Mapping[str, Stored]
    weights: Weights

    def load(self, target: PyTree, *, on_read: OnRead | None = None) -> PyTree:
        """The parameters, in the shapes, dtypes and shardings of `target`.

        A process reads what its devices hold, and holds one tensor more than that.

        Args:
          target: ShapeDtypeStructs with NamedShardings: `Training.abstract_state().params`.
          on_read: called with the path of a parameter and the number of its elements that have been read.

        Raises:
          ValueError: `target` is not of this model.
        """
        ours, theirs = shapes_of(self.model.shapes), shapes_of(target)
        for path in (*ours, *theirs):
            if ours.get(path) != theirs.get(path):
                raise ValueError(
                    f"{path} is {ours.get(path, 'not there')} in the model of {self.path} and "
                    f"{theirs.get(path, 'not there')} in the target; build the target from this model's config"
                )
        return load(self.weights, self.tensors, target, on_read)

    @property
    def token_ids(self) -> dict[str, Any]:
        """The ids of special tokens in config.json, where it has them."""
        return {key: self.values.get(key) for key in TOKEN_IDS if self.values.get(key) is not None}

    @property
    def stop(self) -> tuple[int, ...]:
        """The tokens that end a text: `eos_token_id` of config.json, and of generation_config.json where there is one,
        which in models that were trained on conversations has more of them.

        Raises:
          ValueError: generation_config.json cannot be read, or one of them is no number.
        """
        named = [self.values.get("eos_token_id")]
        file = self.path / GENERATION
        if file.is_file():
            named.append(read_values(file).get("eos_token_id"))
        listed = [token for ids in named if ids is not None for token in (ids if isinstance(ids, list) else [ids])]
        if wrong := [token for token in listed if not isinstance(token, int)]:
            raise ValueError(f"{self.path}: eos_token_id has {wrong[0]!r}, which is no number; write the token's")
        return tuple(dict.fromkeys(listed))


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model and its parameters on a mesh. Made by `load_hf`."""

    config: Any
    model: Model
    plan: Plan
    mesh: Mesh
    params: PyTree


def open_hf(path: Path | str) -> Pretrained:
    """Finds out which model this is, and whether all of it is there; reads no weights but those that must be equal.

    Args:
      path: a folder with config.json and safetensors, or a GGUF file.

    Raises:
      ValueError: one sentence. Something is missing, damaged, left over, of another shape, or not computed here.
    """
    path = Path(path).expanduser()
    if path.suffix == ".gguf":
        from meshpar.hf.gguf import read_gguf

        values, quantised = read_gguf(path)
        return _checked(path, values, quantised)
    values = read_values(path / CONFIG)
    _refuse_quantised(values)
    return _checked(path, values, read_folder(path))


def _checked(path: Path, values: Values, tensors: Mapping[str, Stored]) -> Pretrained:
    config = read_config(values)
    weights, model = family_of(values).weights(config), abstract(config.build, config)
    check(weights, tensors, shapes_of(model.shapes), str(path))
    return Pretrained(path=path, config=config, model=model, values=values, tensors=tensors, weights=weights)


def read_config(values: Values) -> Any:
    """Our config of a config.json. Raises ValueError, with the name of the file."""
    family = family_of(values)
    try:
        return family.read_config(values)
    except ValueError as error:  # our configs check their own values, and know no file
        text = str(error)
        raise ValueError(text if values.file in text else f"{values.file}: {text}") from None


def _refuse_quantised(values: Values) -> None:
    how = values.get("quantization_config")
    if how is not None:
        method = how.get("quant_method") if isinstance(how, Mapping) else None
        raise ValueError(
            f"{values.file}: the weights are quantised ({method or how}); "
            "use the checkpoint in bfloat16, float16 or float32, or a GGUF file"
        )


def load_hf(
    path: Path | str,
    plan: Plan = Plan(),
    *,
    devices: Sequence[jax.Device] | None = None,
    dtype: Any = None,
    on_read: OnRead | None = None,
) -> Loaded:
    """A model with its parameters, laid out as a plan stores them.

    Args:
      path: a folder with config.json and safetensors, or a GGUF file.
      plan: its mesh and its params layout are used; a free axis is filled with the devices there are.
      devices: what the mesh is built of; None takes all, and of emulated ones as many as it needs.
      dtype: of the parameters; None is what the plan's precision stores.

    Raises:
      ValueError: what `open_hf` says, or the plan does not fit the model or the devices.

    Example:
      `loaded = mp.load_hf("SmolLM2-135M", mp.Plan(mesh=mp.MeshSpec(fsdp=8)))`
    """
    source = open_hf(path)
    if devices is None:
        devices = jax.devices()
        if devices[0].platform == "cpu" and not plan.mesh.has_free_axis:  # emulated: nobody paid for the others
            devices = devices[: plan.mesh.product]
    plan = plan.on(len(devices))
    plan.check(source.model)
    mesh = build_mesh(plan.mesh, devices)
    dtype = np.dtype(plan.precision.param_dtype if dtype is None else dtype)
    target = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
        source.model.shapes,
        shardings(plan.layouts().params, source.model.axes, source.model.shapes, mesh),
    )
    params = source.load(target, on_read=on_read)
    return Loaded(config=source.config, model=source.model, plan=plan, mesh=mesh, params=params)


def save_hf(
    folder: Path | str,
    config: Any,
    params: PyTree,
    *,
    dtype: Any = None,
    tokenizer: Path | str | None = None,
    token_ids: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers reads. It is whole or not there.

    Called by all processes; the first one writes. Parameters are fetched one tensor at a time.

    Args:
      folder: a new one, or empty.
      config: of a family in models/.
      params: arrays on any mesh. Padding of the vocabulary is left out.
      dtype: to cast to; None: that of the embedding table, or of whichever parameter is first.
      tokenizer: a folder whose tokenizer files are copied, or a tokenizer.json.
      token_ids: `bos_token_id` and the like, for config.json.
      shard_bytes: of one file at most, one tensor at least.

    Raises:
      ValueError: the folder is there, or no architecture of transformers computes this config.
    """
    folder, family = Path(folder), family_of_config(config)
    dtype = np.dtype(jax.tree.leaves(params)[0].dtype if dtype is None else dtype)
    values = {**family.write_config(config), **(token_ids or {})}
    specs, chunks = outgoing(family.weights(config), shapes_of(params), dtype, fetch_from(params))
    if jax.process_index() != 0:
        for spec in specs:  # arrays over several processes are fetched by all of them
            for _ in chunks(spec):
                pass
        return
    write_model(folder, values, specs, chunks, dtype, tokenizer=tokenizer, shard_bytes=shard_bytes)


def write_model(
    folder: Path,
    values: Mapping[str, Any],
    specs: Sequence[Any],
    chunks: Any,
    dtype: np.dtype[Any],
    *,
    tokenizer: Path | str | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Config, weights and tokenizer files into a new folder; see `save_hf`."""
    with new_folder(folder) as new:
        stated = {"torch_dtype": str(dtype), "dtype": str(dtype)}  # the names of transformers 4 and 5
        (new / CONFIG).write_text(json.dumps({**values, **stated}, indent=2) + "\n")
        write_folder(new, specs, chunks, shard_bytes=shard_bytes)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), new)


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copies a model's tokenizer files; returns their names.

    Where there is a tokenizer.json alone, a tokenizer_config.json is written that lets transformers find its class.

    Args:
      source: a folder, or a tokenizer.json. Our byte tokenizer is not of their kind and is left out.
    """
    files = [source] if source.is_file() else [source / name for name in COMPANIONS]
    copied = []
    for file in files:
        if file.is_file() and not _is_bytes(file):
            shutil.copyfile(file, folder / file.name)
            copied.append(file.name)
    if TOKENIZER in copied and "tokenizer_config.json" not in copied:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")
        copied.append("tokenizer_config.json")
    return copied


def _is_bytes(file: Path) -> bool:
    """Whether a tokenizer.json is that of our byte tokenizer, which is no file of the tokenizers package."""
    return file.name == TOKENIZER and file.stat().st_size < 1000 and json.loads(file.read_text()) == {"type": "bytes"}
