"""RoPE as a config.json states it, in either style, to our values and back.

Up to transformers 4: `rope_theta` and `rope_scaling`, whose kind is `rope_type` or, earlier, `type`. From version 5:
`rope_parameters`, with theta inside. A file may have both, which must then agree. What is missing means what
transformers' `modeling_rope_utils` takes it for.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from meshpar.hf.values import Values
from models.nn.rope import Kind, RopeScaling

Rope = tuple[float, RopeScaling]
_NONE = "default"  # their word for no scaling


def read_rope(values: Values, *, theta: float = 10_000.0) -> Rope:
    """Theta and scaling of a config.json.

    Args:
      theta: what a file without one means.

    Raises:
      ValueError: a kind of scaling that is not computed, a missing or wrong value, or two styles that disagree.
    """
    values.must_be("partial_rotary_factor", (1,), 1)
    flat = values.number("rope_theta") if values.get("rope_theta") is not None else theta
    old, new = values.part("rope_scaling"), values.part("rope_parameters")
    found = [read_part(part, values, theta=flat) for part in (new, old) if part is not None and part.values]
    if not found:
        return flat, RopeScaling()
    if new is not None and values.get("rope_theta") is not None and found[0][0] != flat:
        found.append((flat, found[0][1]))
    if any(one != found[0] for one in found[1:]):
        raise ValueError(
            f"{values.file}: rope_parameters says {_tell(found[0])} and rope_theta with rope_scaling says "
            f"{_tell(found[1])}; delete the one that is wrong"
        )
    return found[0]


def read_part(part: Values, whole: Values, *, theta: float) -> Rope:
    """Theta and scaling of one object of RoPE parameters.

    Args:
      whole: config.json, whose lengths are used where the object has none.
      theta: where the object has none.
    """
    theta = part.number("rope_theta") if part.get("rope_theta") is not None else theta
    kind = part.get("rope_type", part.get("type", _NONE))
    computed = [_NONE, *(kind for kind in get_args(Kind) if kind != "none")]
    if kind not in computed:
        raise ValueError(
            f"{part.file}: the rope type {kind!r} is not computed, only {', '.join(computed)}; "
            "use a checkpoint with one of these"
        )
    part.must_be("partial_rotary_factor", (1,), 1)
    if kind == _NONE:
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=part.number("factor"))
    longest = whole.integer("max_position_embeddings")
    original = whole.get("original_max_position_embeddings") or part.get("original_max_position_embeddings") or longest
    if not isinstance(original, int) or original < 1:
        raise part.wrong("original_max_position_embeddings", original, "a whole number above 0")
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=part.number("factor"),
            original_seq=original,
            low_freq_factor=part.number("low_freq_factor"),
            high_freq_factor=part.number("high_freq_factor"),
        )
    part.must_be("truncate", (True,), True)
    factor = longest / original if part.get("factor") is None else part.number("factor")
    return theta, RopeScaling(
        kind="yarn",
        factor=factor,
        original_seq=original,
        beta_fast=float(part.get("beta_fast") or 32.0),
        beta_slow=float(part.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(part, factor),
    )


def write_rope(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """Both styles at once, as keys of config.json."""
    values = scaling_values(scaling)
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling.kind == "none" else {**values, "type": scaling.kind},
        "rope_parameters": {"rope_theta": theta, **values},
    }


def scaling_values(scaling: RopeScaling) -> dict[str, Any]:
    """A scaling in transformers' words, without theta."""
    values: dict[str, Any] = {"rope_type": _NONE if scaling.kind == "none" else scaling.kind}
    if scaling.kind != "none":
        values["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_seq
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            values["attention_factor"] = float(scaling.attention_factor)
    return values


def _attention_factor(part: Values, factor: float) -> float | None:
    """The scale of the tables: stated, or made of DeepSeek's two mscales; None is the paper's."""
    if part.get("attention_factor") is not None:
        return part.number("attention_factor")
    if not (part.get("mscale") and part.get("mscale_all_dim")):
        return None
    grown = [0.1 * part.number(key) * math.log(max(factor, 1.0)) + 1.0 for key in ("mscale", "mscale_all_dim")]
    return grown[0] / grown[1]


def _tell(rope: Rope) -> str:
    return f"theta {rope[0]:g}, {scaling_values(rope[1])}"
