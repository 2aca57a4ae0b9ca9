import contextlib
import hashlib
import json
import logging
import os
import pathlib
import shutil
import types

import keras
import numpy as np
import pytest
from etils import epath
from etils.epath import gpath

from tf_teaforn import checkpoint
from tf_teaforn import model_dir as model_dirs
from tf_teaforn.errors import UserError

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


def weights_of(step):
    random = np.random.default_rng(step)
    return {
        "embedding": random.normal(size=(5, 3)).astype(np.float32),
        "decoder/scale": np.float32(random.normal()),
        "seed": np.array([step, 7], np.uint32),
    }


def optimizer_of(step):
    return {"iterations": np.int64(step), "momentum/embedding": np.full((5, 3), step, np.float32)}


def save(model_dir, *steps, keep=9):
    for step in steps:
        state = {"best": 0.1 * step, "history": [1, step]}
        folder = checkpoint.save(model_dir, step, weights_of(step), optimizer_of(step), state, keep)
    return folder


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_array_equal(actual[name], value, strict=False)
        assert actual[name].shape == np.shape(value)


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def reseal(path, **changes):
    """Alters a state.json so that its checksum holds."""
    record = json.loads(path.read_text()) | changes
    del record["sha256"]
    record["sha256"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record))


# Saving and resuming


def test_training_state_round_trips(tmp_path):
    assert checkpoint.load_training(tmp_path / "none") is None
    folder = save(tmp_path, 100, 200)
    assert os.fspath(folder) == str(tmp_path / "checkpoints" / "200")
    assert sorted(os.listdir(folder)) == [MODEL, OPTIMIZER, STATE]
    assert checkpoint.steps(tmp_path) == [100, 200]

    weights, optimizer, state = checkpoint.load_training(tmp_path)

    assert_equal(weights, weights_of(200))
    assert_equal(optimizer, optimizer_of(200))
    assert state == {"best": 0.1 * 200, "history": [1, 200], "step": 200}


def test_state_may_be_any_json_and_arrays_of_any_layout(tmp_path):
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    arrays = {
        "transposed": transposed,
        "empty": np.zeros((0, 3), np.float32),
        "half": np.ones(2, np.float16),
        "flags": np.array([True, False]),
    }
    state = {"metric": -np.inf, "by_step": {10: 1.5, 9: "é"}}
    checkpoint.save(tmp_path, 0, arrays, {}, state, keep=1)
    weights, optimizer, restored = checkpoint.load_training(tmp_path)
    assert_equal(weights, arrays)
    assert optimizer == {}
    assert restored == {"metric": -np.inf, "by_step": {"10": 1.5, "9": "é"}, "step": 0}


def test_unusable_arguments_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        save(tmp_path, 1, keep=0)
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 1, {}, {}, {"object": object()}, keep=1)
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(ValueError, match="words has type"):
        checkpoint.save(tmp_path, 1, {"words": np.array(["a"])}, {}, {}, keep=1)
    assert checkpoint.steps(tmp_path) == []


def test_retention_deletes_the_oldest_but_never_the_one_just_written(tmp_path):
    save(tmp_path, 9, 10, 100, 20, keep=3)
    assert checkpoint.steps(tmp_path) == [10, 20, 100]
    save(tmp_path, 5, keep=2)
    assert checkpoint.steps(tmp_path) == [5, 100]
    save(tmp_path, 7, keep=1)
    assert checkpoint.steps(tmp_path) == [7]
    assert os.listdir(tmp_path / "checkpoints") == ["7"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10)
    checkpoint.save(tmp_path, 10, weights_of(11), {}, {}, keep=3)
    assert os.listdir(tmp_path / "checkpoints") == ["10"]
    assert_equal(checkpoint.load_training(tmp_path)[0], weights_of(11))


def test_everything_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        events.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(source, destination):
        events.append("rename")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    save(tmp_path, 3)
    assert events == [MODEL, OPTIMIZER, STATE, "3.tmp", "rename", "checkpoints"]


def test_a_full_disk_leaves_earlier_checkpoints_and_says_so(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"checkpoints/2 .*No space left.*untouched"):
            save(tmp_path, 2, keep=1)
        with pytest.raises(UserError, match="best .*No space left"):
            checkpoint.promote_best(tmp_path, 1, {})
    assert os.listdir(tmp_path / "checkpoints") == ["1"]
    assert_equal(checkpoint.load_training(tmp_path)[0], weights_of(1))


