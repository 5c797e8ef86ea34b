"""`attend` picks a backend by placement and platform, and the kernels of other platforms at least lower for them."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.attention.attend import _choose, _match_heads, _say_once, attend
from meshpar.attention.cudnn import cudnn_refusal
from meshpar.attention.reference import attention_reference
from meshpar.attention.splash import attention_splash, splash_refusal
from meshpar.layout.context import Placement, placed
from meshpar.layout.rules import Layout, Rule
from meshpar.testing.compare import assert_trees_close

RULES = (
    Rule(logical="batch", mesh_axes=("data", "fsdp"), source="test"),
    Rule(logical="heads", mesh_axes=("tensor",), source="test"),
    Rule(logical="kv_heads", mesh_axes=("tensor",), source="test", replicate_if_fewer=True),
)


@pytest.fixture
def placement_of(mesh_of):
    return lambda attention="auto", mesh="data=2 tensor=4": Placement(
        mesh=mesh_of(mesh), layout=Layout(rules=RULES), attention=attention
    )


def arrays(heads, kv_heads, *, batch=2, seq=24, head_dim=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(batch, seq, n, head_dim)), dtype) for n in (heads, kv_heads, kv_heads))


def run(attention, *arrays):
    """The output and the gradients of its square."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def values(*arrays):
        out, pull = jax.vjp(attention, *arrays)
        return {"out": out, **dict(zip("qkv", pull(out), strict=True))}

    return values(*arrays)


@pytest.mark.parametrize("backend, kv_heads", [("auto", 8), ("reference", 4), ("xla", 2), ("auto", 1)])
def test_attend_on_a_mesh_is_the_reference(placement_of, backend, kv_heads):
    q, k, v = arrays(8, kv_heads)

    def on_mesh(q, k, v):
        with placed(placement_of(backend)):
            return attend(q, k, v, window=9)

    assert_trees_close(run(on_mesh, q, k, v), run(functools.partial(attention_reference, window=9), q, k, v))


def test_kv_heads_are_repeated_only_where_the_layout_splits_them_otherwise(placement_of):
    for kv_heads, expected in ((8, 8), (4, 4), (2, 8), (1, 8)):
        assert _match_heads(*arrays(8, kv_heads), placement_of())[0].shape[2] == expected
    assert _match_heads(*arrays(8, 2), placement_of(mesh="data=8"))[0].shape[2] == 2


def test_dropout_takes_the_reference(placement_of):
    q, k, v = arrays(2, 2)
    key = jax.random.key(3)
    expected = attention_reference(q, k, v, dropout=0.3, key=key)
    np.testing.assert_array_equal(attend(q, k, v, dropout=0.3, key=key), expected)
    with pytest.raises(ValueError, match="pass key="):
        attend(q, k, v, dropout=0.3)


def test_a_backend_that_the_platform_lacks_is_refused_with_the_fix(placement_of):
    for backend, platform in (("cudnn", "gpu"), ("splash", "tpu")):
        message = f'runs on {platform} and these devices are cpu; use attention="auto"'
        with placed(placement_of(backend)), pytest.raises(ValueError, match=message):
            attend(*arrays(8, 4))


def test_an_unknown_backend_is_refused_with_a_suggestion(placement_of):
    with placed(placement_of("splas")), pytest.raises(ValueError, match="did you mean 'splash'"):
        attend(*arrays(8, 4))


def test_what_a_kernel_cannot_do_goes_to_xla_and_is_said_once(placement_of, monkeypatch, caplog):
    _say_once.cache_clear()
    monkeypatch.setattr("meshpar.attention.attend._platform", lambda placement: "gpu")
    q, k, v = arrays(8, 4)
    with placed(placement_of("cudnn")), caplog.at_level(logging.WARNING, "meshpar.attention"):
        for _ in range(2):
            assert_trees_close(attend(q, k, v), attention_reference(q, k, v))
    assert len(caplog.records) == 1
    assert "float32" in caplog.text and '"xla" is used' in caplog.text


