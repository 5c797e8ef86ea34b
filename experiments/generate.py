"""Continues text with a model that `experiments.train_lm` left behind, or with pretrained weights.

    python -m experiments.generate --run runs/long --prompt "def "
    python -m experiments.generate --run runs/long --prompt "class A" --prompt "import " --temperature 0
    python -m experiments.generate --run runs/long --prompts prompts.txt --new-tokens 256 --top-p 0.95 --out texts.jsonl
    python -m experiments.generate --run runs/long --set mesh="data=2 tensor=2" --top-k 40 --seed 7
    python -m experiments.generate --weights smollm2 --prompt "The capital of France is" --temperature 0
    python -m experiments.generate --weights ~/models/Qwen2.5-0.5B-Instruct --chat --prompt "What is a mesh?"

Of a run folder it reads config.json, weights.safetensors and tokenizer.json; --weights names what finetune_lm takes.
With --chat each prompt is what a user says, written with the model's chat template, and only the answer is shown. One
prompt is written to the terminal as it comes, several when they are done. Without a prompt it begins a document. A text
ends with a token that ends a document or an answer, unless --go-on. The plan is that of one device, with the precision
of the run; --set changes it as in train_lm, whatever the model was trained on. Times at the end do not count compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_devices, add_set
from experiments.pretrained import find_tokenizer, find_weights

NEW_TOKENS = 128


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--run", type=Path, metavar="FOLDER", help="a run folder of train_lm")
    model.add_argument("--weights", help="a folder of Hugging Face, a GGUF file, or smollm2")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeat for more")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says; needs --weights")
    parser.add_argument("--tokenizer", help="a tokenizer.json, with --weights (default: that of the weights)")
    parser.add_argument(
        "--new-tokens",
        type=int,
        help=f"at most, for each prompt (default: {NEW_TOKENS}, or what the model has room for)",
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest tokens (default: %(default)s)")
    parser.add_argument("--top-k", type=int, help="draw from so many of the likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this sum (all)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other text (default: %(default)s)")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the end of a document")
    parser.add_argument("--batch", type=int, default=16, help="prompts at a time (default: %(default)s)")
    add_set(parser, "as in train_lm")
    add_devices(parser)
    parser.add_argument("--out", type=Path, help="write prompts and texts, a JSON object a line")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained model, wherever it comes from: all that generation needs to know of it."""

    config: Any  # a family's config: build(rngs), vocab, max_seq
    tokenizer: Any
    plan: Any
    stop: tuple[int, ...]  # what ends a text
    template: Any  # of conversations; None: not asked for
    read: Callable[[Any], Any]  # arrays with shapes, dtypes and shardings -> the parameters


def from_run(folder: Path, overrides: Sequence[str]) -> Source:
    """A model that train_lm trained.

    Raises:
      ValueError: the folder holds no finished run, or an override does not fit.
    """
    from meshpar.checkpoint.weights import load_weights
    from meshpar.plan import Plan
    from meshpar.train.recipe import apply_overrides
    from meshpar.train.run import Recipe
    from meshpar.train.tokenizer import load_tokenizer
    from meshpar.train.values import from_json

    weights = folder / "weights.safetensors"
    for file in (folder / "config.json", weights):
        if not file.is_file():
            raise ValueError(
                f"there is no {file}; name the folder of a run that has ended, with train.export=fp32 or bf16"
            )
    try:
        values = json.loads((folder / "config.json").read_text())["recipe"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{folder / 'config.json'} does not tell the recipe of this run; restore that file") from None
    recipe = from_json(Recipe, values)
    kept = {name: getattr(recipe.plan, name) for name in ("precision", "attention", "rules", "unroll")}
    recipe = apply_overrides(dataclasses.replace(recipe, plan=Plan(**kept)), overrides)
    return Source(
        config=recipe.model,
        tokenizer=load_tokenizer(folder),
        plan=recipe.plan,
        stop=(),
        template=None,
        read=lambda target: load_weights(weights, target),
    )


def from_weights(name: str, overrides: Sequence[str], *, tokenizer: str | None, chat: bool) -> Source:
    """A model of others.

    Raises:
      ValueError: the weights are not there or damaged, have no tokenizer, or with `chat` no chat template.
    """
    from meshpar.hf.folder import open_hf
    from meshpar.plan import Plan
    from meshpar.train.chat import load_template
    from meshpar.train.recipe import apply_overrides
    from meshpar.train.tokenizer import load_tokenizer

    plan = apply_overrides(Plan(), overrides)
    weights = find_weights(name)
    pretrained = open_hf(weights)
    file = Path(tokenizer).expanduser() if tokenizer else find_tokenizer(weights)
    return Source(
        config=pretrained.config,
        tokenizer=load_tokenizer(file),
        plan=plan,
        stop=pretrained.stop,
        template=load_template(file, flag="--tokenizer, where it stands beside") if chat else None,
        read=pretrained.load,
    )


def run(options: argparse.Namespace) -> int:
    """What the parsed command line asks for; returns the exit code."""
    from meshpar.generate.generator import Generator, check_prompts
    from meshpar.generate.sampling import Sampling
    from meshpar.mesh.build import build_mesh
    from meshpar.mesh.devices import choose_devices
    from meshpar.mesh.distributed import is_first, join
    from meshpar.module import abstract

    join()
    if options.run is not None:
        if options.chat:
            raise ValueError("--chat takes the chat template of --weights; the one of a fine-tuned run is in RUN/hf")
        source = from_run(options.run, options.overrides)
    else:
        source = from_weights(options.weights, options.overrides, tokenizer=options.tokenizer, chat=options.chat)
    tokenizer, longest = source.tokenizer, source.config.max_seq
    texts = texts_of(options)
    prompts = [prompt_of(source, text) for text in texts]
    shown_from = [len(prompt) if options.chat else 0 for prompt in prompts]
    model = abstract(source.config.build, source.config)
    check_prompts(model, prompts)
    room = longest - max(map(len, prompts))
    if options.new_tokens is not None and not 1 <= options.new_tokens <= room:
        raise ValueError(
            f"--new-tokens {options.new_tokens} does not fit; the longest prompt leaves {room} of the model's "
            f"max_seq={longest}"
        )
    if room < 1 or options.batch < 1:
        raise ValueError(
            f"--batch {options.batch} and a longest prompt that leaves {room} positions; both must be 1 or more"
        )
    new = options.new_tokens or min(NEW_TOKENS, room)
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=() if options.go_on else tuple(t for t in {tokenizer.eod, *source.stop} if t < source.config.vocab),
    )
    devices = choose_devices(source.plan.mesh, options.devices)
    plan = source.plan.on(len(devices))
    batch = min(options.batch, len(prompts))
    generator = Generator(model, plan, build_mesh(plan.mesh, devices), rows=batch, length=max(map(len, prompts)) + new)
    params = source.read(generator.abstract_params())
    clock = Clock()
    rows: list[list[int]] = []
    compiled: set[int] = set()
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        width = generator.width(max(map(len, part)))
        if width not in compiled:  # it compiles with the first two tokens
            compiled.add(width)
            begun = time.perf_counter()
            generator.generate(params, part, new_tokens=min(2, new), sampling=sampling)
            clock.compiling += time.perf_counter() - begun
        streamed = clock.timed(part, generator.stream(params, part, new_tokens=new, sampling=sampling))
        if len(prompts) == 1 and is_first():
            streamed = write_as_it_comes(tokenizer, [] if options.chat else prompts[0], streamed)
        rows += collected(part, streamed)
    if is_first():
        found = [
            tokenizer.decode(token for token in row[begin:] if token < tokenizer.vocab)
            for row, begin in zip(rows, shown_from, strict=True)
        ]
        if len(prompts) > 1:
            print("\n----\n".join(found))
        if options.out:
            lines = zip(texts, found, rows, strict=True)
            options.out.write_text(
                "".join(f"{json.dumps({'prompt': p, 'text': text, 'tokens': row})}\n" for p, text, row in lines)
            )
        print(f"\n{clock.text()}", file=sys.stderr)
    return 0