# Interrupted and damaged


def test_temporary_and_incomplete_folders_are_ignored_and_cleared(tmp_path):
    save(tmp_path, 1, 2)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "2").rename(checkpoints / "2.tmp")
    (checkpoints / "3").mkdir()
    (checkpoints / "3" / MODEL).write_bytes(b"half")
    for other in ("notes", "007", "8xtmp"):
        (checkpoints / other).mkdir()
        (checkpoints / other / STATE).write_text("{}")

    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.load_training(tmp_path)[2]["step"] == 1
    save(tmp_path, 4)
    assert sorted(os.listdir(checkpoints)) == ["007", "1", "4", "8xtmp", "notes"]


def test_what_was_being_replaced_still_counts_and_is_retired_like_any_other(tmp_path):
    save(tmp_path, 1, 2)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "1").rename(checkpoints / "1.old")
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert_equal(checkpoint.load_weights(tmp_path, "1")[0], weights_of(1))
    save(tmp_path, 3, keep=1)
    assert os.listdir(checkpoints) == ["3"]


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE])
@pytest.mark.parametrize("damage", [flip_byte, truncate, pathlib.Path.unlink])
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, caplog, name, damage):
    save(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints" / "2" / name)
    with caplog.at_level(logging.WARNING):
        weights, optimizer, state = checkpoint.load_training(tmp_path)
    assert state["step"] == 1
    assert_equal(weights, weights_of(1))
    assert_equal(optimizer, optimizer_of(1))
    if (name, damage) != (STATE, pathlib.Path.unlink):  # without it the folder is incomplete
        assert str(tmp_path / "checkpoints" / "2" / name) in caplog.text


def test_every_byte_of_the_state_is_covered(tmp_path):
    path = tmp_path / "checkpoints" / "5" / STATE
    save(tmp_path, 5)
    good = path.read_bytes()
    for position in range(len(good)):
        changed = bytearray(good)
        changed[position] ^= 1
        path.write_bytes(changed)
        with contextlib.suppress(UserError):  # white space between values may change
            assert checkpoint.load_training(tmp_path)[2] == {
                "best": 0.5,
                "history": [1, 5],
                "step": 5,
            }


def test_all_damaged_stops(tmp_path):
    save(tmp_path, 1, 2)
    truncate(tmp_path / "checkpoints" / "1" / MODEL)
    flip_byte(tmp_path / "checkpoints" / "2" / OPTIMIZER)
    with pytest.raises(UserError, match=r"damaged \(1, 2\)"):
        checkpoint.load_training(tmp_path)
    with pytest.raises(UserError, match=f"1/{MODEL} is damaged"):
        checkpoint.load_weights(tmp_path, "1")
    with pytest.raises(UserError, match=f"1/{MODEL} is damaged"):
        checkpoint.promote_best(tmp_path, 1, {})
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE])
def test_one_that_is_there_and_cannot_be_read_is_not_skipped(tmp_path, monkeypatch, name):
    save(tmp_path, 1, 2)
    path = tmp_path / "checkpoints" / "2" / name
    real = gpath.PosixGPath.open

    def failing(self, *args, **kwargs):
        if os.fspath(self) == os.fspath(path):
            raise OSError(5, "Input/output error")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(gpath.PosixGPath, "open", failing)
    with pytest.raises(UserError) as caught:
        checkpoint.load_training(tmp_path)
    assert str(caught.value).startswith(f"{path} cannot be read (Input/output error): try again")
    assert checkpoint.steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/2/state.json"])
