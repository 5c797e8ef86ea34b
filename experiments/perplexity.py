"""Perplexity of a text file under pretrained weights.

    python -m experiments.perplexity notes.txt --weights smollm2
    python -m experiments.perplexity notes.txt --weights runs/mine/hf --set mesh="fsdp=4" --seq 1024

The text is cut into windows of --seq tokens, each read by itself, after the token that the model expects before a
text, if there is one; products are in fp32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.arguments import add_devices, add_set
from experiments.pretrained import find_tokenizer, find_weights
from experiments.results import perplexity


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 after one sentence about a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.perplexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="a text file")
    parser.add_argument("--weights", required=True, help="a folder of Hugging Face, a GGUF file, or smollm2")
    parser.add_argument("--tokenizer", help="a tokenizer.json (default: that of the weights)")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--tokens", type=int, help="read only the first so many")
    add_set(parser, "override one value of the plan, such as mesh; repeat for more")
    add_devices(parser)
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """What the parsed command line asks for; returns the exit code."""
    from meshpar.hf.folder import load_hf
    from meshpar.mesh.devices import choose_devices
    from meshpar.mesh.distributed import is_first, join
    from meshpar.plan import Plan
    from meshpar.precision.policy import Policy
    from meshpar.train.recipe import apply_overrides
    from meshpar.train.score import scorer
    from meshpar.train.tokenizer import load_tokenizer

    join()
    if options.seq < 2:
        raise ValueError(f"--seq {options.seq} is below 2; use 512, say")
    if options.tokens is not None and options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens} predicts nothing; use 2 or more")
    plan = apply_overrides(Plan(precision=Policy(compute="fp32")), options.overrides)
    weights = find_weights(options.weights)
    tokenizer = load_tokenizer(options.tokenizer or find_tokenizer(weights))
    try:
        ids = tokenizer.encode(options.file.read_text(encoding="utf-8", errors="replace"))[: options.tokens]
    except OSError as error:
        raise ValueError(f"{options.file} cannot be read ({error.strerror}); name a text file") from None
    devices = choose_devices(plan.mesh, options.devices)
    loaded = load_hf(weights, plan, devices=devices)
    if tokenizer.vocab > loaded.config.vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab} tokens and the model's vocab={loaded.config.vocab}; "
            "use the tokenizer that belongs to the model"
        )
    seq = min(options.seq, loaded.config.max_seq, len(ids) + len(tokenizer.begin))
    loss = scorer(loaded.model, loaded.plan, devices, seq=max(2, seq), begin=tokenizer.begin)(loaded.params, ids)
    if is_first():
        print(
            f"{options.file}: perplexity {perplexity(loss):.2f}, cross-entropy {loss:.4f} nats a token, "
            f"of {len(ids)} tokens"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
