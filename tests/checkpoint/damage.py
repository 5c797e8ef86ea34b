"""Harm that disks and interrupted copies do to a file."""

from __future__ import annotations

from pathlib import Path


def truncate(path: Path) -> None:
    """Cuts the second half off."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path: Path) -> None:
    """Flips one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
