"""A run goes on with the data that it began with, and with no others."""

import os
import shutil
import types

import pytest
from etils import epath

from tests import nano_model
from tf_teaforn import checkpoint, training
from tf_teaforn.config import RunConfig
from tf_teaforn.errors import UserError


@pytest.fixture
def data(corpus, tmp_path):
    """The corpus, in a folder where it may be changed."""
    return shutil.copytree(corpus, tmp_path / "data")


@pytest.fixture
def train(data, small_model, call_command, eagerly, tmp_path):
    """bin/train of a small model up to a step; returns its exit code."""

    def run(steps):
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
            )

    return run


def test_other_data_are_refused(data, tmp_path, train, capsys):
    model_dir = tmp_path / "run"
    assert train(2) == 0
    whole = {path: path.read_bytes() for path in (data / "train.tsv", data / "valid.tsv")}
    examples = (model_dir / "examples.json").read_bytes()

    (data / "valid.tsv").write_text("you have the sun\ttu as le soleil\n")
    assert train(3) == 2
    assert (
        f"--model_dir={model_dir}: the examples of split validation are not those of its "
        "checkpoints: the files, the task's code or a package that prepares them, such as "
        "sentencex, has changed since. Restore it, or start another run with "
        f"--init_from={model_dir}@latest, without --model, and another --model_dir."
    ) in capsys.readouterr().err
    assert (model_dir / "examples.json").read_bytes() == examples
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