def test_what_cannot_be_looked_at_is_not_taken_for_missing(tmp_path, monkeypatch, name):
    save(tmp_path, 1, 2)
    real = os.stat

    def failing(path, *args, **kwargs):
        if os.fspath(path) == os.fspath(tmp_path / name):
            raise OSError(5, "Input/output error")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        for call in (
            lambda: checkpoint.load_training(tmp_path),
            lambda: checkpoint.load_weights(tmp_path, "2"),
            lambda: save(tmp_path, 3),
        ):
            with pytest.raises(UserError, match=rf"/{name} cannot be read \(Input/output error\)"):
                call()
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_an_old_one_that_cannot_be_deleted_is_no_error(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1, 2)
    real = gpath.PosixGPath.rmtree

    def failing(self, *args, **kwargs):
        if self.name == "1":
            raise OSError(39, "Directory not empty")
        real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(gpath.PosixGPath, "rmtree", failing)
        save(tmp_path, 3, keep=2)
        save(tmp_path, 4, keep=2)
    assert f"{tmp_path}/checkpoints/1 cannot be deleted (Directory not empty)" in caplog.text
    assert checkpoint.steps(tmp_path) == [3, 4]
    save(tmp_path, 5, keep=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["4", "5"]


@pytest.mark.parametrize(
    ("spec", "name", "steps"),
    [("latest", "4", [4]), ("average:2", "average-2-4", [3, 4]), ("best", "best", [4])],
)
def test_what_a_run_replaces_while_it_is_read_is_found_again(
    tmp_path, monkeypatch, spec, name, steps
):
    save(tmp_path, 1, 2)
    checkpoint.promote_best(tmp_path, 2, {})
    real = checkpoint._read_tensors

    def read(*args):
        # Between the reading of state.json and that of the weights.
        monkeypatch.setattr(checkpoint, "_read_tensors", real)
        save(tmp_path, 3, 4, keep=2)
        checkpoint.promote_best(tmp_path, 4, {})
        return real(*args)

    monkeypatch.setattr(checkpoint, "_read_tensors", read)
    weights, state = checkpoint.load_weights(tmp_path, spec)
    assert (state["checkpoint"], state["steps"]) == (name, steps)
    each = [weights_of(step)["embedding"].astype("float64") for step in steps]
    np.testing.assert_array_equal(weights["embedding"], np.mean(each, axis=0).astype("float32"))


def test_one_that_is_deleted_while_it_is_read_is_named(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    real = checkpoint._find

    def find(folder):
        found = real(folder)
        if found and found.name == "1" and not deleted:
            deleted.append(found)
            return found
        if deleted:
            shutil.rmtree(deleted[0], ignore_errors=True)
        return real(folder)

    deleted = []
    monkeypatch.setattr(checkpoint, "_find", find)
    with pytest.raises(UserError, match="--checkpoint=1: .* does not have it; steps saved: 2"):
        checkpoint.load_weights(tmp_path, "1")


def test_foreign_and_hostile_files_are_refused(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints" / "1"
    files = json.loads((folder / STATE).read_text())["files"]

    outside = {**files, "../../secret": "0" * 64}
    reseal(folder / STATE, files=outside)
    with pytest.raises(UserError, match="secret"):
        checkpoint.load_weights(tmp_path, "latest")

    (folder / MODEL).write_bytes(b"\x80\x04pickle")
    digest = hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()
    reseal(folder / STATE, files={**files, MODEL: digest})
    with pytest.raises(UserError, match="as a safetensors file"):
        checkpoint.load_weights(tmp_path, "latest")

    reseal(folder / STATE, files=[MODEL])
    with pytest.raises(UserError, match="is not a checkpoint's"):
        checkpoint.load_weights(tmp_path, "latest")

    reseal(folder / STATE, files=files, format=99)
    with pytest.raises(UserError, match="format 99"):
        checkpoint.load_training(tmp_path)

    for text in ("[]", "3", '{"sha256": 1}', "[" * 100_000, "\x00"):
        (folder / STATE).write_text(text)
        with pytest.raises(UserError, match="does not match"):
            checkpoint.load_weights(tmp_path, "latest")


# Choosing


def test_resolve(tmp_path):
    save(tmp_path, 5, 30, 200)
    checkpoint.promote_best(tmp_path, 30, {"bleu": 12.5})
    root = epath.Path(tmp_path) / "checkpoints"
    expected = {
        "latest": ("200", [root / "200"], (200,)),
        "30": ("30", [root / "30"], (30,)),
        "030": ("30", [root / "30"], (30,)),
        "best": ("best", [epath.Path(tmp_path) / "best"], (30,)),
        "average:2": ("average-2-200", [root / "30", root / "200"], (30, 200)),
        "average:1": ("average-1-200", [root / "200"], (200,)),
    }
    for spec, (name, folders, steps) in expected.items():
        assert checkpoint.resolve(tmp_path, spec) == checkpoint.Checkpoint(
            name, tuple(folders), steps
        )


@pytest.mark.parametrize("spec", ["40", "average:4", "best"])
def test_a_missing_checkpoint_names_those_that_exist(tmp_path, spec):
    save(tmp_path, 5, 30, 200)
    with pytest.raises(UserError, match="5, 30, 200") as caught:
        checkpoint.resolve(tmp_path, spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["", "first", "../5", "5/../../x", "-5", "5.tmp", "٥", "5\n", "average:0", "average:x"]
)
def test_a_spec_is_nothing_else_and_leads_nowhere(tmp_path, spec):
    save(tmp_path, 5)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / STATE).write_text("{}")
    with pytest.raises(UserError, match=r"is not best, latest, average:<n> or a step"):
        checkpoint.resolve(tmp_path, spec)


def test_resolve_without_any_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no model directory"):
        checkpoint.resolve(tmp_path / "absent", "latest")
    for spec in ("latest", "best", "5", "average:2"):
        with pytest.raises(UserError, match="steps saved: none"):
            checkpoint.resolve(tmp_path, spec)


# Weights


def test_load_weights(tmp_path):
    save(tmp_path, 5, 30)
    weights, state = checkpoint.load_weights(tmp_path, "5")
    assert_equal(weights, weights_of(5))
    assert state == {
        "best": 0.5,
        "history": [1, 5],
        "checkpoint": "5",
        "step": 5,
        "steps": [5],
    }


def test_average_is_the_float64_mean_of_the_last_n(tmp_path):
    save(tmp_path, 1, 2, 3, 4)
    weights, state = checkpoint.load_weights(tmp_path, "average:3")
    each = [weights_of(step) for step in (2, 3, 4)]
    expected = {
        name: np.mean([one[name] for one in each], axis=0, dtype=np.float64).astype(np.float32)
        for name in ("embedding", "decoder/scale")
    }
    assert weights["embedding"].dtype == weights["decoder/scale"].dtype == np.float32
    np.testing.assert_allclose(weights["embedding"], expected["embedding"], rtol=1e-7)
    np.testing.assert_allclose(weights["decoder/scale"], expected["decoder/scale"], rtol=1e-7)
    assert weights["decoder/scale"].shape == ()
    np.testing.assert_array_equal(weights["seed"], [4, 7])
    assert state["step"] == 4 and state["steps"] == [2, 3, 4]


def test_averages_of_uneven_steps_are_told_of(tmp_path, caplog):
    save(tmp_path, 600, 1000, 1200, 1400, keep=4)
    checkpoint.load_weights(tmp_path, "average:3")
    assert caplog.messages == []
    checkpoint.load_weights(tmp_path, "average:4")
    (line,) = caplog.messages
    assert line.startswith("Warning: average-4-1400 is the mean of steps 600, 1000, 1200, 1400, ")


def test_average_keeps_what_float32_sums_would_lose(tmp_path):
    for step, value in enumerate([1e8, 1.0, -1e8]):
        checkpoint.save(tmp_path, step, {"w": np.float32([value])}, {}, {}, keep=3)
    weights, _ = checkpoint.load_weights(tmp_path, "average:3")
    np.testing.assert_array_equal(weights["w"], np.float32([1 / 3]))


def test_a_written_average(tmp_path):
    save(tmp_path, 1, 2, 3)
    weights, _ = checkpoint.load_weights(tmp_path, "average:2")
    written = checkpoint.write_average(tmp_path, 2)
    folder = epath.Path(tmp_path) / "averages" / "average-2-3"
    assert written == checkpoint.Checkpoint("average-2-3", (folder,), (2, 3))
    assert {path.name for path in folder.iterdir()} == {MODEL, STATE}
    # It stays what it is while training goes on.
    save(tmp_path, 4)
    assert_equal(checkpoint.load_weights(tmp_path, "average-2-3")[0], weights)
    assert checkpoint.load_weights(tmp_path, "average-2-3")[1]["steps"] == [2, 3]
    assert checkpoint.steps(tmp_path) == [1, 2, 3, 4]
    with pytest.raises(UserError, match="average-2-4: .* steps saved: 1, 2, 3, 4"):
        checkpoint.resolve(tmp_path, "average-2-4")


def test_averaging_copies_or_runs_with_other_settings_is_refused(tmp_path):
    save(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "checkpoints" / "2", tmp_path / "checkpoints" / "3")
    with pytest.raises(UserError, match="2 and .*3 hold the same weights: cannot average"):
        checkpoint.load_weights(tmp_path, "average:2")
    for step, settings in ((3, "a"), (4, "b")):
        weights = {"w": np.float32([step])}
        checkpoint.save(tmp_path, step, weights, {}, {"settings": settings}, keep=9)
    with pytest.raises(UserError, match="3 and .*4 were trained with different settings"):
        checkpoint.write_average(tmp_path, 2)
    assert not (tmp_path / "averages").exists()


def test_a_checkpoint_that_was_moved_and_linked_stays_where_it_is(tmp_path):
    save(tmp_path, 1)
    folder, elsewhere = tmp_path / "checkpoints" / "1", tmp_path / "elsewhere"
    shutil.move(folder, elsewhere)
    folder.symlink_to(elsewhere)
    checkpoint.save(tmp_path, 2, weights_of(2), {}, {}, keep=1)
    assert checkpoint.steps(tmp_path) == [2] and not folder.is_symlink()
    assert (elsewhere / "state.json").exists()


def test_one_checkpoint_may_be_replaced(tmp_path):
    save(tmp_path, 1, 2, 3)
    checkpoint.save(tmp_path, 4, weights_of(4), {}, {"interrupted": True}, keep=9, delete=[3, 7])
    assert checkpoint.steps(tmp_path) == [1, 2, 4]
    # Those do not count among the ones that are kept.
    checkpoint.save(tmp_path, 5, weights_of(5), {}, {"interrupted": False}, keep=3, delete=[4])
    assert checkpoint.steps(tmp_path) == [1, 2, 5]


def test_interrupted_ones_are_known(tmp_path):
    for step in (1, 2, 3, 4):
        state = {"interrupted": step > 1}
        checkpoint.save(tmp_path, step, weights_of(step), {}, state, keep=9)
    (tmp_path / "checkpoints" / "3" / "state.json").write_text("{")
    assert checkpoint.interrupted(tmp_path) == [2, 4]
    assert checkpoint.interrupted(tmp_path / "none") == []


def test_best_is_of_a_checkpoint_and_not_of_another_of_its_step(tmp_path):
    save(tmp_path, 1, 2)
    assert not checkpoint.is_best(tmp_path, 2)
    checkpoint.promote_best(tmp_path, 2, {})
    assert checkpoint.is_best(tmp_path, 2) and not checkpoint.is_best(tmp_path, 1)
    state = tmp_path / "checkpoints" / "2" / "state.json"
    whole = state.read_text()
    state.write_text("{")
    assert checkpoint.is_best(tmp_path, 2)
    state.write_text(whole)
    checkpoint.save(tmp_path, 2, weights_of(9), {}, {}, keep=9)
    assert not checkpoint.is_best(tmp_path, 2)
    checkpoint.promote_best(tmp_path, 2, {})
    (tmp_path / "best" / "state.json").write_text("{")
    assert not checkpoint.is_best(tmp_path, 2)


def test_averaging_different_models_is_refused(tmp_path):
    checkpoint.save(tmp_path, 1, {"w": np.zeros(2, np.float32)}, {}, {}, keep=3)
    checkpoint.save(tmp_path, 2, {"w": np.zeros(3, np.float32)}, {}, {}, keep=3)
    with pytest.raises(UserError, match="different models"):
        checkpoint.load_weights(tmp_path, "average:2")


def test_best_is_a_copy_that_outlives_its_checkpoint(tmp_path):
    save(tmp_path, 1, 2)
    checkpoint.promote_best(tmp_path, 1, {"bleu": 10.0})
    best = checkpoint.promote_best(tmp_path, 2, {"bleu": 20.0})
    save(tmp_path, 3, keep=1)
    assert sorted(os.listdir(best)) == [MODEL, STATE]
    assert sorted(os.listdir(tmp_path)) == ["best", "checkpoints"]
    weights, state = checkpoint.load_weights(tmp_path, "best")
    assert_equal(weights, weights_of(2))
    assert state == {
        "best": 0.2,
        "history": [1, 2],
        "checkpoint": "best",
        "step": 2,
        "steps": [2],
        "metrics": {"bleu": 20.0},
    }
    with pytest.raises(UserError, match="steps saved: 3"):
        checkpoint.promote_best(tmp_path, 2, {})


def test_assign_sets_every_variable():
    variables = {
        "a": keras.Variable(np.zeros((2, 3), np.float32)),
        "b": keras.Variable(np.float32(0)),
    }
    weights = {"b": np.float32(3), "a": np.arange(6, dtype=np.float32).reshape(2, 3)}
    checkpoint.assign(variables, weights)
    for name, variable in variables.items():
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), weights[name])


