"""From a config.json to the model family that reads it.

Families live outside of meshpar, in `models/` of a clone, and are found by the name of their module. A new one needs a
`models/<family>/hf.py` with the three functions of `Family` and a line for each `model_type` here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from meshpar.hf.mapping import Weights
from meshpar.hf.values import Values
from meshpar.layout.rules import did_you_mean

FAMILIES = {
    "gpt2": "models.gpt.hf",
    "llama": "models.llama.hf",
    "mistral": "models.llama.hf",
    "qwen2": "models.llama.hf",
    "qwen3": "models.llama.hf",
    "gemma2": "models.gemma.hf",
    "gemma3_text": "models.gemma.hf",
}


class Family(Protocol):
    """The module `hf` of a model family."""

    def read_config(self, values: Values) -> Any:
        """Our config. Raises ValueError for what the family does not compute."""
        ...

    def write_config(self, config: Any) -> dict[str, Any]:
        """Their config.json. Raises ValueError for a config that no architecture of theirs computes."""
        ...

    def weights(self, config: Any) -> Weights:
        """The map between parameters and tensors."""
        ...


def family_of(values: Values) -> Family:
    """The family of a config.json.

    Raises:
      ValueError: no family reads its `model_type`, or this is not a clone's root.
    """
    kind = values.model_type
    if kind not in FAMILIES:
        hint = did_you_mean(str(kind), FAMILIES) or ";"
        raise ValueError(f"{values.file}: model_type={kind!r} is not known{hint} known are {', '.join(FAMILIES)}")
    return _module(FAMILIES[kind])


def family_of_config(config: Any) -> Family:
    """The family of one of our configs: the module `hf` beside the one that defines it.

    Raises:
      ValueError: it has none.
    """
    name = f"{type(config).__module__.rpartition('.')[0]}.hf"
    if name not in FAMILIES.values():
        known = ", ".join(dict.fromkeys(FAMILIES.values()))
        raise ValueError(
            f"a {type(config).__name__} has no Hugging Face form; only the configs of {known} have: "
            "write such a module for your family, and add it to meshpar/hf/families.py"
        )
    return _module(name)


def _module(name: str) -> Family:
    try:
        return cast(Family, importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no {name} here; run from the root of a clone, where models/ is") from None


def values_of(values: Mapping[str, Any], file: str) -> Values:
    """A config.json as families read it."""
    return Values(values=values, file=file)
