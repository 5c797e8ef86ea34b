"""Generation continues prompts as the model itself would, under any plan that trains, and compiles once."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import meshpar.generate.generator as generating
from meshpar.generate.generator import Generator, sample
from meshpar.generate.sampling import Sampling
from meshpar.module import abstract
from meshpar.precision.policy import Policy
from tests.conformance.runs import LLAMA, model_of
from tests.generate.runs import CONFIGS, VOCAB, likeliest, params_of, plan_on

PROMPTS = [[5, 3, 7], [1], [80, 2, 2, 9, 11]]
NEW = 4
LIKELIEST = Sampling(temperature=0)


@functools.cache
def generator(mesh: str = "data=1", family: str = "llama", rows: int = 3) -> Generator:
    return Generator(model_of(CONFIGS[family]), *plan_on(mesh), rows=rows, length=24)


def generate(prompts: list[list[int]], new: int, sampling: Sampling, **which: Any) -> list[list[int]]:
    made = generator(**which)
    return made.generate(params_of(made.model.config), prompts, new_tokens=new, sampling=sampling)


@pytest.mark.parametrize("family", ["llama", "own"])
def test_the_most_likely_tokens_are_those_of_whole_rows(family: str) -> None:
    wanted = [likeliest(CONFIGS[family], prompt, NEW) for prompt in PROMPTS]
    assert generate(PROMPTS, NEW, LIKELIEST, family=family) == wanted


def test_a_seed_draws_the_same_tokens_on_any_mesh_and_beside_any_rows() -> None:
    sampling = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=7)
    alone = generate(PROMPTS, 16, sampling)
    assert alone == generate(PROMPTS, 16, sampling)
    assert alone == generate(PROMPTS, 16, sampling, mesh="data=2 tensor=2")
    assert alone[:2] == generate(PROMPTS[:2], 16, sampling)
    other = generate(PROMPTS, 16, Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=8))
    assert all(one != two for one, two in zip(alone, other, strict=True))


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    rows = generate([[1]] * 3, 20, Sampling(temperature=1000.0))
    assert max(map(max, rows)) < VOCAB
    assert len({tuple(row) for row in rows}) == 3


def test_a_row_ends_with_its_first_stop_token_and_leaves_the_others_alone() -> None:
    sampling = Sampling(temperature=1.5, seed=3)
    free = generate(PROMPTS, 12, sampling)
    new = [row[len(prompt) :] for row, prompt in zip(free, PROMPTS, strict=True)]
    stop = new[2][4]  # in the middle of the third row
    assert not {stop} & {*new[0], *new[1], *new[2][:4]}
    ended = generate(PROMPTS, 12, Sampling(temperature=1.5, seed=3, stop=(stop,)))
    assert ended[:2] == free[:2]
    assert ended[2] == free[2][: len(PROMPTS[2]) + 5]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_batch_ends_when_all_rows_have(monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
    monkeypatch.setattr(generating, "steps_in_flight", lambda devices: in_flight)
    new = [row[len(prompt) :] for row, prompt in zip(generate(PROMPTS, 6, LIKELIEST), PROMPTS, strict=True)]
    stop = tuple({row[2] for row in new})
    lengths = [next(at for at, token in enumerate(row) if token in stop) + 1 for row in new]
    made = generator()
    steps = list(made.stream(params_of(LLAMA), PROMPTS, new_tokens=18, sampling=Sampling(temperature=0, stop=stop)))
    assert len(steps) == max(lengths) <= 3
    for row, length in enumerate(lengths):
        assert [tokens[row] for tokens in steps] == new[row][:length] + [None] * (len(steps) - length)


def test_one_compile_for_prompts_and_one_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths, the number of tokens and the sampling; a longer bucket of prompts is one more."""
    traced = []
    choose = generating.choose
    monkeypatch.setattr(generating, "choose", lambda *arguments: traced.append(1) or choose(*arguments))
    made = Generator(model_of(LLAMA), *plan_on("data=2 tensor=2"), rows=2, length=40)
    params = made.ready(params_of(LLAMA))
    for number, sampling in enumerate(
        [LIKELIEST, Sampling(temperature=0.7, seed=9), Sampling(top_k=3, stop=(1, 2)), Sampling(top_p=0.4)]
    ):
        prompts = [[1] * (1 + 5 * number), [2, 3]][: 1 + number % 2]
        made.generate(params, prompts, new_tokens=2 + number, sampling=sampling)
    assert len(traced) == 2
    assert made._prefill._cache_size() == made._decode._cache_size() == 1  # compiled, also where no trace was needed
    made.generate(params, [[1] * 17], new_tokens=3)
    assert len(traced) == 3
    assert made._decode._cache_size() == 1


