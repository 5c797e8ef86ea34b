"""The machinery of overrides and JSON, on a small tree that has one field of every kind."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.recipes import llama_tiny_stdlib
from meshpar.mesh.spec import MeshSpec
from meshpar.train.recipe import apply_overrides, describe_keys, load_recipe
from meshpar.train.values import from_json, from_text, show, to_json


@dataclass(frozen=True, kw_only=True)
class Policy:
    compute: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, kw_only=True)
class Plan:
    mesh: MeshSpec = MeshSpec()
    zero: int | None = None
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Splits norms over tensor. Needs a tensor axis.
    sequence_parallel: bool = False
    save: tuple[str, ...] = ("qkv",)
    precision: Policy = Policy()

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.mesh.tensor == 1:
            raise ValueError("sequence_parallel=True needs a tensor axis")


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: int
    alpha: float = 16.0


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = 100  # optimizer steps
    rate: float = 1e-3
    name: str = ""
    stage: Literal[0, 1] | Literal["auto"] = "auto"
    betas: tuple[float, float] = (0.9, 0.95)
    out: Path = Path("runs")
    loss: Callable[[float], float] = abs
    lora: Lora | None = None


@dataclass(frozen=True, kw_only=True)
class Tiny:
    layers: int = 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    model: Any = Tiny()
    train: Train = Train()
    plan: Plan = Plan()


def recipe_tiny() -> Any:
    return llama_tiny_stdlib()


def recipe_sized(layers: int, *rest: int, heads: int = 2, **more: int) -> Any:
    return llama_tiny_stdlib()


def recipe_of_tests() -> Recipe:
    return Recipe()


def _private() -> Any:
    return llama_tiny_stdlib()


def after(override: str) -> Any:
    """What the key of an override holds once it is applied."""
    result: Any = apply_overrides(Recipe(), [override])
    for name in override.partition("=")[0].strip().split("."):
        result = getattr(result, name)
    return result


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=200", 200),
        ("train.steps=1_000", 1000),
        ("train.steps=1e3", 1000),
        ("train.steps=2.5e3", 2500),
        ("train.steps=-1", -1),
        ("train.rate=3e-4", 3e-4),
        ("train.rate=1", 1.0),
        ("train.name=a=b c", "a=b c"),
        ("train.name=", ""),
        ("train.stage=1", 1),
        ("train.stage=auto", "auto"),
        ("train.betas=0.8, 0.9", (0.8, 0.9)),
        ("train.out=/x/y", Path("/x/y")),
        ("train.loss=math:sqrt", __import__("math").sqrt),
        ("train.lora.rank=8", 8),
        ("model.layers=4", 4),
        ("plan.mesh=data=2 tensor=4", MeshSpec(data=2, tensor=4)),
        ("plan.mesh.tensor=4", 4),
        ("plan.zero=2", 2),
        ("plan.zero=none", None),
        ("plan.rules=vocab:tensor fsdp,embed:", {"vocab": ("tensor", "fsdp"), "embed": ()}),
        ("plan.sequence_parallel=False", False),
        ("plan.save=", ()),
        ("plan.save=qkv mlp", ("qkv", "mlp")),
        ("plan.save=qkv,mlp", ("qkv", "mlp")),
        (" plan.precision.compute = bf16 ", "bf16"),
    ],
)
def test_a_value_is_read_by_the_type_of_its_field(override: str, expected: Any) -> None:
    got = after(override)
    assert got == expected
    assert type(got) is type(expected)


def test_keys_of_the_plan_may_leave_its_name_out() -> None:
    short = apply_overrides(Recipe(), ["mesh=data=2 tensor=4", "zero=2", "precision.compute=bf16", "mesh.data=4"])
    full = apply_overrides(Recipe(), ["plan.mesh=data=4 tensor=4", "plan.zero=2", "plan.precision.compute=bf16"])
    assert short == full
    assert short.plan == Plan(mesh=MeshSpec(data=4, tensor=4), zero=2, precision=Policy(compute="bf16"))


def test_a_later_override_wins_and_the_recipe_stays_as_it_was() -> None:
    base = Recipe()
    changed = apply_overrides(base, ["mesh.tensor=4", "mesh=data=2", "train.steps=1", "train.steps=2"])
    assert (changed.plan.mesh, changed.train.steps) == (MeshSpec(data=2), 2)
    assert base == Recipe()
    assert apply_overrides(base, []) == base


@pytest.mark.parametrize("order", [1, -1])
def test_checks_see_the_final_values_in_either_order(order: int) -> None:
    changed = apply_overrides(Recipe(), ["sequence_parallel=true", "mesh=tensor=2"][::order])
    assert changed.plan.sequence_parallel
    with pytest.raises(ValueError, match="needs a tensor axis"):
        apply_overrides(Recipe(), ["sequence_parallel=true"])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.step=1", "unknown key 'train.step'; did you mean 'train.steps'? train has steps, rate, "),
        ("steps=1", "unknown key 'steps'; did you mean 'train.steps'? the recipe has model, train, plan"),
        ("rate=1", "unknown key 'rate'; did you mean 'train.rate'?"),
        ("mash=data=2", "unknown key 'mash'; did you mean 'mesh'? the recipe has"),
        ("zerro=1", "unknown key 'zerro'; did you mean 'zero'?"),
        ("precision.comptue=bf16", "did you mean 'precision.compute'? precision has compute"),
        ("mesh.tensr=2", "did you mean 'mesh.tensor'? mesh has stage, data, "),
        ("qqqq=1", "unknown key 'qqqq'; the recipe has model, train, plan"),
        (
            "train.steps.more=1",
            "unknown key 'train.steps.more': train.steps is 100 and has no parts; set train.steps itself",
        ),
        ("train.steps", "override 'train.steps' is not key=value; write for example train.steps=200"),
        ("=3", "override '=3' is not key=value"),
        ("train.steps=abc", "train.steps=abc should be an integer; write for example train.steps=100"),
        ("train.steps=1.5", "train.steps=1.5 should be an integer; write"),
        ("train.steps=1.5e0", "train.steps=1.5e0 should be an integer; write"),
        ("train.steps=none", "train.steps=none should be an integer; write"),
        ("train.rate=fast", "train.rate=fast should be a number; write for example train.rate=0.001"),
        ("train.rate=nan", "train.rate=nan should be a number"),
        ("zero=abc", "zero=abc should be an integer or none; write for example zero=8"),
        ("sequence_parallel=1", "should be true or false; write for example sequence_parallel=false"),
        (
            "precision.compute=bf61",
            "should be fp32 or bf16; did you mean 'bf16'? write for example precision.compute=fp32",
        ),
        ("train.betas=0.9", "train.betas=0.9 should be a list of 2; write for example train.betas=0.9,0.95"),
        (
            "rules=mlp:data,mlp:fsdp",
            "mlp is named twice in 'mlp:data,mlp:fsdp'; give all its values once, as in mlp:a b",
        ),
        ("rules=embed", "rules=embed should be a list of name:value; write for example rules=a:b,c:d"),
        ("train=5", "train=5 cannot set a Train as a whole; set its parts, such as train.steps=..."),
        ("model=5", "model=5 cannot set a Tiny as a whole; set its parts, such as model.layers=..."),
        ("train.lora.alpha=2", "train.lora is none in this recipe, and its rank has no default; set train.lora.rank"),
        ("train.loss=math:sqr", "math has no 'sqr'; did you mean 'sqrt'?"),
        ("train.loss=nowhere:f", "no module 'nowhere' here"),
        ("mesh=tensr=2", "unknown mesh axis 'tensr'; did you mean 'tensor'?"),
    ],
)
def test_a_wrong_override_is_one_sentence_with_the_fix(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        apply_overrides(Recipe(), [override])
    assert "\n" not in str(caught.value)


VALUES = [
    (int, st.integers()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (int | None, st.none() | st.integers()),
    (tuple[int, ...], st.lists(st.integers()).map(tuple)),
    (tuple[int, float], st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False))),
    (Literal["a", 3], st.sampled_from(["a", 3])),
    (
        Mapping[str, tuple[str, ...]],
        st.dictionaries(st.from_regex("[a-z_]+", fullmatch=True), st.lists(st.sampled_from(["x", "y"])).map(tuple)),
    ),
]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_what_show_writes_from_text_reads(kind: Any, values: st.SearchStrategy) -> None:
    @given(values)
    def check(value: Any) -> None:
        assert from_text(show(value), kind, "key") == value

    check()


FULL = Recipe(
    model=Tiny(layers=3),
    train=Train(out=Path("a/b"), betas=(0.5, 1.0), lora=Lora(rank=4), stage=1, name="none", loss=len),
    plan=Plan(mesh=MeshSpec(data=2, tensor=-1), zero=3, rules={"embed": (), "mlp": ("tensor",)}, save=()),
)


@pytest.mark.parametrize("recipe", [Recipe(), FULL])
def test_json_gives_the_same_recipe_back(recipe: Recipe) -> None:
    text = json.dumps(to_json(recipe))
    assert from_json(Recipe, json.loads(text)) == recipe


def test_json_of_another_program_may_write_a_number_without_its_point() -> None:
    rate = from_json(Recipe, {"train": {"rate": 1}}).train.rate
    assert (rate, type(rate)) == (1.0, float)


def test_json_is_plain_and_names_the_class_only_where_the_type_does_not() -> None:
    written = to_json(FULL)
    assert written["model"] == {"class": f"{__name__}:Tiny", "layers": 3}
    assert written["plan"]["mesh"] == "data=2 tensor=-1"
    assert written["plan"]["rules"] == {"embed": [], "mlp": ["tensor"]}
    assert written["train"]["loss"] == "builtins:len"
    assert written["train"]["lora"] == {"rank": 4, "alpha": 16.0}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"trian": {}}, "unknown key 'trian'; did you mean 'train'?"),
        ({"train": {"step": 1}}, "unknown key 'train.step'; did you mean 'train.steps'?"),
        ({"train": {"lora": {"alpha": 1.0}}}, "train.lora.rank is missing"),
        ({"train": {"steps": True}}, "train.steps=True should be an integer"),
        ({"train": {"steps": [1]}}, "train.steps=[1] should be an integer"),
        ({"train": {"steps": {"a": 1}}}, "train.steps={'a': 1} should be an integer"),
        ({"train": {"betas": [0.1]}}, "train.betas=[0.1] should be a list of 2"),
        ({"train": {"steps": None}}, "train.steps=None should be an integer"),
        ({"plan": {"precision": {"compute": "fp64"}}}, "plan.precision.compute=fp64 should be fp32 or bf16"),
    ],
)
def test_json_that_does_not_fit_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        from_json(Recipe, change)


@pytest.mark.parametrize("bad", [Train(loss=lambda x: x), Recipe(model=1j)])
def test_what_has_no_json_form_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot be named|no JSON form"):
        to_json(bad)


def test_recipes_are_found_by_name_or_by_module() -> None:
    assert load_recipe("recipe_tiny", default_module=__name__) == llama_tiny_stdlib()
    assert load_recipe(f"{__name__}:recipe_tiny") == llama_tiny_stdlib()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("recipe_tyni", "unknown recipe 'recipe_tyni'; did you mean 'recipe_tiny'?"),
        ("_private", "unknown recipe '_private'"),
        ("dataclass", "unknown recipe 'dataclass'"),
        ("recipe_sized", "recipe 'recipe_sized' needs layers; name a function that is called without arguments"),
        ("type_that_is_not_here", "unknown recipe 'type_that_is_not_here'"),
        (
            "recipe_of_tests",
            "recipe 'recipe_of_tests' returned a Recipe, not a meshpar.Recipe; name a function that does",
        ),
        ("nowhere.at_all:f", "no module 'nowhere.at_all' here; run from the root of a clone"),
    ],
)
def test_a_recipe_that_is_not_there_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_recipe(name, default_module=__name__)


def test_an_import_that_fails_inside_a_recipe_module_is_not_hidden(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken_recipes.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_recipe("broken_recipes:f")


def test_described_keys_carry_type_value_and_comment_and_can_be_set_as_they_are_shown() -> None:
    keys = {entry.key: entry for entry in describe_keys(FULL)}
    assert dataclasses.astuple(keys["train.steps"]) == ("train.steps", "an integer", "100", "optimizer steps")
    assert keys["mesh"].value == "data=2 tensor=-1"
    assert keys["sequence_parallel"].comment == "Splits norms over tensor."
    assert keys["precision.compute"].type == "fp32 or bf16"
    assert {"model.layers", "train.lora.rank", "zero"} <= keys.keys()
    assert not [key for key in keys if key.startswith("plan.")]
    again = apply_overrides(FULL, [f"{entry.key}={entry.value}" for entry in keys.values()])
    assert again == FULL
