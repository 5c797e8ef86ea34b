"""Saving, keeping, passing over what is damaged, and restoring, on hand-made states in one process of 8 devices."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.checkpoint import arrays, commit, manager
from meshpar.checkpoint.manager import Checkpoints, SaveError
from tests.checkpoint.damage import flip, truncate

MeshOf = Callable[[str], Mesh]


def state(mesh: Mesh, seed: int = 0, *, param: Any = jnp.float32, master: bool = False) -> dict[str, Any]:
    """A state with a split matrix, a split table, a scalar and a typed key."""

    def put(value: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    rng = np.random.default_rng(seed)
    kernel, table = rng.normal(size=(16, 8)).astype(np.float32), rng.normal(size=(32,)).astype(np.float32)
    tree: dict[str, Any] = {
        "step": put(np.int32(seed)),
        "params": {"kernel": put(jnp.asarray(kernel, param), "fsdp"), "table": put(jnp.asarray(table, param))},
        "opt_state": ({"mu": {"kernel": put(kernel / 3, "fsdp"), "table": put(table / 3)}},),
        "key": put(jax.random.key(seed)),
    }
    if master:
        tree["master"] = {"kernel": put(kernel, "fsdp"), "table": put(table)}
    return tree


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save_and_wait(checkpoints: Checkpoints, step: int, tree: Any) -> None:
    checkpoints.save(step, tree)
    checkpoints.wait()


def assert_same(one: Any, other: Any) -> None:
    """Bit by bit, with the shardings."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (left.dtype, left.sharding) == (right.dtype, right.sharding)
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture
def mesh(mesh_of: MeshOf) -> Mesh:
    return mesh_of("fsdp=4 tensor=2")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    """Checkpoints that keep 3."""
    made = Checkpoints(tmp_path / "checkpoints", keep=3)
    yield made
    made.close()


