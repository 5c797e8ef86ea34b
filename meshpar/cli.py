"""`python -m meshpar COMMAND ...`: each command is the `main` of a module, which is imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "check": ("meshpar.check.command", "a recipe on two meshes: everything must be equal"),
    "convert": ("meshpar.convert", "weights from and to Hugging Face's form"),
    "launch": ("meshpar.launch", "several processes of one command on this machine"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, or 2 after a sentence about a wrong name."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m meshpar COMMAND ...\n\ncommands (each explains itself with --help):")
        print("\n".join(f"  {known:12}{purpose}" for known, (_, purpose) in COMMANDS.items()))
        return 0
    if name not in COMMANDS:
        from meshpar.layout.rules import did_you_mean

        hint = did_you_mean(name, COMMANDS) or ";"
        print(f"error: unknown command {name!r}{hint} there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(COMMANDS[name][0]).main(words[1:]))