def test_a_program_for_gpus_elsewhere_takes_xla_where_cudnn_is_missing(placement_of, monkeypatch):
    _say_once.cache_clear()
    monkeypatch.setattr("meshpar.attention.attend._platform", lambda placement: "gpu")
    q, k = arrays(8, 4, seq=64, head_dim=64, dtype=jnp.bfloat16)[:2]
    for here, backend in ((True, "cudnn"), (False, "xla")):
        monkeypatch.setattr("meshpar.attention.attend.has_cudnn", lambda here=here: here)
        assert _choose(q, k, None, None, placement_of("auto")) == backend
        assert _choose(q, k, None, None, placement_of("cudnn")) == "cudnn"  # asked for by name, it is not replaced


def test_the_kernels_know_their_limits():
    half = functools.partial(arrays, 4, 2, dtype=jnp.bfloat16)
    q, k, _ = half(seq=256, head_dim=64)
    assert cudnn_refusal(q, segments=None, softcap=None) is None
    assert splash_refusal(q, k) is None
    assert "segments" in cudnn_refusal(q, segments=jnp.ones((2, 256), jnp.int32), softcap=None)
    assert "softcap" in cudnn_refusal(q, segments=None, softcap=1.0)
    assert "head_dim" in cudnn_refusal(half(head_dim=12)[0], segments=None, softcap=None)
    assert "multiple of 128" in splash_refusal(*half(seq=200)[:2])


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_switched_window_on_a_mesh_is_the_reference(placement_of, backend):
    q, k, v = arrays(8, 2)

    def on_mesh(windowed, q, k, v):
        with placed(placement_of(backend)):
            return attend(q, k, v, window=5, windowed=windowed)

    for windowed, window in ((True, 5), (False, None)):
        switched = functools.partial(on_mesh, jnp.asarray(windowed))
        assert_trees_close(run(switched, q, k, v), run(functools.partial(attention_reference, window=window), q, k, v))


def test_splash_with_a_switched_window_is_two_kernels(placement_of, monkeypatch):
    monkeypatch.setattr("meshpar.attention.attend._platform", lambda placement: "tpu")
    q, k, v = arrays(8, 8, seq=256, head_dim=64, dtype=jnp.bfloat16)

    def loss(q, k, v, windowed):
        with placed(placement_of("splash", "data=1")):
            return attend(q, k, v, window=100, windowed=windowed).astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = grad.trace(q, k, v, jnp.asarray(True)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 6  # for each the forward and the gradients of q and of k, v


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"causal": False}, {"softcap": 20.0, "with_segments": True}])
def test_splash_lowers_for_tpu_on_a_mesh(placement_of, options):
    options = dict(options)
    q, k, v = arrays(8, 4, seq=256, head_dim=64, dtype=jnp.bfloat16)
    if options.pop("with_segments", False):
        options["segments"] = jnp.ones((2, 256), jnp.int32)

    def loss(q, k, v):
        with placed(placement_of()):
            return attention_splash(q, k, v, **options).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 3  # the forward and the gradients of q and of k, v
    # each device has 1 row and 2 of the 8 heads
    assert "tensor<1x2x256x64xbf16>" in text


def test_splash_in_the_interpreter_is_the_reference(monkeypatch):
    from jax.experimental.pallas.ops.tpu import splash_attention

    interpreted = functools.partial(splash_attention.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha", interpreted)
    q, k, v = arrays(4, 2, batch=1, seq=128, head_dim=128)
    options = {"segments": jnp.asarray([[1] * 50 + [2] * 60 + [0] * 18], jnp.int32), "window": 30}
    actual = run(functools.partial(attention_splash, **options), q, k, v)
    expected = run(functools.partial(attention_reference, **options), q, k, v)
    assert_trees_close(actual, expected, names=("splash", "reference"))