def test_assign_names_what_does_not_fit_and_changes_nothing():
    variables = {name: keras.Variable(np.zeros((2, 3), np.float32)) for name in "abc"}
    weights = {
        "a": np.ones((2, 3), np.float32),
        "b": np.ones((3, 2), np.float32),
        "z": np.ones(1, np.float32),
    }
    with pytest.raises(UserError) as caught:
        checkpoint.assign(variables, weights)
    message = str(caught.value)
    assert "c is missing" in message
    assert "z is not in the model" in message
    assert "b has shape (3, 2), the model's is (2, 3)" in message
    assert not np.any(keras.ops.convert_to_numpy(variables["a"]))

    with pytest.raises(UserError, match="v4 is not in the model; and 15 more"):
        checkpoint.assign({}, {f"v{index}": np.zeros(1) for index in range(20)})


# File systems


class Killed(BaseException):
    """The process ends here: nothing that handles errors may run."""


class RemoteFile:
    """A file object with no descriptor, as object stores give."""

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    def __getattr__(self, name):
        if name == "fileno":
            raise AttributeError(name)
        return getattr(self._file, name)


@contextlib.contextmanager
def file_system(monkeypatch, root, allowed=10**9):
    """Serves gs:// from `root`, without folder renames, and dies after `allowed` changes."""
    changes = 0

    def change():
        nonlocal changes
        changes += 1
        if changes > allowed:
            raise Killed

    def real(path):
        return os.fspath(path).replace("gs:/", os.fspath(root))

    def reading(original, path, *args, **kwargs):
        return original(real(path), *args, **kwargs)

    def changing(original, path, *args, **kwargs):
        change()
        return original(real(path), *args, **kwargs)

    def removing(original, path):
        for name in sorted(os.listdir(real(path))):
            change()
            os.remove(os.path.join(real(path), name))
        change()
        original(real(path))

    def opening(original, path, mode):
        file = original(real(path), mode)
        if "w" in mode:
            change()
        return RemoteFile(file) if os.fspath(path).startswith("gs://") else file

    def walking(original, top, **kwargs):
        for folder, *names in original(real(top), **kwargs):
            yield os.fspath(folder).replace(real(top), os.fspath(top), 1), *names

    def moving(original, path, destination, **kwargs):
        if os.fspath(path).startswith("gs://") and os.path.isdir(real(path)):
            raise NotImplementedError("an object store renames no folders")
        change()
        return original(real(path), real(destination), **kwargs)

    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    read_only = dict.fromkeys(("exists", "isdir", "listdir", "stat"), reading)
    altering = dict.fromkeys(("mkdir", "makedirs", "remove"), changing)
    moves = dict.fromkeys(("rename", "replace", "copy"), moving)
    with epath.testing.mock_epath(
        open=opening, rmtree=removing, walk=walking, **read_only, **altering, **moves
    ):
        yield


