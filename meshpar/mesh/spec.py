"""MeshSpec: how many devices each mesh axis has, as a value that needs no devices.

The short string is the spelling everywhere, on the command line, in a saved plan and in errors:
`"data=2 fsdp=-1 tensor=2"`, axes of size 1 left out, at most one -1 for "the devices that are left". A spec with a -1
is a wish; `resolve` makes it a fact.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace

from meshpar.mesh.axes import AXES, OTHER_NAMES

_MOST = 2**20  # beyond any machine, and far from where sizes overflow
_RULE = "give a positive integer, or -1 for the devices that are left"


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """The size of each mesh axis: a positive integer, or -1 on at most one axis for "what is left".

    Raises:
        ValueError: a size is not an integer, is 0, below -1 or beyond any machine, or two axes are -1.
    """

    stage: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise ValueError(f"mesh axis {name}={size!r} is not an integer; {_RULE}")
            if size == 0 or size < -1:
                raise ValueError(f"mesh axis {name}={size} has no devices; {_RULE}")
            if size > _MOST:
                raise ValueError(
                    f"mesh axis {name}={size} is more than the {_MOST} devices that an axis may have; {_RULE}"
                )
        free = [name for name, size in self.sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"mesh {self} leaves {' and '.join(free)} open, but only one may be -1; size the others")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """The spec that a string such as `"data=2 fsdp=-1 tensor=2"` spells.

        Spaces or commas separate the entries; an empty string is one device.

        Raises:
            ValueError: an entry is not `axis=size`, an axis is unknown or named twice, or a size is not allowed.
        """
        sizes: dict[str, int] = {}
        for entry in re.sub(r"\s*=\s*", "=", text).replace(",", " ").split():
            name, equals, value = entry.partition("=")
            if not (name and equals and value):
                raise ValueError(f'mesh entry {entry!r} is not axis=size; write for example "data=2 tensor=4"')
            if name not in AXES:
                raise ValueError(_unknown_axis(name))
            if name in sizes:
                raise ValueError(f"mesh axis {name} is named twice in {text!r}; give it one size")
            sizes[name] = _parse_size(name, value)
        return cls(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size for all six axes, outermost first; a free axis reads -1."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def has_free_axis(self) -> bool:
        """Whether an axis is -1, so that the number of devices decides its size."""
        return -1 in self.sizes.values()

    @property
    def product(self) -> int:
        """The number of devices of the mesh.

        Raises:
            ValueError: an axis is still -1.
        """
        if self.has_free_axis:
            raise ValueError(f"mesh {self} has no number of devices while an axis is -1; resolve it for one first")
        return math.prod(self.sizes.values())

    def resolve(self, n_devices: int) -> MeshSpec:
        """This mesh on exactly `n_devices` devices, its -1 replaced by a size.

        Raises:
            ValueError: the sizes do not multiply (or, with a -1, divide) to `n_devices`.
        """
        if n_devices < 1:
            raise ValueError(f"mesh {self} was resolved for {n_devices} devices; a mesh needs at least one")
        named = math.prod(size for size in self.sizes.values() if size != -1)
        free = next((name for name, size in self.sizes.items() if size == -1), None)
        if free is None:
            if named == n_devices:
                return self
            raise ValueError(
                f"mesh {self} is {named} device{'s' if named > 1 else ''} but {n_devices} "
                f"{'are' if n_devices > 1 else 'is'} there; set one axis to -1 or change the sizes"
                f"{self._suggestion(n_devices)}"
                f"{f', or use fewer devices (--devices {named})' if named < n_devices else ''}"
            )
        if n_devices % named:
            raise ValueError(
                f"mesh {self} cannot fill {n_devices} devices: the axes beside {free}=-1 are {named} devices, which "
                f"does not divide {n_devices}; choose sizes whose product divides {n_devices}"
            )
        return replace(self, **{free: n_devices // named})

    def _suggestion(self, n_devices: int) -> str:
        """A mesh that fits and differs from this one in one axis, as the end of a sentence."""
        if self.product == 1:
            return f', for example "fsdp={n_devices}"'
        for name, size in self.sizes.items():
            others = self.product // size
            if size > 1 and n_devices % others == 0:
                return f', for example "{replace(self, **{name: n_devices // others})}"'
        return f" so that they multiply to {n_devices}"

    def __str__(self) -> str:
        """The short string, which `parse` reads back; `"data=1"` for one device."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items() if size != 1) or "data=1"


def _parse_size(name: str, value: str) -> int:
    if re.fullmatch(r"\d+(x\d+)+", value):
        product = math.prod(int(part) for part in value.split("x"))
        raise ValueError(
            f"mesh axis {name}={value} is a grid, not available yet; give the axis one size, {name}={product}"
        )
    if not re.fullmatch(r"[+-]?[0-9]+", value):
        raise ValueError(f"mesh axis {name}={value} is not an integer; {_RULE}")
    return int(value)


def _unknown_axis(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), AXES, n=1)
    meant = OTHER_NAMES.get(name.lower()) or (close[0] if close else None)
    hint = f"did you mean {meant!r}? The axes are" if meant else "the axes are"
    return f"unknown mesh axis {name!r}; {hint} {', '.join(AXES)}"
