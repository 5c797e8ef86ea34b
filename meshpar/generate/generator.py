"""`Generator`: text from a model under its plan, with keys and values kept, compiled once.

The host asks for a token, then reads the one before, so that devices do not wait for it; that all rows have ended is
noticed one token late. What a row holds when it has ended does not change any more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.attention.attend import check_backend
from meshpar.attention.cache import CACHE_AXES, KVCache
from meshpar.forward import Forward
from meshpar.generate.decode import next_logits, read_prompts
from meshpar.generate.sampling import Choice, Sampling, choose
from meshpar.interfaces import PyTree
from meshpar.layout.resolve import map_leaves, place, shardings
from meshpar.mesh.devices import compiler_options, use_compilation_cache
from meshpar.mesh.emulate import steps_in_flight
from meshpar.module import Model, is_norm_or_bias
from meshpar.plan import Plan

LEAST = 16  # positions of the shortest prompt that is compiled for

Prompts = Sequence[Sequence[int]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _State:
    """What one token needs of those before it; donated to the program that makes the next."""

    caches: tuple[KVCache, ...]
    token: jax.Array  # int32 [rows]: chosen last, not yet in the caches
    position: jax.Array  # int32 [rows]: where it stands
    ended: jax.Array  # bool [rows]: whether a stop token was chosen


@dataclass(frozen=True, eq=False)
class Generator:
    """Continues prompts, `rows` at most at a time, prompt and continuation of at most `length` tokens each.

    It compiles one program that reads prompts, for each power of two that their longest length is rounded up to, and
    one that makes a token from the one before, whatever the number of tokens, their positions and the `Sampling`.

    Args:
      plan: that the model trains with, or another.
      mesh: what the plan's mesh spells, built.
      rows: of the cache, rounded up to what the plan splits the batch into.
      length: positions of the cache, which all are read for each token; at most the model's `max_seq`.

    Raises:
      ValueError: the plan does not fit the model or the mesh, or the cache does not fit the model.
    """

    model: Model
    plan: Plan
    mesh: Mesh
    rows: int
    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", self.plan.on(self.mesh.size))
        self.plan.check(self.model)
        if self.plan.mesh.sizes != dict(self.mesh.shape):
            raise ValueError(
                f"the plan is for the mesh {self.plan.mesh} and was given one of {dict(self.mesh.shape)}; give the "
                "mesh that was built for it"
            )
        check_backend(self.plan.attention, self.mesh.devices.flat[0].platform)
        longest = getattr(self.model.config, "max_seq", self.length)
        if self.rows < 1 or not 2 <= self.length <= longest:
            raise ValueError(
                f"a cache of rows={self.rows} and length={self.length} does not fit; use at least 1 row and a length "
                f"of 2 to the model's max_seq={longest}"
            )

    def generate(
        self, params: PyTree, prompts: Prompts, *, new_tokens: int, sampling: Sampling = Sampling()
    ) -> list[list[int]]:
        """Prompt and continuation of each row; one that ended early ends with its stop token. Arguments and errors as
        of `stream`.
        """
        rows = [list(map(int, prompt)) for prompt in prompts]
        for tokens in self.stream(params, prompts, new_tokens=new_tokens, sampling=sampling):
            for row, token in zip(rows, tokens, strict=True):
                row.extend([] if token is None else [token])
        return rows

    def stream(
        self, params: PyTree, prompts: Prompts, *, new_tokens: int, sampling: Sampling = Sampling()
    ) -> Iterator[list[int | None]]:
        """The continuation as it comes: for each position one token of each prompt, None for rows that have ended.

        Several processes call this alike, and each sees all rows.

        Args:
          params: the model's, in any layout and dtype; those of `abstract_params` are used as they are.
          prompts: token ids, at least one each; they may differ in length.
          new_tokens: how many to add to each prompt, if no stop token ends it.

        Raises:
          ValueError: a prompt is empty, too long or holds a token outside of the vocabulary; there are more than
            `rows`; or so is a stop token. Before anything runs.
        """
        self._check(prompts, new_tokens)
        sampling.check(self.model.config.vocab)
        return self._stream(params, prompts, new_tokens, sampling)

    def width(self, longest: int) -> int:
        """What prompts of at most `longest` tokens are padded to: of each width one program is compiled."""
        return min(max(LEAST, 1 << (longest - 1).bit_length()), self.length)

    def abstract_params(self) -> PyTree:
        """Shapes, dtypes and shardings of the parameters as they are used: a target to read weights into."""
        where = shardings(self.plan.layouts().params, self.model.axes, self.model.shapes, self.mesh)
        dtypes = map_leaves(lambda path, leaf, _: self._dtype(path), self.model.shapes, self.model.axes)
        return jax.tree.map(
            lambda leaf, dtype, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
            self.model.shapes,
            dtypes,
            where,
        )

    def ready(self, params: PyTree) -> PyTree:
        """The parameters cast and placed as they are used, themselves if they are so already: a step casts its weights
        in each forward, and a forward of one token would spend most of its time with that.
        """
        target = self.abstract_params()

        def fits(leaf: Any, like: jax.ShapeDtypeStruct) -> bool:
            return (
                isinstance(leaf, jax.Array)
                and leaf.dtype == like.dtype
                and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
            )

        if all(jax.tree.leaves(jax.tree.map(fits, params, target))):
            return params
        return self._cast(params)

    def _stream(
        self, params: PyTree, prompts: Prompts, new_tokens: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        if new_tokens == 0:
            return
        params = self.ready(params)
        choice = sampling.arrays(self.model.config.vocab)
        tokens, ends, ended = self._padded(prompts)
        state, chosen = self._prefill(params, tokens, ends, ended, choice)
        ahead = steps_in_flight(list(self.mesh.devices.flat)) != 1
        for number in range(1, new_tokens + 1):
            following = None
            if ahead and 1 < number < new_tokens:  # the first is read at once: somebody waits for it
                state, following = self._decode(params, state, choice)
            seen = np.asarray(chosen)[: len(prompts)]
            yield [None if token < 0 else int(token) for token in seen]
            if number == new_tokens or all(token < 0 or token in sampling.stop for token in seen.tolist()):
                return
            if following is None:
                state, following = self._decode(params, state, choice)
            chosen = following

    @functools.cached_property
    def _forward(self) -> Forward:
        return Forward(self.model, self.plan, self.mesh)

    @functools.cached_property
    def _rows(self) -> int:
        """Rows of the arrays: a multiple of what the plan splits the batch into."""
        rule = self.plan.layouts().compute.rule("batch")
        degree = math.prod(self.mesh.shape[axis] for axis in rule.mesh_axes) if rule else 1
        return -(-self.rows // degree) * degree

    @functools.cached_property
    def _cast(self) -> Callable[[PyTree], PyTree]:
        target = self.abstract_params()

        def cast(params: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, target)

        return jax.jit(cast, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))

    @functools.cached_property
    def _prefill(self) -> Callable[..., tuple[_State, jax.Array]]:
        def prefill(
            params: PyTree, tokens: jax.Array, ends: jax.Array, ended: jax.Array, choice: Choice
        ) -> tuple[_State, jax.Array]:
            logits, caches = read_prompts(self._forward, params, tokens, ends, length=self.length)
            return _chosen(logits, caches, ends, ended, jnp.zeros_like(ends), choice)

        use_compilation_cache()
        return jax.jit(prefill, out_shardings=self._shardings, compiler_options=self._options)

    @functools.cached_property
    def _decode(self) -> Callable[..., tuple[_State, jax.Array]]:
        def decode(params: PyTree, state: _State, choice: Choice) -> tuple[_State, jax.Array]:
            logits, caches = next_logits(self._forward, params, state.token, state.position, state.caches)
            following = state.position + jnp.where(state.ended, 0, 1)
            return _chosen(logits, caches, following, state.ended, state.token, choice)

        use_compilation_cache()
        return jax.jit(decode, donate_argnums=1, out_shardings=self._shardings, compiler_options=self._options)

    @functools.cached_property
    def _shardings(self) -> tuple[_State, NamedSharding]:
        """Of the state and of what the host reads, which each process holds whole."""
        tokens = jax.ShapeDtypeStruct((self._rows, self.width(1)), jnp.int32)
        ends = jax.ShapeDtypeStruct((self._rows,), jnp.int32)
        _, caches = jax.eval_shape(
            functools.partial(read_prompts, self._forward, length=self.length), self.abstract_params(), tokens, ends
        )
        axes = tuple(None if axis == "_" else axis for axis in CACHE_AXES.split())
        layout = self.plan.layouts().compute
        of_caches = jax.tree.map(
            lambda x: NamedSharding(self.mesh, place(layout, axes, x.shape, self.mesh, path="cache").spec), caches
        )
        whole: Any = NamedSharding(self.mesh, PartitionSpec())  # the state's own type, with shardings for arrays
        return _State(caches=of_caches, token=whole, position=whole, ended=whole), whole

    @property
    def _options(self) -> Any:
        return compiler_options(self.mesh.devices.flat[0].platform)

    def _dtype(self, path: str) -> Any:
        """What a parameter is used in: norms and biases as they are stored."""
        policy = self.plan.precision
        return policy.param_dtype if is_norm_or_bias(path) else policy.compute_dtype

    def _padded(self, prompts: Prompts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens int32 `[rows, seq]`, ends int32 and ended bool `[rows]`; rows without a prompt have ended."""
        tokens = np.zeros((self._rows, self.width(max(map(len, prompts)))), np.int32)
        ends = np.ones(self._rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            ends[row] = len(prompt)
        return tokens, ends, np.arange(self._rows) >= len(prompts)

    def _check(self, prompts: Prompts, new_tokens: int) -> None:
        if new_tokens < 0:
            raise ValueError(f"new_tokens={new_tokens} is negative; ask for 1 or more")
        check_prompts(self.model, prompts)
        if len(prompts) > self.rows:
            raise ValueError(f"{len(prompts)} prompts are more than rows={self.rows}; give fewer, or make more rows")
        length = max(map(len, prompts)) + new_tokens
        if length > self.length:
            raise ValueError(
                f"prompt and continuation are {length} tokens and the cache has length={self.length}; ask for at most "
                f"{max(0, self.length - length + new_tokens)} new ones, or make a longer cache"
            )


def sample(
    model: Model,
    plan: Plan,
    mesh: Mesh,
    params: PyTree,
    prompts: Prompts,
    *,
    new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    seed: int = 0,
) -> list[list[int]]:
    """Continues prompts, in one call. It compiles each time: to continue more than once, make a `Generator`.

    Args:
      params: the model's, in any layout.
      prompts: token ids, at least one each; they may differ in length.
      new_tokens: how many to add to each prompt.
      temperature, top_k, top_p, stop, seed: see `Sampling`.

    Returns:
      Prompt and continuation of each.

    Raises:
      ValueError: an empty prompt, prompt and continuation longer than the model allows, or a value out of range.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, stop=tuple(stop), seed=seed)
    check_prompts(model, prompts)
    length = max(map(len, prompts)) + new_tokens
    longest = getattr(model.config, "max_seq", length)
    if length > longest:
        raise ValueError(
            f"prompt and continuation are {length} tokens and the model's max_seq is {longest}; "
            f"ask for at most {max(0, longest - length + new_tokens)} new ones"
        )
    generator = Generator(model, plan, mesh, rows=len(prompts), length=max(2, length))
    return generator.generate(params, prompts, new_tokens=new_tokens, sampling=sampling)


def check_prompts(model: Model, prompts: Prompts) -> None:
    """Raises ValueError for no prompt, an empty one, or one with a token that the model does not have."""
    if not prompts:
        raise ValueError("there are no prompts; give one or more")
    vocab = model.config.vocab
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(
                f"prompt {number} is empty; start it with at least one token, such as the end-of-document token"
            )
        for token in prompt:
            if not 0 <= token < vocab:
                raise ValueError(
                    f"prompt {number} holds the token {token} and the model's vocab={vocab} ends at {vocab - 1}; use "
                    "the tokenizer that the model was made for"
                )


def _chosen(
    logits: jax.Array,
    caches: tuple[KVCache, ...],
    position: jax.Array,
    ended: jax.Array,
    before: jax.Array,
    choice: Choice,
) -> tuple[_State, jax.Array]:
    """The state with the token that follows, which will stand at `position`, and that token for the host: -1 in rows
    that had ended. Those keep their token and position, so that they write one place again and again.
    """
    token = jnp.where(ended, before, choose(logits, position, choice))
    state = _State(caches=caches, token=token, position=position, ended=ended | choice.stops[token])
    return state, jnp.where(ended, -1, token)