def test_remote_folders(tmp_path, monkeypatch, caplog):
    with file_system(monkeypatch, tmp_path):
        model_dir = "gs://bucket/run"
        assert checkpoint.load_training(model_dir) is None
        save(model_dir, 1, 2, 3, 3, keep=2)
        assert checkpoint.steps(model_dir) == [2, 3]
        checkpoint.promote_best(model_dir, 2, {"bleu": 1.0})
        checkpoint.promote_best(model_dir, 3, {"bleu": 2.0})
        flip_byte(tmp_path / "bucket" / "run" / "checkpoints" / "3" / MODEL)
        weights, optimizer, state = checkpoint.load_training(model_dir)
        assert_equal(weights, weights_of(2))
        assert_equal(optimizer, optimizer_of(2))
        assert "gs://bucket/run/checkpoints/3" in caplog.text
        weights, state = checkpoint.load_weights(model_dir, "best")
        assert_equal(weights, weights_of(3))
        assert state["metrics"] == {"bleu": 2.0}
    assert sorted(os.listdir(tmp_path / "bucket" / "run")) == ["best", "checkpoints"]
    assert sorted(os.listdir(tmp_path / "bucket" / "run" / "checkpoints")) == ["2", "3"]


@pytest.mark.parametrize("lost", [MODEL, STATE])
def test_a_remote_folder_that_cannot_be_put_in_place_leaves_the_old_one(
    tmp_path, monkeypatch, lost
):
    def failing(path, destination):
        if lost in os.fspath(path):
            raise OSError(5, "Input/output error")
        return rename(path, destination)

    with file_system(monkeypatch, tmp_path):
        save("gs://run", 2)
        rename = gpath.PosixGPath.rename
        with monkeypatch.context() as patch:
            patch.setattr(gpath.PosixGPath, "rename", failing)
            with pytest.raises(UserError, match="checkpoints/2 .*Input/output error"):
                checkpoint.save("gs://run", 2, weights_of(3), {}, {}, keep=1)
        assert os.listdir(tmp_path / "run" / "checkpoints") == ["2.old"]
        assert_equal(checkpoint.load_training("gs://run")[0], weights_of(2))


