"""Cross-entropy of a text under a model: what perplexity is the exponential of.

The text is read in windows that do not overlap; each token but the first is predicted once, from those before it in its
window. Products are in fp32, whatever the plan trains in, so that the number is the model's and not the rounding's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax

from meshpar.interfaces import PyTree
from meshpar.module import Model
from meshpar.plan import Plan
from meshpar.precision.policy import Policy
from meshpar.train.build import build
from meshpar.train.rows import make_rows
from meshpar.train.token_cache import TokenStream

Score = Callable[[PyTree, np.ndarray], float]


def scorer(model: Model, plan: Plan, devices: Sequence[jax.Device], *, seq: int) -> Score:
    """A function (parameters in the plan's params layout, token ids `[tokens]`) -> cross-entropy in nats a token.

    It compiles at its first call, and once.

    Args:
      seq: tokens of a window.

    Raises:
      ValueError: a window is longer than the model's longest row; called, fewer than two tokens.
    """
    sizes = plan.on(len(devices)).mesh.sizes
    rows = math.prod(sizes[axis] for axis in ("data", "fsdp"))  # one on each device that splits a batch
    plain = dataclasses.replace(plan, accumulate=1, precision=Policy(compute="fp32"))
    training = build(model, optax.identity(), plain, batch=rows, seq=seq, devices=devices)

    def score(params: PyTree, ids: np.ndarray) -> float:
        if len(ids) < 2:
            raise ValueError(f"a text of {len(ids)} tokens has nothing to predict; give a longer one")
        stream = TokenStream(tokens=np.asarray(ids), offsets=np.array([0, len(ids)]), eod=int(ids[-1]))
        windows = make_rows(stream, seq=seq, packed=False)
        nll = tokens = 0.0
        for begin in range(0, len(windows), rows):
            batch = windows.batch(np.arange(begin, begin + rows)[training.own_rows])  # past the end they are padding
            sums = training.evaluate(params, training.place(batch))
            nll, tokens = nll + float(sums["nll"]), tokens + float(sums["tokens"])
        return nll / tokens

    return score
