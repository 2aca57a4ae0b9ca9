"""bin/train under JAX: the same run as under TensorFlow, on one device and on a mesh of eight."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tf_teaforn.errors import UserError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def flags(corpus, small_model):
    """Nothing random once the first weights are there, and one shape of batches to compile."""
    return (
        "--task=text",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        *small_model,
        "--n=2",
        "--dropout=0",
        "--word_drop=0",
        "--optimizer=sgd",
        "--learning_rate=0.05",
        "--schedule=constant",
        "--warmup_steps=0",
        "--batching=fixed",
        # 20 rows, which four parts of the mesh share without more.
        "--batch_tokens=480",
        "--decode_length=4",
        "--log_every=1",
        "--eval_every=3",
    )


def on_jax(model_dir, flags, devices=1):
    done = subprocess.run(
        [sys.executable, ROOT / "bin" / "train", *flags, f"--model_dir={model_dir}"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "KERAS_BACKEND": "jax",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def runs(flags, call_command, tmp_path_factory):
    """{name: folder}: three steps on TensorFlow, continued for three more in different ways."""
    folder = tmp_path_factory.mktemp("jax_training")
    start = folder / "start"
    assert call_command("train", *flags, "--train_steps=3", f"--model_dir={start}") == 0
    for name in ("tensorflow", "jax", "mesh"):
        shutil.copytree(start, folder / name)
    more = (*flags, "--train_steps=6")
    assert call_command("train", *more, f"--model_dir={folder / 'tensorflow'}") == 0
    on_jax(folder / "jax", more)
    on_jax(folder / "mesh", (*more, "--mesh=batch:4,model:2"), devices=8)
    return folder


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(folder, file="model"):
    return safetensors.numpy.load_file(folder / "checkpoints" / "6" / f"{file}.safetensors")


@pytest.mark.parametrize("name", ["jax", "mesh"])
def test_a_run_changes_to_jax(runs, name):
    expected, actual = records(runs / "tensorflow"), records(runs / name)
    assert [r.pop("kind") for r in actual] == [r.pop("kind") for r in expected]
    assert expected[-1]["step"] == 6 and expected[-1]["loss"] < expected[0]["loss"] - 0.1
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", ["jax", "mesh"])
def test_checkpoints_are_the_same(runs, name):
    for file in ("model", "optimizer"):
        expected, actual = weights(runs / "tensorflow", file), weights(runs / name, file)
        assert actual.keys() == expected.keys()
        for path, value in expected.items():
            assert actual[path].shape == value.shape, path
            # Counters have 32 bits under JAX.
            if value.dtype.kind == "f":
                assert actual[path].dtype == value.dtype, path
                np.testing.assert_allclose(actual[path], value, rtol=0, atol=2e-5, err_msg=path)


def test_a_run_changes_back(runs, flags, call_command):
    more = (*flags, "--train_steps=7")
    for name in ("mesh", "tensorflow"):
        assert call_command("train", *more, f"--model_dir={runs / name}") == 0
    actual, expected = (
        [r for r in records(runs / name) if r.pop("step") == 7] for name in ("mesh", "tensorflow")
    )
    assert [r.pop("kind") for r in actual] == [r.pop("kind") for r in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh=batch:2,model:2",), "--mesh=batch:2,model:2 is for 4 devices; there are 1."),
        (("--mesh=data:4",), "--mesh=data:4: write axis:parts with the axes batch and model, .*"),
        (("--mesh=batch:0",), "--mesh=batch:0: write axis:parts .*"),
        (("--mesh=batch:1", "--strategy=one"), ".* leave out --strategy=one."),
        (("--strategy=multi_worker",), "--strategy=multi_worker: under JAX write one of auto, .*"),
        (("--strategy=tpu",), "--strategy=tpu: JAX found no TPU. .*"),
    ],
)
def test_strategies_that_cannot_be(flags, message):
    from tf_teaforn.jax_backend.strategy import make_strategy

    settings = dict(flag.removeprefix("--").split("=") for flag in flags)
    with pytest.raises(UserError, match=f"^{message}$"):
        make_strategy(settings.get("strategy", "auto"), settings.get("mesh"))


def test_a_mesh_is_told_to_jax_alone(flags, call_command, capsys, tmp_path):
    flags = (*flags, "--train_steps=1", "--mesh=batch:2", f"--model_dir={tmp_path / 'model'}")
    assert call_command("train", *flags) == 2
    expected = "train: --mesh=batch:2 needs JAX: set KERAS_BACKEND=jax.\n"
    assert capsys.readouterr().err == expected
