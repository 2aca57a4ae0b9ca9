"""Runs that are continued, and runs that go wrong."""

import json
import re

import numpy as np
import pytest
import safetensors.numpy

from tf_teaforn import checkpoint


@pytest.fixture
def train(corpus, small_model, call_command):
    """bin/train on the corpus, in this process; returns its exit code."""

    def run(model_dir, *flags):
        return call_command(
            "train",
            "--task=text",
            *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
            *small_model,
            "--log_every=1",
            "--warmup_steps=1",
            f"--model_dir={model_dir}",
            *flags,
        )

    return run


def tensors(model_dir, step):
    folder = model_dir / "checkpoints" / str(step)
    return {
        f"{name}/{key}": value
        for name in ("model", "optimizer")
        for key, value in safetensors.numpy.load_file(folder / f"{name}.safetensors").items()
    }


def test_adafactor_with_stages_of_their_own_continues_exactly(train, tmp_path):
    """Adafactor's moments have the same path for several weights."""
    flags = ("--n=2", "--noshared", "--optimizer=adafactor", "--eval_every=2")
    assert train(tmp_path / "whole", *flags, "--train_steps=4") == 0
    assert train(tmp_path / "parts", *flags, "--train_steps=2") == 0
    # A process that was killed while it wrote the next line.
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    assert train(tmp_path / "parts", *flags, "--train_steps=4") == 0
    whole, parts = (tensors(tmp_path / name, 4) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(value, parts[name], err_msg=name)
    records = [(tmp_path / n / "metrics.jsonl").read_text() for n in ("whole", "parts")]
    assert records[0] == records[1]
    assert [json.loads(line)["step"] for line in records[0].splitlines()] == [1, 2, 2, 3, 4, 4]


def test_weights_that_are_not_finite_are_never_saved(train, tmp_path, capsys):
    flags = ("--learning_rate=1e38", "--eval_every=9", "--checkpoint_every=1", "--train_steps=5")
    assert train(tmp_path, *flags) == 2
    error = capsys.readouterr().err
    assert "Not a finite number at step 2: the loss of stage 0, the loss of stage 1" in error
    # Its batch is what the order of the data says, in the words of the corpus.
    assert re.search(r"has the training examples \d+, \d+.* begins: '(I see|you have) the ", error)
    assert "Good checkpoints: 1." in error
    assert not (tmp_path / "best").exists()
    for step in checkpoint.steps(tmp_path):
        assert all(np.isfinite(value).all() for value in tensors(tmp_path, step).values())


def test_settings_may_change_until_there_is_a_checkpoint(train, tmp_path, capsys):
    assert train(tmp_path, "--train_steps=2", "--learning_rate=1e38", "--eval_every=1") == 2
    assert checkpoint.steps(tmp_path) == []
    assert train(tmp_path, "--train_steps=2", "--learning_rate=1e-3", "--eval_every=1") == 0
    assert train(tmp_path, "--train_steps=2", "--learning_rate=2e-3", "--eval_every=1") == 2
    assert "--learning_rate: 0.001 there, 0.002 here" in capsys.readouterr().err