def prompt_of(source: Source, text: str) -> list[int]:
    """Tokens to continue."""
    from meshpar.train.chat import encode_prompt

    if source.template is not None:
        return encode_prompt(source.template, source.tokenizer, [{"role": "user", "content": text}])
    return [*source.tokenizer.begin, *source.tokenizer.encode(text).tolist()] or [source.tokenizer.eod]


def texts_of(options: argparse.Namespace) -> list[str]:
    """The prompts of the command line and of its file; one that is empty where there are none."""
    try:
        lines = options.prompts.read_text().splitlines() if options.prompts else []
    except OSError as error:
        raise ValueError(f"--prompts {options.prompts} cannot be read ({error.strerror}); name a text file") from None
    return [*options.prompt, *lines] or [""]


def collected(prompts: Sequence[Sequence[int]], streamed: Iterator[list[int | None]]) -> list[list[int]]:
    """Prompts and continuations, of what is streamed."""
    rows = [list(prompt) for prompt in prompts]
    for tokens in streamed:
        for row, token in zip(rows, tokens, strict=True):
            row.extend([] if token is None else [token])
    return rows


def write_as_it_comes(
    tokenizer: Any, prompt: Sequence[int], streamed: Iterator[list[int | None]]
) -> Iterator[list[int | None]]:
    """Writes one text to the terminal, token by token; half a character waits for its other half."""
    row, written = list(prompt), ""

    def write(ended: bool) -> None:
        nonlocal written
        text = tokenizer.decode(token for token in row if token < tokenizer.vocab)
        text = text if ended else text.rstrip("\ufffd")
        print(text[len(written) :], end="", flush=True)
        written = max(written, text, key=len)

    write(ended=False)
    for tokens in streamed:
        row.extend(token for token in tokens if token is not None)
        write(ended=False)
        yield tokens
    write(ended=True)
    print(flush=True)


class Clock:
    """Seconds of compiling, of prompts and of tokens."""

    def __init__(self) -> None:
        self.compiling = self.reading = self.decoding = 0.0
        self.read = self.decoded = self.steps = 0

    def timed(
        self, prompts: Sequence[Sequence[int]], streamed: Iterator[list[int | None]]
    ) -> Iterator[list[int | None]]:
        """The stream, whose first tokens come with the prompts and all others one by one."""
        at = time.perf_counter()
        for number, tokens in enumerate(streamed):
            seconds = time.perf_counter() - at
            if number == 0:
                self.reading += seconds
                self.read += sum(map(len, prompts))
            else:
                self.decoding += seconds
                self.decoded += sum(token is not None for token in tokens)
                self.steps += 1
            yield tokens
            at = time.perf_counter()

    def text(self) -> str:
        """Both speeds, for people."""
        parts = [f"compiled and warm after {self.compiling:.1f} s"]
        parts.append(
            f"prompts: {self.read} tokens in {1e3 * self.reading:.1f} ms ({self.read / self.reading:.0f} tokens/s)"
        )
        if self.steps:
            parts.append(
                f"decode: {self.decoded} tokens, {1e3 * self.decoding / self.steps:.2f} ms a token of each row "
                f"({self.decoded / self.decoding:.0f} tokens/s)"
            )
        return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
