"""Cross-entropy of a text under a model: what perplexity is the exponential of.

The text is read in windows; each token but the first is predicted once, from those before it in its window. Where a
model expects a token before each text, every window begins with it, and the first token is predicted too. Products are
in fp32, whatever the plan trains in; parameters are taken as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from meshpar.interfaces import Batch, PyTree
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import build

Score = Callable[[PyTree, np.ndarray], float]


def scorer(model: Model, plan: Plan, devices: Sequence[jax.Device], *, seq: int, begin: Sequence[int] = ()) -> Score:
    """A function (parameters in the plan's params layout, token ids `[tokens]`) -> cross-entropy in nats a token.

    It compiles at its first call, and once.

    Args:
      seq: tokens of a window, more than `begin` has.
      begin: what stands before every text: `Tokenizer.begin`.

    Raises:
      ValueError: a window is longer than the model's longest row, or not longer than `begin`; called, fewer than two
        tokens.
    """
    if seq <= len(begin):
        raise ValueError(f"a window of seq={seq} has no room beside the {len(begin)} tokens that begin a text")
    sizes = plan.on(len(devices)).mesh.sizes
    rows = math.prod(sizes[axis] for axis in ("data", "fsdp"))  # one on each device that splits a batch
    plain = dataclasses.replace(plan, accumulate=1, precision=Policy(compute="fp32"))
    training = build(model, optax.identity(), plain, batch=rows, seq=seq, devices=devices)

    def score(params: PyTree, ids: np.ndarray) -> float:
        if len(ids) < 2:
            raise ValueError(f"a text of {len(ids)} tokens has nothing to predict; give a longer one")
        windows = _windows(np.asarray(ids), seq, list(begin))
        nll = tokens = 0.0
        for first in range(0, len(windows), rows):
            batch = _batch(windows[first : first + rows], rows, seq, len(begin))
            sums = training.evaluate(params, training.place(jax.tree.map(lambda x: x[training.own_rows], batch)))
            nll, tokens = nll + float(sums["nll"]), tokens + float(sums["tokens"])
        return nll / tokens

    return score


def _windows(ids: np.ndarray, seq: int, begin: list[int]) -> list[np.ndarray]:
    """Inputs and the target of the last, at most seq + 1 tokens each."""
    if not begin:
        return [ids[at : at + seq + 1] for at in range(0, len(ids) - 1, seq)]
    room = seq + 1 - len(begin)
    return [np.array([*begin, *ids[at : at + room]]) for at in range(0, len(ids), room)]


def _batch(windows: Sequence[np.ndarray], rows: int, seq: int, begin: int) -> Batch:
    tokens: Any = np.zeros((rows, seq), np.int32)
    targets: Any = np.zeros((rows, seq), np.int32)
    weights: Any = np.zeros((rows, seq), np.float32)  # what is past the end of a text does not count
    for row, window in enumerate(windows):
        count = len(window) - 1
        tokens[row, :count], targets[row, :count] = window[:-1], window[1:]
        weights[row, max(0, begin - 1) : count] = 1
    return Batch(tokens=tokens, targets=targets, weights=weights)
