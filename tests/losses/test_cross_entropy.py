"""Cross-entropy against float64 numpy, over split vocabularies, and in pieces."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.losses.cross_entropy import chunked_cross_entropy, cross_entropy
from meshpar.testing.compare import assert_trees_close

QUICK = {"xla_backend_optimization_level": 0}  # LLVM's: compiles three times faster
BATCH, SEQ, VOCAB, PADDED, EMBED = 4, 6, 21, 24, 8
OPTIONS = {
    "plain": {"vocab": PADDED},
    "padding": {"vocab": VOCAB},
    "z-loss": {"vocab": VOCAB, "z_loss": 0.1},
    "smoothing": {"vocab": VOCAB, "label_smoothing": 0.2},
    "all": {"vocab": VOCAB, "z_loss": 0.1, "label_smoothing": 0.2},
}


def data(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.normal(size=(BATCH, SEQ, PADDED)), dtype)
    return (
        logits,
        jnp.asarray(rng.integers(0, VOCAB, (BATCH, SEQ)), jnp.int32),
        jnp.asarray(rng.normal(size=(BATCH, SEQ)), jnp.float32),
    )


def oracle(logits, targets, d_loss, *, vocab, z_loss=0.0, label_smoothing=0.0) -> dict[str, np.ndarray]:
    """Values and the gradient of the logits, in float64."""
    logits = np.asarray(logits, np.float64)
    true = logits[..., :vocab]
    lse = np.log(np.exp(true - true.max(-1, keepdims=True)).sum(-1)) + true.max(-1)
    target = np.full(true.shape, label_smoothing / vocab)
    target += (1 - label_smoothing) * (np.arange(vocab) == np.asarray(targets)[..., None])
    softmax = np.exp(true - lse[..., None])
    gradient = np.zeros(logits.shape)
    gradient[..., :vocab] = np.asarray(d_loss)[..., None] * (softmax * (1 + 2 * z_loss * lse)[..., None] - target)
    return {
        "loss": lse - (target * true).sum(-1) + z_loss * lse**2,
        "nll": lse - np.take_along_axis(true, np.asarray(targets)[..., None], -1)[..., 0],
        "z": z_loss * lse**2,
        "gradient": gradient,
    }


def values_and_gradient(logits, targets, d_loss, **options):
    (loss, parts), pull = jax.vjp(lambda logits: cross_entropy(logits, targets, **options), logits)
    return {"loss": loss, **parts, "gradient": pull((d_loss, jax.tree.map(jnp.zeros_like, parts)))[0]}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_the_formula(name):
    got = jax.jit(functools.partial(values_and_gradient, **OPTIONS[name]), compiler_options=QUICK)(*data())
    want = oracle(*data(), **OPTIONS[name])
    for part, expected in want.items():
        np.testing.assert_allclose(got[part], expected, rtol=2e-6, atol=4e-6, err_msg=part)


def test_bf16_logits_are_read_exactly_and_their_gradient_is_rounded_once():
    got = jax.jit(functools.partial(values_and_gradient, **OPTIONS["all"]), compiler_options=QUICK)(*data(jnp.bfloat16))
    want = oracle(*data(jnp.bfloat16), **OPTIONS["all"])
    assert got["loss"].dtype == jnp.float32
    assert got["gradient"].dtype == jnp.bfloat16
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=2e-6, atol=4e-6)
    np.testing.assert_allclose(np.asarray(got["gradient"], np.float64), want["gradient"], rtol=2**-8, atol=1e-6)


def test_the_parts_are_differentiable_too():
    logits, targets, weights = data()

    def ours(logits):
        loss, parts = cross_entropy(logits, targets, **OPTIONS["all"])
        return (weights * (loss + 2.0 * parts["nll"] - 3.0 * parts["z"])).sum()

    def plain(logits):
        logs = jax.nn.log_softmax(logits[..., :VOCAB])
        nll = -jnp.take_along_axis(logs, targets[..., None], -1)[..., 0]
        z = 0.1 * jax.nn.logsumexp(logits[..., :VOCAB], -1) ** 2
        return (weights * (0.8 * nll - 0.2 * logs.mean(-1) + 2.0 * nll - 2.0 * z)).sum()

    actual, expected = (jax.jit(jax.grad(f), compiler_options=QUICK)(logits) for f in (ours, plain))
    assert_trees_close(actual, expected, names=("ours", "plain"))


def test_large_logits_do_not_overflow():
    logits = jnp.asarray([[[1e4, -1e4, 0.0]]])
    got = jax.jit(functools.partial(values_and_gradient, vocab=3))(logits, jnp.asarray([[1]]), jnp.ones((1, 1)))
    assert float(got["loss"][0, 0]) == 2e4
    np.testing.assert_array_equal(got["gradient"], [[[1.0, -1.0, 0.0]]])


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_split_vocabulary_gives_the_same_and_never_gathers_logits(mesh_of, name):
    mesh = mesh_of("data=2 tensor=4")
    vocab, tokens = NamedSharding(mesh, P("data", None, "tensor")), NamedSharding(mesh, P("data"))
    run = functools.partial(values_and_gradient, **OPTIONS[name])
    outputs = {"loss": tokens, "nll": tokens, "z": tokens, "gradient": vocab}
    on_mesh = jax.jit(run, in_shardings=(vocab, tokens, tokens), out_shardings=outputs)
    program = on_mesh.lower(*data()).compile(compiler_options=QUICK)
    kinds = "all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce"
    moved = re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", program.as_text())
    assert moved
    for shape, kind in moved:
        assert kind == "all-reduce", (kind, shape)
        # one number a token: no dimension of the vocabulary
        for dims in re.findall(r"\[([\d,]*)\]", shape):
            assert np.prod([int(n) for n in dims.split(",") if n]) <= BATCH // 2 * SEQ, shape
    got = program(*jax.device_put(data(), (vocab, tokens, tokens)))
    assert_trees_close(got, jax.jit(run, compiler_options=QUICK)(*data()), names=("split", "whole"))


def head_data():
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 2, (BATCH, SEQ)) * rng.uniform(0.5, 2.0, (BATCH, SEQ))
    arrays = rng.normal(size=(EMBED, PADDED)), rng.normal(size=(BATCH, SEQ, EMBED)), weights
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def summed(chunk, head, x, weights, targets=None):
    """Sums, and the gradients of the loss, as jitted code makes them."""
    targets = data()[1] if targets is None else targets

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(head, x):
        def loss(head, x):
            loss, parts, tokens = chunked_cross_entropy(
                lambda x: x @ head, x, targets, weights, chunk=chunk, **OPTIONS["all"]
            )
            return loss, (parts, tokens)

        (loss, (parts, tokens)), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(head, x)
        return {"loss": loss, **parts, "tokens": tokens, "gradients": gradients}

    return run(head, x)


def test_sums_are_weighted_sums_over_tokens():
    head, x, weights = head_data()
    got = summed(None, head, x, weights)
    want = oracle(np.asarray(x, np.float64) @ np.asarray(head, np.float64), data()[1], weights, **OPTIONS["all"])
    for part in ("loss", "nll", "z"):
        np.testing.assert_allclose(got[part], (want[part] * np.asarray(weights)).sum(), rtol=1e-5)
    np.testing.assert_allclose(got["tokens"], np.asarray(weights).sum(), rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_pieces_of_any_size_give_the_same(chunk):
    head, x, weights = head_data()
    assert_trees_close(summed(chunk, head, x, weights), summed(None, head, x, weights), names=("pieces", "whole"))


def test_the_whole_logits_never_exist_in_pieces():
    head, x, weights = head_data()

    def text(chunk):
        def loss(head, x):
            return chunked_cross_entropy(lambda x: x @ head, x, data()[1], weights, chunk=chunk, vocab=VOCAB)[0]

        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(head, x))

    whole = f"{BATCH},{SEQ},{PADDED}]"
    assert whole in text(None)
    assert whole not in text(2)
    assert f"[3,{BATCH},2,{PADDED}]" not in text(2)  # nor stacked for the backward


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_token_of_weight_0_adds_exactly_0_whatever_its_target_and_logits(chunk):
    head, x, weights = head_data()
    weights = weights.at[:, 1].set(0.0)
    clean = summed(chunk, head, x, weights)
    garbage = data()[1].at[:, 1].set(-100)
    assert_trees_close(summed(chunk, head, x, weights, garbage), clean)
    broken = summed(chunk, head, x.at[:, 1].set(jnp.inf), weights)
    for name in ("loss", "nll", "z"):
        assert float(broken[name]) == float(clean[name]) != 0.0, name
    np.testing.assert_array_equal(clean["gradients"][1][:, 1], 0.0)


@pytest.mark.parametrize(
    "options, fix",
    [
        ({"vocab": 25}, "vocab=25 must be between 1 and the 24 logits"),
        ({"vocab": 21, "label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below 1"),
        ({"vocab": 21, "z_loss": -1.0}, "z_loss=-1.0 must not be negative"),
    ],
)
def test_bad_options_are_refused_with_the_fix(options, fix):
    with pytest.raises(ValueError, match=fix):
        cross_entropy(*data()[:2], **options)


def test_bad_pieces_are_refused_with_the_fix():
    head, x, weights = head_data()
    with pytest.raises(ValueError, match="use None for one piece"):
        chunked_cross_entropy(lambda x: x @ head, x, data()[1], weights, chunk=0, vocab=VOCAB)
    with pytest.raises(ValueError, match="must share"):
        chunked_cross_entropy(lambda x: x @ head, x[:, 1:], data()[1], weights, chunk=None, vocab=VOCAB)
