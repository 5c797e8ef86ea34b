"""The Python on meshpar/hf/README.md runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.hf.fixtures import FOLDER, loaded

PAGE = Path(__file__).parents[2] / "meshpar" / "hf" / "README.md"


def test_the_python_of_the_page_loads_saves_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER / "llama", tmp_path / "SmolLM2-135M")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    code = code.replace("mp.Plan()", "mp.Plan(mesh=mp.MeshSpec(data=8))")  # tests emulate 8 devices
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    for params in (names["loaded"].params, names["merged"]):
        assert (
            jax.tree.map(np.asarray, params)["norm"]["scale"].tobytes()
            == np.asarray(loaded("llama").params["norm"]["scale"]).tobytes()
        )


def test_files_and_names_of_the_page_exist() -> None:
    text = PAGE.read_text()
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (PAGE.parent / name).is_file(), name
    for path in re.findall(r"`(tests/[\w/]+\.py)", text):
        assert (PAGE.parents[2] / path).is_file(), path