def kill_everywhere(monkeypatch, tmp_path, where, prepare, act, check):
    """Kills `act` before each of its changes in turn, checks what is left, and goes on."""
    for allowed in range(1000):
        root = tmp_path / str(allowed)
        root.mkdir()
        model_dir = "gs://run" if where == "remote" else root / "run"
        with file_system(monkeypatch, root):
            prepare(model_dir)
        try:
            with file_system(monkeypatch, root, allowed):
                act(model_dir)
            survived = True
        except Killed:
            survived = False
        with file_system(monkeypatch, root):
            check(model_dir, survived)
            act(model_dir)
            check(model_dir, True)
        if survived:
            break
    assert 5 < allowed < 100
    return os.listdir(root / "run")


@pytest.mark.parametrize("where", ["local", "remote"])
def test_there_is_always_a_whole_best(tmp_path, monkeypatch, where):
    def prepare(model_dir):
        save(model_dir, 1, 2)
        checkpoint.promote_best(model_dir, 1, {"bleu": 1.0})

    def act(model_dir):
        checkpoint.promote_best(model_dir, 2, {"bleu": 2.0})

    def check(model_dir, survived):
        weights, state = checkpoint.load_weights(model_dir, "best")
        assert state["step"] in ([2] if survived else [1, 2])
        assert_equal(weights, weights_of(state["step"]))
        assert state["metrics"] == {"bleu": float(state["step"])}

    left = kill_everywhere(monkeypatch, tmp_path, where, prepare, act, check)
    assert sorted(left) == ["best", "checkpoints"]


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("step", [2, 3])
def test_there_is_always_a_checkpoint_to_go_on_from(tmp_path, monkeypatch, where, step):
    def prepare(model_dir):
        save(model_dir, 2)

    def act(model_dir):
        save(model_dir, step, keep=1)

    def check(model_dir, survived):
        weights, optimizer, state = checkpoint.load_training(model_dir)
        assert state["step"] in ([step] if survived else [2, step])
        assert_equal(weights, weights_of(state["step"]))
        assert_equal(optimizer, optimizer_of(state["step"]))
        if survived:
            assert checkpoint.steps(model_dir) == [step]

    kill_everywhere(monkeypatch, tmp_path, where, prepare, act, check)


def test_weights_of_one_path_are_refused():
    layers = [keras.layers.Dense(1, name=name) for name in ("one", "two", "two")]
    for layer in layers:
        layer.build((None, 1))
    model = types.SimpleNamespace(weights=[*layers[0].weights, *layers[1].weights])
    assert len(model_dirs.named_weights(model)) == 4
    model.weights += layers[2].weights
    with pytest.raises(ValueError, match="Two weights are two/kernel: give each layer a name"):
        model_dirs.named_weights(model)


def test_examples(tmp_path):
    model_dirs.write_examples(tmp_path, ["the cat", "I see"], ["le chat", "je vois"])
    expected = {"sources": ["the cat", "I see"], "targets": ["le chat", "je vois"]}
    assert model_dirs.read_examples(tmp_path) == expected
    for damaged in ("", "{", "[]", "{}", '{"sources": [], "targets": 1}'):
        (tmp_path / "examples.json").write_text(damaged)
        with pytest.raises(UserError, match="examples.json is missing or damaged: the command"):
            model_dirs.read_examples(tmp_path)
