"""config.json, read: typed values with the defaults of an architecture, and one sentence for each that is wrong."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Values:
    """The values of a config.json, or of a part of it."""

    values: Mapping[str, Any]
    file: str  # for errors
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be missing

    @property
    def model_type(self) -> Any:
        """Which architecture this is."""
        return self.values.get("model_type")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Values:
        """These values, with an architecture's defaults for what is missing."""
        return Values(values=self.values, file=self.file, defaults=defaults)

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is, null too; where there is no such key the architecture's default, or else `default`."""
        return self.values[key] if key in self.values else self.defaults.get(key, default)

    def integer(self, key: str) -> int:
        """A whole number. Raises ValueError when it is missing or is none."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "a whole number")
        return value

    def number(self, key: str) -> float:
        """A number. Raises ValueError when it is missing or is none."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false. Raises ValueError when it is missing or is neither."""
        value = self._needed(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def must_be(self, key: str, computed: Collection[Any], missing: Any) -> None:
        """Raises ValueError when a value is none of those that the model computes.

        Args:
          missing: what a missing key or null means.
        """
        value = self.get(key)
        value = missing if value is None else value
        if value not in computed:
            known = ", ".join(json.dumps(one) for one in computed)
            raise ValueError(
                f"{self.file}: {key}={json.dumps(value)} is not computed by this model, only {known}; "
                "use a checkpoint with one of these"
            )

    def part(self, key: str) -> Values | None:
        """A nested object, None where there is none. Raises ValueError when it is something else."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return Values(values=value, file=f"{self.file}: {key}")

    def wrong(self, key: str, value: Any, kind: str) -> ValueError:
        """The error about a value of another kind."""
        return ValueError(f"{self.file}: {key}={json.dumps(value)} should be {kind}; correct it")

    def _needed(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file} has no {key}; take config.json from where the weights are from")
        return value


def read_values(file: Path) -> Values:
    """The values of a config.json.

    Raises:
      ValueError: it is missing or is no JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"there is no {file}; name a folder that holds config.json and the weights") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not JSON ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object; name the config.json of a model")
    return Values(values=values, file=str(file))