def test_parameters_are_cast_and_placed_once_and_used_as_they_are_then() -> None:
    made = Generator(model_of(LLAMA), *plan_on("fsdp=2 tensor=2", precision=Policy(compute="bf16")), rows=2, length=24)
    ready = made.ready(params_of(LLAMA))
    kernel = ready["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.dtype == "bfloat16"
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    assert ready["norm"]["scale"].dtype == "float32"
    assert made.ready(ready) is ready
    assert len(made.generate(ready, PROMPTS[:2], new_tokens=NEW)[0]) == len(PROMPTS[0]) + NEW


def test_own_model_of_the_page_generates_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "models" / "README.md").read_text()
    (tmp_path / "mine_that_generates.py").write_text(
        re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0]
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine_that_generates")
    config = mine.MineConfig(vocab=VOCAB, layers=2, embed=32, heads=4, max_seq=20)
    made = abstract(config.build, config)
    params = jax.tree.map(lambda w: 10 * w, jax.jit(made.init)(jax.random.key(0)))  # so that tokens depend on tokens
    found = sample(made, *plan_on("data=1"), params, PROMPTS, new_tokens=NEW, temperature=0)
    assert found == [likeliest(config, prompt, NEW, params) for prompt in PROMPTS]
    assert len({tuple(row[-NEW:]) for row in found}) > 1


@pytest.mark.parametrize(
    "prompts, new, sampling, sentence",
    [
        ([], 1, {}, "there are no prompts"),
        ([[1], []], 1, {}, "prompt 1 is empty"),
        ([[1] * 20], 5, {}, "25 tokens and the cache has length=24; ask for at most 4 new ones"),
        ([[1]] * 4, 1, {}, "4 prompts are more than rows=3"),
        ([[1, VOCAB]], 1, {}, "prompt 0 holds the token 90 and the model's vocab=90 ends at 89"),
        ([[-1]], 1, {}, "prompt 0 holds the token -1"),
        ([[1]], -1, {}, "new_tokens=-1 is negative"),
        ([[1]], 1, {"stop": (VOCAB,)}, "the stop token 90 is outside"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    prompts: list[list[int]], new: int, sampling: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        generator().stream({}, prompts, new_tokens=new, sampling=Sampling(**sampling))


def test_sample_refuses_what_the_model_is_too_short_for() -> None:
    with pytest.raises(ValueError, match="65 tokens and the model's max_seq is 64; ask for at most 4 new ones"):
        sample(model_of(LLAMA), *plan_on("data=1"), {}, [[1] * 60], new_tokens=5)


def test_no_new_tokens_are_the_prompts() -> None:
    assert sample(model_of(LLAMA), *plan_on("data=1"), params_of(LLAMA), PROMPTS, new_tokens=0) == PROMPTS


@pytest.mark.parametrize("rows, length", [(0, 8), (1, 1), (1, 65)])
def test_a_cache_that_does_not_fit_the_model_is_refused(rows: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"a cache of rows={rows} and length={length} does not fit"):
        Generator(model_of(LLAMA), *plan_on("data=1"), rows=rows, length=length)


def test_a_mesh_of_another_plan_is_refused() -> None:
    plan, _ = plan_on("data=2 tensor=2")
    with pytest.raises(ValueError, match="give the mesh that was built for it"):
        Generator(model_of(LLAMA), plan, plan_on("data=4")[1], rows=1, length=8)
