"""Machines that are not here: their names, and what is said when a plug-in is missing; what it compiles, where it is
there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import Any

import jax
import pytest

from meshpar.mesh import aot
from meshpar.mesh.aot import topology


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("v5:4x4", "unknown machine 'v5'; did you mean 'v5e'? there are, for example, v4:2x2x2, v5e:4x4"),
        ("h10", "unknown machine 'h10'; did you mean 'h100'? there are"),
        ("abacus:8", "unknown machine 'abacus'; there are"),
        ("v5e", "topology 'v5e' is not machine:shape, with *slices behind it for several"),
        ("h100:all", "topology 'h100:all' is not machine:shape"),
        ("v5e:4x4*0", "topology 'v5e:4x4*0' has no slices"),
        ("v5p:4x4", "v5p:4x4 is no torus of 3 sides; name the chips along each, for example v5p:2x2x4"),
        ("v5e:0x4", "v5e:0x4 is no torus of 2 sides"),
        ("h100:2x4", "h100:2x4 is no node; give the number of its GPUs, and that of nodes as h100:8*1"),
        ("h100:0", "h100:0 is no node"),
    ],
)
def test_a_wrong_name_is_one_sentence_with_a_right_one(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        topology(name)
    assert "\n" not in str(refused.value)


def test_a_missing_plug_in_is_named_with_the_version_for_this_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    pin = next(r for r in importlib.metadata.requires("jax") or [] if r.startswith("libtpu")).partition(";")[0].strip()
    with pytest.raises(ValueError, match=re.escape(f'for jax {jax.__version__}: pip install "{pin}", or from a clone')):
        topology("v5e:4x4")
    version = re.escape(jax.__version__)
    with pytest.raises(ValueError, match=f'"jax-cuda1.-plugin=={version}" "jax-cuda1.-pjrt=={version}"'):
        topology("h100:8")


@pytest.mark.parametrize(
    ("name", "platform", "arguments"),
    [
        ("v5e:4x4", "tpu", {"name": "v5e:4x4"}),
        ("V5P:2x2x4*2", "tpu", {"name": "v5p:2x2x4", "num_slices": 2}),
        ("h100:8", "cuda", {"topology": "1x1x8"}),
        ("h200:8*4", "cuda", {"topology": "4x1x8"}),
    ],
)
def test_a_name_becomes_what_the_plug_in_asks_for(
    name: str, platform: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the variables that keep it quiet are set before it is loaded, without replacing the user's."""
    seen: dict[str, Any] = {}

    def devices(platform: str, name: str, **options: Any) -> list[Any]:
        seen.update(platform=platform, name=name, mds=aot.os.environ.get("TPU_SKIP_MDS_QUERY"), **options)
        return []

    monkeypatch.setattr(aot, "_devices", devices)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    for variable in (
        "TPU_SKIP_MDS_QUERY",
        "TPU_ACCELERATOR_TYPE",
        "ALLOW_MULTIPLE_LIBTPU_LOAD",
        "TF_CPP_MIN_LOG_LEVEL",
    ):
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    assert topology(name) == []
    assert seen["platform"] == platform
    assert {key: seen[key] for key in arguments} == arguments
    if platform == "tpu":
        assert seen["mds"] == "1" and aot.os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    else:
        assert "cuda_compute_capability { major: 9 minor: 0 }" in seen["target_config"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install -e ".[tpu]"')
def test_a_tpu_that_is_not_here_has_devices() -> None:
    devices = topology("v5e:2x4")
    assert (len(devices), devices[0].platform) == (8, "tpu")
    assert len({device.slice_index for device in topology("v5e:2x2*2")}) == 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="libtpu has no machine v5e:3x4"):
        topology("v5e:3x4")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason='needs the CUDA plug-in: pip install -e ".[aot-cuda]"'
)
@pytest.mark.parametrize("kind", aot.GPUS)
def test_a_gpu_that_is_not_here_compiles(kind: str) -> None:
    devices = topology(f"{kind}:8")
    assert (len(devices), devices[0].platform) == (8, "gpu")
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    assert "HloModule" in jax.jit(lambda x: x + 1).lower(x).compile().as_text()
