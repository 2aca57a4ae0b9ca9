"""A whole run on gs://: TensorFlow's own file system for it, and a server of it on this machine."""

import json

import numpy as np
import pytest
import tensorflow as tf
from etils import epath
from tensorflow.python.lib.io import file_io

from tests import nano_model
from tests.checkpoints import tensors
from tests.fake_gcs import fake_gcs
from tf_teaforn import checkpoint
from tf_teaforn.errors import UserError
from tf_teaforn.paths import move_folder, write_whole
from tf_teaforn.tf_backend.export import write_saved_model

RUN = "gs://bucket/runs/model"


@pytest.fixture
def gcs(tmp_path, monkeypatch):
    with fake_gcs(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield


def test_a_run_on_gs_is_that_on_a_disk(gcs, corpus, small_model, call_command, tmp_path, capsys):
    flags = [
        "--task=text",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        *small_model,
        *nano_model.FLAGS,
        "--n=1",
        "--decode_length=4",
        "--learning_rate=1e-2",
        "--warmup_steps=1",
        "--eval_every=2",
        "--keep=1",
        "--log_every=1",
    ]

    def train(model_dir, steps):
        return call_command("train", *flags, f"--model_dir={model_dir}", f"--train_steps={steps}")

    local = tmp_path / "local"
    assert train(local, 4) == 0

    # Stopped on the way, and continued.
    assert train(RUN, 2) == 0
    assert train(RUN, 4) == 0
    capsys.readouterr()
    remote = epath.Path(RUN)
    assert (remote / "metrics.jsonl").read_text() == (local / "metrics.jsonl").read_text()
    points = [
        tf.compat.v1.Event.FromString(record)
        for path in (remote / "tensorboard").glob("events.out.tfevents.*")
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    ]
    losses = [p.step for p in points if any(v.tag == "loss" for v in p.summary.value)]
    assert sorted(losses) == [1, 2, 3, 4]
    # --keep=1.
    assert checkpoint.steps(local) == checkpoint.steps(remote) == [4]
    expected, found = tensors(local, 4), tensors(remote, 4)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)

    flags = [f"--model_dir={RUN}", "--checkpoint=latest"]
    assert call_command("evaluate", *flags, "--beam_size=1") == 0
    (result,) = (remote / "eval").glob("*.json")
    assert json.loads(result.read_text())["examples"] == 12
    (tmp_path / "in.txt").write_text("I see the cat\n")
    assert (
        call_command("decode", *flags, f"--input={tmp_path}/in.txt", "--output=gs://new/a/out.txt")
        == 0
    )
    assert call_command("export", *flags, "--export_dir=gs://bucket/exported") == 0
    (version,) = epath.Path("gs://bucket/exported").iterdir()
    signature = tf.saved_model.load(str(version)).signatures["serving_default"]
    answer = signature(inputs=tf.constant(["I see the cat"]))["outputs"].numpy()[0].decode()
    assert epath.Path("gs://new/a/out.txt").read_text() == f"{answer}\n"


class Scaler(tf.Module):
    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0)

    def signatures(self, mode):
        number = tf.TensorSpec([], tf.float32)
        function = tf.function(lambda x: {"y": self.factor * x}, input_signature=[number])
        return {"serving_default": function}


@pytest.mark.parametrize("lost", [None, "saved_model.pb", "variables"])
def test_an_export_is_a_model_once_all_of_it_is_there(gcs, tmp_path, monkeypatch, lost):
    moved = []
    rename = tf.io.gfile.rename

    def recorded(source, destination, overwrite=False):
        moved.append(destination)
        if lost and lost in destination:
            raise tf.errors.UnavailableError(None, None, "gone")
        rename(source, destination, overwrite)

    monkeypatch.setattr(tf.io.gfile, "rename", recorded)
    # Of its own, because TensorFlow remembers for seconds what it found.
    folder = epath.Path(f"gs://bucket/{tmp_path.name}")
    examples = {"sources": ["x"], "targets": ["y"]}
    if lost:
        with pytest.raises(UserError, match="^--export_dir=gs://bucket/.*: cannot .*: gone"):
            write_saved_model(Scaler(), folder, {}, examples, "score")
        assert not list(folder.iterdir())
        return
    version = write_saved_model(Scaler(), folder, {}, examples, "score")
    assert list(folder.iterdir()) == [version]
    assert {f"{version}/variables/variables.index", f"{version}/assets.extra/decode.json"} <= {
        *moved
    }
    assert moved[-1] == f"{version}/saved_model.pb" and moved.count(moved[-1]) == 1
    signature = tf.saved_model.load(str(version)).signatures["serving_default"]
    assert signature(x=tf.constant(3.0))["y"] == 6.0


def test_a_failed_write_leaves_what_was_there(gcs, tmp_path, monkeypatch):
    folder = epath.Path(f"gs://bucket/{tmp_path.name}")
    write_whole(folder / "file", "before")

    def fail(source, destination, overwrite):
        assert tf.io.gfile.exists(source)
        raise tf.errors.UnavailableError(None, None, "gone")

    monkeypatch.setattr(tf.io.gfile, "rename", fail)
    with pytest.raises(tf.errors.UnavailableError):
        write_whole(folder / "file", "after")
    assert list(folder.iterdir()) == [folder / "file"]
    assert (folder / "file").read_text() == "before"


def test_a_folder_that_cannot_be_listed_is_not_moved(gcs, tmp_path, monkeypatch):
    """What is not in the list would be deleted with the source."""
    folder = epath.Path(f"gs://bucket/{tmp_path.name}")
    for name in ("last", "part/first"):
        write_whole(folder / "source" / name, name)

    def lost(path):
        raise tf.errors.NotFoundError(None, None, f"no list of {path}")

    listed = file_io.list_directory
    for broken, message in (
        (lost, "no list of .*/source"),
        (lambda path: lost(path) if "part" in path else listed(path), "no list of .*/part"),
        (lambda path: ["part/"] if path.endswith("source") else listed(path), "not in its folder"),
    ):
        with (
            monkeypatch.context() as patch,
            pytest.raises((OSError, tf.errors.NotFoundError), match=message),
        ):
            patch.setattr(file_io, "list_directory", broken)
            move_folder(folder / "source", folder / "destination", "last")
    assert (folder / "source" / "last").read_text() == "last"
    assert (folder / "source" / "part" / "first").read_text() == "part/first"
    assert not (folder / "destination").exists()


def test_a_prepared_shard_that_is_missing(gcs, tmp_path, call_command, capsys):
    folder = epath.Path(f"gs://bucket/{tmp_path.name}")
    manifest = {"splits": {"train": "x", "validation": "x"}, "shards": 1}
    write_whole(folder / "prepared.json", json.dumps(manifest))
    flags = ["--task=gsg", f"--prepared={folder}", *nano_model.FLAGS, f"--model_dir={tmp_path}/m"]
    assert call_command("train", *flags) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    shard = f"{folder}/train-00000-of-00001.tsv.gz"
    assert line == f"train: The specified path {shard} was not found."


def test_no_access(gcs, corpus, call_command, capsys):
    files = (f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid"))
    assert call_command("train", "--task=text", *files, "--model_dir=gs://forbidden/run") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train: ") and "HTTP response code 403" in line
    assert line.endswith("when reading metadata of gs://forbidden/run")