def test_all_of_a_save_is_on_the_disk_before_it_has_its_name(
    checkpoints: Checkpoints, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename may outlast a loss of power that the contents of a file do not."""
    synced: set[int] = set()
    before_the_name: list[set[int]] = []
    fsync, put_in_place = os.fsync, manager.put_in_place

    def sync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def name(final: Path) -> None:
        before_the_name.append(set(synced))
        put_in_place(final)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(manager, "put_in_place", name)
    save_and_wait(checkpoints, 5, state(mesh))
    folder = checkpoints.folder / "5"
    inodes = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}
    assert len(inodes) > 5
    assert inodes <= before_the_name[0]
    assert checkpoints.folder.stat().st_ino in synced - before_the_name[0]


def test_a_restored_state_equals_the_saved_one_bit_by_bit(checkpoints: Checkpoints, mesh: Mesh) -> None:
    saved = state(mesh, 5)
    checkpoints.save(5, saved, extra={"seed": 3, "plan": "fsdp=4"}, metric=1.5)
    assert_same(checkpoints.restore(abstract(saved), log=lambda line: None), saved)
    manifest = checkpoints.manifest(5)
    assert (manifest.step, manifest.metric, manifest.extra) == (5, 1.5, {"seed": 3, "plan": "fsdp=4"})
    assert manifest.leaves["params/kernel"].spec == (("fsdp",),)


@pytest.mark.parametrize("onto", ["fsdp=8", "data=2 fsdp=2 tensor=2", "fsdp=2", "data=1"])
def test_another_mesh_reads_the_same_values(onto: str, checkpoints: Checkpoints, mesh: Mesh, mesh_of: MeshOf) -> None:
    checkpoints.save(1, state(mesh))
    target = state(mesh_of(onto))
    told: list[str] = []
    assert_same(checkpoints.restore(abstract(target), log=told.append), target)
    assert told[0].startswith("restoring step 1, written on fsdp=4 tensor=2")


def test_precision_policies_restore_one_another(tmp_path: Path, mesh: Mesh, mesh_of: MeshOf) -> None:
    plain, copied = state(mesh), state(mesh, param=jnp.bfloat16, master=True)
    for name, saved, target in (("a", plain, copied), ("b", copied, plain)):
        checkpoints = Checkpoints(tmp_path / name)
        checkpoints.save(1, saved)
        assert_same(checkpoints.restore(abstract(target), log=lambda line: None), target)


def test_parameters_alone_are_restored_in_the_wanted_dtype_and_mesh(
    checkpoints: Checkpoints, mesh: Mesh, mesh_of: MeshOf
) -> None:
    checkpoints.save(1, state(mesh))
    for onto, dtype in (("fsdp=2", jnp.bfloat16), ("data=1", jnp.float32)):
        wanted = state(mesh_of(onto), param=dtype)["params"]
        assert_same(checkpoints.restore_params(abstract(wanted), log=lambda line: None), wanted)


def test_what_may_begin_anew_comes_from_a_first_state(checkpoints: Checkpoints, mesh: Mesh) -> None:
    saved = state(mesh)
    checkpoints.save(1, saved)
    wanted = {**saved, "scale": {"value": jnp.float32(4)}}
    with pytest.raises(ValueError, match="has no scale/value; give restore a fresh="):
        checkpoints.restore(abstract(wanted), log=lambda line: None)
    made = {**state(mesh, 9), "scale": {"value": jnp.float32(4)}}
    assert_same(checkpoints.restore(abstract(wanted), fresh=lambda: made, log=lambda line: None), wanted)


def test_nothing_is_read_into_another_shape(checkpoints: Checkpoints, mesh: Mesh) -> None:
    checkpoints.save(1, state(mesh))
    target = abstract(state(mesh))
    target["params"]["kernel"] = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"params/kernel is \(16, 8\) .* and \(8, 16\) here"):
        checkpoints.restore(target)


def test_the_newest_stay_and_besides_them_the_best(tmp_path: Path, mesh: Mesh) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, best=1)
    for step, metric in enumerate([5.0, 1.0, 4.0, float("nan"), None, 3.0], start=1):
        checkpoints.save(step, state(mesh, step), metric=metric)
    checkpoints.close()
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best_step() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "5", "6"]


def test_a_step_is_seen_only_when_it_is_whole(
    checkpoints: Checkpoints, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(1, state(mesh, 1))
    checkpoints.wait()
    go, finish = threading.Event(), checkpoints._commit
    monkeypatch.setattr(checkpoints, "_commit", lambda *arguments: (go.wait(30), finish(*arguments)))
    checkpoints.save(2, state(mesh, 2))
    assert Checkpoints(checkpoints.folder).latest() == 1
    go.set()
    checkpoints.wait()
    assert Checkpoints(checkpoints.folder).latest() == 2


@pytest.mark.parametrize("harm", ["manifest", "json", "metadata", "truncated", "flipped", "gone"])
def test_a_damaged_newest_step_is_passed_over_with_a_message(harm: str, checkpoints: Checkpoints, mesh: Mesh) -> None:
    for step in (1, 2):
        checkpoints.save(step, state(mesh, step))
    checkpoints.wait()
    folder = checkpoints.folder / "2"
    biggest = max((folder / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    match harm:
        case "manifest":
            (folder / "manifest.json").unlink()
        case "json":
            truncate(folder / "manifest.json")
        case "metadata":
            truncate(folder / "state" / "_METADATA")
        case "truncated":
            truncate(biggest)
        case "flipped":
            flip(biggest)
        case "gone":
            shutil.rmtree(folder / "state" / "d")
    told: list[str] = []
    restored = checkpoints.restore(abstract(state(mesh)), log=told.append)
    assert_same(restored, state(mesh, 1))
    assert told[0].startswith(f"passing over step 2 in {checkpoints.folder}: ")
    with pytest.raises(ValueError, match=r"the checkpoint of step 2 in .* is not whole .*there are: "):
        checkpoints.restore(abstract(state(mesh)), 2, log=told.append)


def test_without_a_whole_checkpoint_nothing_is_restored(checkpoints: Checkpoints, mesh: Mesh) -> None:
    assert checkpoints.latest() is None
    with pytest.raises(ValueError, match="holds no whole checkpoint; train without resuming"):
        checkpoints.restore(abstract(state(mesh)))
    (checkpoints.folder / "3").mkdir(parents=True)
    assert checkpoints.steps() == []
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        checkpoints.restore(abstract(state(mesh)), log=lambda line: None)


def test_steps_that_a_run_went_back_from_are_set_aside(checkpoints: Checkpoints, mesh: Mesh) -> None:
    for step in (1, 2, 3):
        checkpoints.save(step, state(mesh, step))
    checkpoints.wait()
    told: list[str] = []
    again = Checkpoints(checkpoints.folder, keep=3)
    again.restore(abstract(state(mesh)), 1, log=told.append)
    assert told[-1] == "  newer: 2, 3; the next save renames them to 2.unused ..."
    again.save(2, state(mesh, 20))
    again.close()
    assert again.steps() == [1, 2]
    assert_same(again.restore(abstract(state(mesh)), log=told.append), state(mesh, 20))
    assert sorted(path.name for path in again.folder.iterdir()) == ["1", "2", "2.unused", "3.unused"]


def test_the_same_step_is_replaced(checkpoints: Checkpoints, mesh: Mesh) -> None:
    checkpoints.save(1, state(mesh, 1))
    checkpoints.save(1, state(mesh, 2))
    assert_same(checkpoints.restore(abstract(state(mesh)), log=lambda line: None), state(mesh, 2))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["1"]


def test_what_an_earlier_run_left_unfinished_is_cleared_and_a_replaced_step_comes_back(
    checkpoints: Checkpoints, mesh: Mesh
) -> None:
    checkpoints.save(1, state(mesh, 1))
    checkpoints.wait()
    (checkpoints.folder / "1").rename(checkpoints.folder / "1.replaced")
    for name in ("2.writing", "0.deleted"):
        (checkpoints.folder / name).mkdir()
    again = Checkpoints(checkpoints.folder)
    assert again.newest_whole() == 1
    again.save(3, state(mesh, 3))
    again.close()
    assert sorted(path.name for path in again.folder.iterdir()) == ["1", "3"]


@pytest.mark.parametrize("moment", ["_meet made", "finalize", "_seal", "_commit", "rename"])
def test_a_save_that_fails_is_told_with_its_step_and_can_be_done_again(
    moment: str, checkpoints: Checkpoints, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(1, state(mesh, 1))
    checkpoints.wait()

    def full(*arguments: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        match moment:
            case "_meet made":
                patch.setattr(Path, "mkdir", full)
            case "finalize":
                patch.setattr(type(arrays._handler()), "finalize", full)
            case "_seal":
                patch.setattr(commit, "_seal", full)
            case "_commit":
                patch.setattr(commit, "to_text", lambda made, text=commit.to_text: full() if made.files else text(made))
            case "rename":
                patch.setattr(Path, "rename", full)
        with pytest.raises(SaveError, match=r"step 2 was not saved in .*No space left on device.*can be saved again"):
            save_and_wait(checkpoints, 2, state(mesh, 2))
    assert checkpoints.steps() == [1]
    assert [path.name for path in checkpoints.folder.iterdir()] == ["1"]
    assert_same(checkpoints.restore(abstract(state(mesh)), log=lambda line: None), state(mesh, 1))
    checkpoints.save(2, state(mesh, 2))
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_a_failure_is_raised_by_the_next_save_which_has_not_begun(
    checkpoints: Checkpoints, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_commit", lambda *arguments: 1 / 0)
        checkpoints.save(1, state(mesh))
        with pytest.raises(SaveError, match="step 1 was not saved"):
            checkpoints.save(2, state(mesh))
    assert checkpoints.steps() == []
    save_and_wait(checkpoints, 2, state(mesh, 2))
    assert checkpoints.steps() == [2]


def test_a_step_that_cannot_be_replaced_keeps_what_it_held(
    checkpoints: Checkpoints, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_and_wait(checkpoints, 1, state(mesh, 1))
    rename = Path.rename

    def full(path: Path, to: Path) -> Path:
        if path.suffix == ".writing":
            raise OSError(28, "No space left on device")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(SaveError, match="step 1 was not saved"):
            save_and_wait(checkpoints, 1, state(mesh, 2))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["1"]
    assert_same(checkpoints.restore(abstract(state(mesh)), log=lambda line: None), state(mesh, 1))


def test_a_failure_is_raised_once(checkpoints: Checkpoints, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_commit", lambda *arguments: 1 / 0)
    checkpoints.save(1, state(mesh))
    with pytest.raises(SaveError, match=r"step 1 was not saved .*division by zero"):
        checkpoints.wait()
    checkpoints.wait()


def test_bad_values_are_refused_before_anything_is_written(
    checkpoints: Checkpoints, mesh: Mesh, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="keep=0 would leave no checkpoint"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="best=-1 is negative"):
        Checkpoints(tmp_path, best=-1)
    with pytest.raises(ValueError, match="extra cannot be written"):
        checkpoints.save(1, state(mesh), extra={"plan": object()})
    assert not checkpoints.folder.exists()


def test_logical_axes_of_the_model_are_in_the_manifest(tmp_path: Path, mesh: Mesh) -> None:
    checkpoints = Checkpoints(tmp_path, axes={"kernel": ("embed", "mlp"), "table": ("vocab",)})
    checkpoints.save(1, state(mesh))
    checkpoints.close()
    leaves = checkpoints.manifest(1).leaves
    assert leaves["opt_state/0/mu/kernel"].axes == ("embed", "mlp")
    assert leaves["step"].axes is None
    assert dataclasses.asdict(leaves["params/table"])["shape"] == (32,)
