"""Weights from Hugging Face to a run folder or a file, and back: `python -m meshpar convert`.

Nothing is whole in memory but one tensor: what is read is written on, layer by layer, without any device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

BAD_INPUT = 2  # the exit code of a wrong flag or value
WEIGHTS = "weights.safetensors"
CONFIG = "config.json"
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}

EXAMPLES = """\
examples, from the root of a clone:
  a folder with config.json and model.safetensors, or a GGUF file, to a run folder that generation and training read:
    python -m meshpar convert --from-hf SmolLM2-135M --to runs/smollm2
    python -m meshpar convert --from-hf SmolLM2-135M-Instruct.Q4_1.gguf --to runs/smollm2 --dtype bf16
  the weights alone:
    python -m meshpar convert --from-hf SmolLM2-135M --to smollm2.safetensors
  a run folder that experiments.train_lm left, or one of the above, to a folder that transformers loads:
    python -m meshpar convert --to-hf exported --run runs/mine
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m meshpar convert FLAGS`; returns 0, or 2 after a sentence about what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m meshpar convert",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--from-hf", type=Path, metavar="FOLDER", help="a folder of Hugging Face, or a GGUF file, to read")
    way.add_argument("--to-hf", type=Path, metavar="FOLDER", help="a new folder to write for transformers")
    parser.add_argument(
        "--to", type=Path, metavar="PATH", help="with --from-hf: a new run folder, or a .safetensors file"
    )
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="with --to-hf: the run folder to read")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of what is written (default: as it is read)")
    options = parser.parse_args(arguments)
    try:
        if options.from_hf is not None:
            if options.to is None or options.run is not None:
                raise ValueError("--from-hf goes with --to; name a new run folder, or a file that ends in .safetensors")
            from_hf(options.from_hf, options.to, dtype=options.dtype)
        else:
            if options.run is None or options.to is not None:
                raise ValueError("--to-hf goes with --run; name the run folder to read")
            to_hf(options.run, options.to_hf, dtype=options.dtype)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def from_hf(source: Path, to: Path, *, dtype: str | None = None) -> None:
    """Writes our weights; into a folder also config.json, in which `recipe` has the model's config, and the tokenizer.

    Args:
      source: a folder of Hugging Face, or a GGUF file.
      to: a new folder, or a file that ends in .safetensors.
      dtype: "fp32", "bf16" or "fp16"; None: that of the largest tensor.

    Raises:
      ValueError: what `open_hf` says, or `to` is there already.
    """
    from meshpar.hf.folder import copy_tokenizer, open_hf
    from meshpar.hf.safetensors import new_folder, write_file

    if to.suffix == ".safetensors" and to.exists():
        raise ValueError(f"{to} is there already; name a new file")
    opened = open_hf(source)
    specs, chunks = _ours(opened, _dtype(dtype, opened.tensors))
    recipe = _recipe_of(opened.config, tokenizer=to / "tokenizer.json")
    about = {"recipe": recipe, "token_ids": opened.token_ids, "from": str(source)}
    metadata = {"meshpar": json.dumps(about)}
    with _progress(f"reading {source}", sum(spec.nbytes for spec in specs)) as advance:
        counted = _counted(chunks, advance)
        if to.suffix == ".safetensors":
            write_file(to, specs, counted, metadata)
        else:
            with new_folder(to) as new:
                write_file(new / WEIGHTS, specs, counted, metadata)
                (new / CONFIG).write_text(json.dumps({"name": source.name, **about}, indent=1))
                if source.suffix == ".gguf":
                    from meshpar.hf.gguf import read_tokenizer

                    try:
                        read_tokenizer(source).save(str(new / "tokenizer.json"))
                    except ValueError as error:
                        print(f"without a tokenizer: {error}")
                elif not copy_tokenizer(source, new):
                    print(f"without a tokenizer: {source} has none")
    print(f"{opened.model.size / 1e6:.1f}M parameters of {opened.values.model_type} in {to}")


def to_hf(run: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Writes a folder for transformers from a run's config.json, weights.safetensors and tokenizer.

    Args:
      dtype: "fp32", "bf16" or "fp16"; None: as the weights are.

    Raises:
      ValueError: the run lacks a file or has weights of another model, no architecture of transformers computes the
        model, or the folder is there already.
    """
    from meshpar.hf.families import family_of_config
    from meshpar.hf.folder import write_model
    from meshpar.hf.mapping import outgoing, shapes_of
    from meshpar.hf.safetensors import read_file
    from meshpar.module import abstract

    about = _about(run)
    config = _config_of(about, run)
    family = family_of_config(config)
    values, weights = family.write_config(config), family.weights(config)
    stored, shapes = read_file(run / WEIGHTS), shapes_of(abstract(config.build, config).shapes)
    for path in sorted({*stored, *shapes}):
        there = stored[path].shape if path in stored else None
        if there != shapes.get(path):
            raise ValueError(
                f"{path} is {there or 'not there'} in {run / WEIGHTS} and {shapes.get(path) or 'not there'} by its "
                f"{CONFIG}; give files of one run"
            )

    def fetch(path: str, layer: int | None) -> np.ndarray:
        if layer is None:
            return stored[path].read()
        return stored[path].read((slice(layer, layer + 1),))[0]

    token_ids = about.get("token_ids") or {"bos_token_id": None, "eos_token_id": _eod(run)}
    written = _dtype(dtype, stored)
    specs, chunks = outgoing(weights, shapes, written, fetch)
    with _progress(f"writing {folder}", sum(spec.nbytes for spec in specs)) as advance:
        write_model(folder, {**values, **token_ids}, specs, _counted(chunks, advance), written, tokenizer=run)
    print(f"{values['architectures'][0]} in {folder}")


def _ours(opened: Any, dtype: np.dtype[Any]) -> tuple[list[Any], Any]:
    """Our parameters to be written, and the function that reads each, layer by layer."""
    from meshpar.hf.mapping import read_block, shapes_of
    from meshpar.hf.safetensors import Spec

    weights, tensors, shapes = opened.weights, opened.tensors, shapes_of(opened.model.shapes)
    entries, spell = {entry.ours: entry for entry in weights.entries}, weights.named_as(tensors)

    def chunks(spec: Any) -> Iterator[np.ndarray]:
        entry, shape = entries[spec.name], shapes[spec.name]
        inner = shape[1:] if entry.stacked else shape
        for layer in range(shape[0] if entry.stacked else 1):
            tensor = tensors[spell(entry.name(layer))]
            yield read_block(weights, entry, tensor, shape, tuple(slice(0, size) for size in inner), dtype)

    return [Spec(name=path, shape=shape, dtype=dtype) for path, shape in shapes.items()], chunks


def _dtype(asked: str | None, tensors: Mapping[str, Any]) -> np.dtype[Any]:
    from meshpar.hf.safetensors import DTYPES as STORED

    if asked is not None:
        return STORED[DTYPES[asked]]
    found: np.dtype[Any] = max(tensors.values(), key=lambda tensor: int(np.prod(tensor.shape))).dtype
    return found


def _recipe_of(config: Any, *, tokenizer: Path) -> dict[str, Any]:
    """The recipe in a run's config.json: this model, and the least that a recipe says besides."""
    from meshpar.plan import Plan
    from meshpar.train.data import DataConfig
    from meshpar.train.optimizer import OptimizerConfig
    from meshpar.train.run import Recipe, RunConfig
    from meshpar.train.values import to_json

    recipe = Recipe(
        model=config,
        plan=Plan(),
        data=DataConfig(tokenizer=str(tokenizer), seq=min(config.max_seq, 1024)),
        optimizer=OptimizerConfig(),
        train=RunConfig(steps=1, batch=1),
    )
    return dict(to_json(recipe))


def _about(run: Path) -> dict[str, Any]:
    try:
        about = json.loads((run / CONFIG).read_text())
        _ = about["recipe"]["model"]["class"]
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(
            f"{run / CONFIG} does not tell the recipe of a run; name a folder that experiments.train_lm or convert left"
        ) from None
    return dict(about)


def _config_of(about: Mapping[str, Any], run: Path) -> Any:
    from meshpar.train.values import from_json, load

    model = dict(about["recipe"]["model"])
    try:
        return from_json(load(model.pop("class")), model, "model.")
    except ValueError as error:
        raise ValueError(f"{run / CONFIG}: {error}") from None


def _eod(run: Path) -> int | None:
    """The token that ends a document, where the run has a tokenizer."""
    from meshpar.train.tokenizer import load_tokenizer

    try:
        return int(load_tokenizer(run).eod)
    except ValueError:
        return None


def _counted(chunks: Callable[[Any], Any], advance: Callable[[int], None]) -> Callable[[Any], Iterator[np.ndarray]]:
    def counted(spec: Any) -> Iterator[np.ndarray]:
        for chunk in chunks(spec):
            yield chunk
            advance(chunk.nbytes)

    return counted


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda size: bar.advance(task, size)
