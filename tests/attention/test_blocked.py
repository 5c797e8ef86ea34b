"""attention_blocked and attention_reference are one function: values and gradients, whatever the mask and blocks."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.attention import blocked
from meshpar.attention.blocked import attention_blocked
from meshpar.attention.reference import attention_reference
from meshpar.testing.compare import assert_trees_close

QUICK = {"xla_backend_optimization_level": 0}  # LLVM's: compiles three times faster


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 queries, and 2 of them written out, so that short sequences take every path."""
    monkeypatch.setattr(blocked, "BLOCK", 16)
    monkeypatch.setattr(blocked, "GROUPS", 2)


def arrays(seq, heads, kv_heads, *, batch=2, head_dim=8, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    return tuple(jnp.asarray(rng.normal(size=(batch, seq, n, head_dim)), dtype) for n in counts)


def packed(seq, *, batch=2, seed=0):
    """Documents of random lengths and padding at the end; the last row is padding only."""
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(1, 4, (batch, seq)), axis=1)
    segments[0, seq - seq // 4 :] = 0
    segments[-1] = 0
    return jnp.asarray(segments, jnp.int32)


def values_and_gradients(attention, q, k, v, d_out, **options):
    """The output and the gradients of q, k and v for the cotangent d_out."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, k, v):
        out, pull = jax.vjp(functools.partial(attention, **options), q, k, v)
        return {"out": out, **dict(zip("qkv", pull(d_out), strict=True))}

    return run(q, k, v)


CASES = {
    "causal": (32, 4, 2, {}),
    "odd length": (37, 4, 2, {}),
    "shorter than a block": (5, 2, 2, {}),
    "bidirectional": (33, 2, 2, {"causal": False}),
    "MQA, softcap, scale": (32, 4, 1, {"softcap": 1.5, "scale": 0.7}),
    "window inside a block": (40, 2, 1, {"window": 3}),
    "window over blocks": (45, 4, 4, {"window": 20}),
    "segments, padding": (37, 4, 2, {"segments": packed(37)}),
    "segments, window, softcap": (40, 4, 2, {"segments": packed(40), "window": 9, "softcap": 3.0}),
    "long enough to scan": (85, 2, 1, {"window": 30, "segments": packed(85)}),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", CASES)
def test_blocked_matches_the_reference_in_fp32(case):
    seq, heads, kv_heads, options = CASES[case]
    q, k, v, d_out = arrays(seq, heads, kv_heads)
    actual = values_and_gradients(attention_blocked, q, k, v, d_out, **options)
    assert_trees_close(
        actual, values_and_gradients(attention_reference, q, k, v, d_out, **options), names=("blocked", "reference")
    )


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=5)
@given(
    seq=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    window=st.none() | st.integers(1, 40),
    with_segments=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocked_matches_the_reference_for_any_lengths_and_masks(seq, kv_heads, group, window, with_segments, seed):
    q, k, v, d_out = arrays(seq, kv_heads * group, kv_heads, seed=seed)
    options = {"window": window, "segments": packed(seq, seed=seed) if with_segments else None}
    actual = values_and_gradients(attention_blocked, q, k, v, d_out, **options)
    assert_trees_close(
        actual, values_and_gradients(attention_reference, q, k, v, d_out, **options), names=("blocked", "reference")
    )


@pytest.mark.usefixtures("small_blocks")
def test_cross_attention_of_other_lengths_matches_the_reference():
    q, _, _, d_out = arrays(19, 4, 2)
    for kv_seq, causal in ((30, False), (11, True)):
        _, k, v, _ = arrays(kv_seq, 4, 2, seed=1)
        actual = values_and_gradients(attention_blocked, q, k, v, d_out, causal=causal)
        assert_trees_close(actual, values_and_gradients(attention_reference, q, k, v, d_out, causal=causal))


@pytest.mark.parametrize("attention", [attention_reference, attention_blocked])
def test_rows_that_see_nothing_are_zero_and_pass_zero_gradients(attention):
    segments = packed(37)
    got = values_and_gradients(attention, *arrays(37, 4, 2), segments=segments)
    padding = np.asarray(segments) == 0
    assert padding.any() and not padding.all()
    for name, x in got.items():
        assert np.isfinite(x).all(), name
        assert (np.asarray(x)[padding] == 0).all(), name
        assert (np.asarray(x)[~padding] != 0).any(), name


def test_blocked_in_bf16_is_the_fp32_result_to_bf16_rounding():
    q, k, v, d_out = arrays(300, 4, 2, dtype=jnp.bfloat16)
    exact = values_and_gradients(attention_reference, *(x.astype(jnp.float32) for x in (q, k, v, d_out)))
    for name, x in values_and_gradients(attention_blocked, q, k, v, d_out).items():
        assert x.dtype == jnp.bfloat16, name
        # probabilities, their gradients and the result are each rounded once to 8 bits: 3 * 2**-9 of the largest entry
        largest = float(jnp.abs(exact[name]).max())
        np.testing.assert_allclose(
            np.asarray(x, np.float32), exact[name], rtol=0, atol=3 * 2**-9 * largest, err_msg=name
        )


@pytest.mark.usefixtures("small_blocks")
def test_gradients_are_the_slopes_of_the_values():
    *point, d_out = arrays(19, 2, 1, batch=1, head_dim=4)
    *direction, _ = arrays(19, 2, 1, batch=1, head_dim=4, seed=1)
    segments = jnp.asarray([[1] * 7 + [2] * 9 + [0] * 3], jnp.int32)

    def value(q, k, v):
        return (attention_blocked(q, k, v, segments=segments, window=6, softcap=2.0) * d_out).sum()

    at = jax.jit(value, compiler_options=QUICK)
    step = 1e-2
    ahead, behind = (at(*(x + sign * step * u for x, u in zip(point, direction, strict=True))) for sign in (1, -1))
    gradients = jax.jit(jax.grad(value, argnums=(0, 1, 2)), compiler_options=QUICK)(*point)
    slope = sum(float((g * u).sum()) for g, u in zip(gradients, direction, strict=True))
    # central differences are exact to step**2 times the third derivative
    assert abs(float(ahead - behind) / (2 * step) - slope) < 1e-2 * abs(slope)


@pytest.mark.usefixtures("small_blocks")
def test_blocked_works_in_a_checkpointed_scan():
    q, k, v, d_out = arrays(20, 2, 2)

    def stacked(attention):
        def loss(q, k, v):
            @jax.checkpoint
            def body(x, scale):
                return x + scale * attention(x, k, v), None

            return (jax.lax.scan(body, q, jnp.array([0.5, 2.0, 1.0]))[0] * d_out).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)(q, k, v)

    assert_trees_close(stacked(attention_blocked), stacked(attention_reference))


def test_selective_rematerialisation_keeps_output_and_log_sum_exp_so_the_forward_is_not_run_twice():
    q, k, v, _ = arrays(16, 2, 2)

    def exponentials(policy) -> int:
        attention = jax.checkpoint(attention_blocked, policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda q: attention(q, k, v).sum()))(q)).count(" exp ")

    policies = jax.checkpoint_policies
    assert exponentials(policies.save_only_these_names("attention")) == 2
    assert exponentials(policies.nothing_saveable) == 3


def test_keys_outside_the_causal_and_window_bounds_are_never_read(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 8)
    q, k, v, _ = arrays(64, 1, 1, batch=1)

    def keys_read(**options) -> list[int]:
        text = str(jax.make_jaxpr(functools.partial(attention_blocked, **options))(q, k, v))
        return [int(width) for width in re.findall(r"f32\[1,1,1,8,(\d+)\] = exp ", text)]

    assert keys_read(causal=False) == [64] * 8
    assert keys_read() == list(range(8, 65, 8))
    assert keys_read(window=9) == [8] + [16] * 7


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("attention", [attention_blocked, attention_reference])
def test_a_window_that_is_switched_by_data_is_that_window_or_none(attention):
    q, k, v, d_out = arrays(70, 4, 2)
    options = {"segments": packed(70), "softcap": 3.0}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, k, v, windowed):
        out, pull = jax.vjp(functools.partial(attention, window=9, windowed=windowed, **options), q, k, v)
        return {"out": out, **dict(zip("qkv", pull(d_out), strict=True))}

    for windowed, window in ((True, 9), (False, None)):
        expected = values_and_gradients(attention_reference, q, k, v, d_out, window=window, **options)
        assert_trees_close(run(q, k, v, jnp.asarray(windowed)), expected)


def test_a_switched_window_keeps_one_set_of_residuals():
    q, k, v, _ = arrays(64, 1, 1, batch=1)

    def kept(**options):
        _, pull = jax.vjp(functools.partial(attention_blocked, **options), q, k, v)
        return sum(x.nbytes for x in jax.tree.leaves(pull) if hasattr(x, "nbytes"))

    assert kept(window=9, windowed=jnp.asarray(True)) <= kept(window=9) + 16


def test_splitting_batch_and_heads_needs_no_communication(mesh_of):
    mesh = mesh_of("data=2 tensor=4")
    q, k, v, d_out = arrays(160, 8, 4)
    segments = packed(160)
    split = NamedSharding(mesh, P("data", None, "tensor"))
    rows = NamedSharding(mesh, P("data"))

    def run(q, k, v, d_out, segments):
        out, pull = jax.vjp(functools.partial(attention_blocked, segments=segments), q, k, v)
        return {"out": out, **dict(zip("qkv", pull(d_out), strict=True))}

    expected = jax.jit(run, compiler_options=QUICK)(q, k, v, d_out, segments)
    on_mesh = jax.jit(run, in_shardings=(split, split, split, split, rows), out_shardings=split)
    program = on_mesh.lower(q, k, v, d_out, segments).compile(compiler_options=QUICK)
    text = program.as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f"{collective}(" not in text and f"{collective}-start(" not in text, collective
    arguments = [jax.device_put(x, split) for x in (q, k, v, d_out)]
    assert_trees_close(program(*arguments, jax.device_put(segments, rows)), expected, names=("split", "whole"))
