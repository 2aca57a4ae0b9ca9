"""A run goes on with the data that it began with, and with no others."""

import os
import shutil
import types

import pytest
from etils import epath

import tasks  # noqa: F401
from tests import nano_model
from tf_teaforn import checkpoint, training
from tf_teaforn.config import RunConfig
from tf_teaforn.errors import UserError
from tf_teaforn.model_dir import has_other_vocabulary, write_vocabulary_data
from tf_teaforn.task import get_task


@pytest.fixture
def data(corpus, tmp_path):
    """The corpus, in a folder where it may be changed."""
    return shutil.copytree(corpus, tmp_path / "data")


@pytest.fixture
def train(data, small_model, call_command, eagerly, tmp_path):
    """bin/train of a small model up to a step; returns its exit code."""

    def run(steps, *flags):
        with eagerly():
            return call_command(
                "train",
                "--task=text",
                f"--train_files={data}/train.tsv",
                f"--valid_files={data}/valid.tsv",
                *small_model,
                *nano_model.FLAGS,
                "--n=1",
                "--decode_length=4",
                "--warmup_steps=1",
                f"--train_steps={steps}",
                f"--model_dir={tmp_path}/run",
                *flags,
            )

    return run


def test_other_data_are_refused(data, tmp_path, train, capsys):
    model_dir = tmp_path / "run"
    assert train(2) == 0
    whole = {path: path.read_bytes() for path in (data / "train.tsv", data / "valid.tsv")}
    names = ("examples.json", "config.json", "command.txt")
    kept = {name: (model_dir / name).read_bytes() for name in names}

    (data / "valid.tsv").write_text("you have the sun\ttu as le soleil\n")
    assert train(3) == 2
    assert (
        f"--model_dir={model_dir}: the examples of split validation are not those of its "
        "checkpoints: the files, the task's code or a package that prepares them, such as "
        "sentencex, has changed since. Restore it, or start another run with "
        f"--init_from={model_dir}@latest, without --model, and another --model_dir."
    ) in capsys.readouterr().err
    assert kept == {name: (model_dir / name).read_bytes() for name in names}
    with (data / "train.tsv").open("a") as file:
        file.write("I see the cat\tje vois le chat\n")
    assert train(3) == 2
    assert "the examples of split train and validation are not those" in capsys.readouterr().err
    assert checkpoint.steps(model_dir) == [2]

    # The same content at another time.
    for path, content in whole.items():
        path.write_bytes(content)
    assert train(3) == 0
    assert checkpoint.steps(model_dir) == [2, 3]


def test_the_vocabulary_is_of_the_data_until_the_first_checkpoint(
    data, tmp_path, train, monkeypatch
):
    def stopped(*_):
        raise UserError("stopped")

    def vocabulary():
        return (tmp_path / "run" / "vocab.model").read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "restore", stopped)
        assert train(2) == 2
        first = vocabulary()
        patch.setattr(training, "build_vocabulary", None)
        # No other data: no other vocabulary.
        assert train(2) == 2 and vocabulary() == first
    # What was wrong with the file is mended.
    lines = (data / "train.tsv").read_text().splitlines()
    (data / "train.tsv").write_text("".join(f"{line[::-1]}\n" for line in lines))
    assert train(2) == 0
    second = vocabulary()
    assert second != first
    (data / "train.tsv").touch()
    assert train(3) == 0 and vocabulary() == second


def test_a_vocabulary_of_ones_own_stays(tmp_path):
    """One that was put there, or given, is of no data that is known."""
    run = object.__new__(training.Run)
    run.model_dir, run.task = epath.Path(tmp_path), get_task("demo_enfr")
    run.config = RunConfig(task="demo_enfr")
    path = tmp_path / "vocab.model"
    path.write_bytes(b"mine")
    run._prepare_vocabulary(None)
    assert path.read_bytes() == b"mine"
    # Put in the place of one that was trained there, on other data.
    (tmp_path / "vocab.data.txt").write_text(f"{'0' * 64} 400 subwords of gsg: x\n")
    run._prepare_vocabulary(None)
    assert path.read_bytes() == b"mine"
    # One that was trained there, on other data, and is given by the user, who may know better.
    write_vocabulary_data(tmp_path, run.config, get_task("demo_ende"))
    assert has_other_vocabulary(tmp_path, run.config, run.task)
    run._prepare_vocabulary(path)
    assert path.read_bytes() == b"mine"
    (tmp_path / "given").write_bytes(b"given")
    run._prepare_vocabulary(tmp_path / "given")
    assert path.read_bytes() == b"given"
    assert not has_other_vocabulary(tmp_path, run.config, run.task)


def test_a_test_file_may_be_given_later(data, tmp_path, train, capsys):
    assert train(2) == 0
    assert train(2, f"--test_files={data}/test.tsv") == 0
    (data / "test.tsv").write_text("no tab\n")
    assert train(3, f"--test_files={data}/test.tsv") == 2
    assert f"{data}/test.tsv:1: " in capsys.readouterr().err
    assert checkpoint.steps(tmp_path / "run") == [2]


def test_a_checkpoint_that_does_not_know_its_data(tmp_path):
    """As those of earlier versions: the run goes on."""
    run = object.__new__(training.Run)
    run.model_dir, run.state = tmp_path, {"data": {"train": "a", "validation": "b"}}
    run._check_data({})
    run._check_data({"train": "a"})
    with pytest.raises(UserError, match="the examples of split train are not those"):
        run._check_data({"train": "c", "validation": "b"})


def test_each_user_has_a_folder_for_the_caches_of_remote_runs(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(training.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(
        training.cache, "build_or_load", lambda folder, *_, **__: asked.append(folder)
    )
    run = object.__new__(training.Run)
    run.config, run.task = RunConfig(task="text"), types.SimpleNamespace(source=None)
    run.tokenizer = None
    for folder in ("gs://bucket/run", str(tmp_path / "run")):
        run.model_dir = epath.Path(folder)
        run._cache("train", drop_long=True)
    assert list(map(os.fspath, asked)) == [
        f"{tmp_path}/tf_teaforn-{os.getuid()}/cache",
        f"{tmp_path}/run/cache",
    ]
