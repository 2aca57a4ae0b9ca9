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

from tf_teaforn.cli import decode
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


def tensors(folder, file="model"):
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
        expected, actual = tensors(runs / "tensorflow", file), tensors(runs / name, file)
        assert actual.keys() == expected.keys()
        for path, value in expected.items():
            assert actual[path].shape == value.shape, path
            if value.dtype.kind == "f":
                assert actual[path].dtype == value.dtype, path
                np.testing.assert_allclose(actual[path], value, rtol=0, atol=2e-5, err_msg=path)
            else:
                # Counters have 32 bits under JAX.
                np.testing.assert_array_equal(actual[path], value, err_msg=path)


@pytest.fixture(scope="module")
def unbroken(flags, tmp_path_factory):
    """(flags, folder) of six steps under JAX of what has a state: moments, a schedule, dropout."""
    more = (
        *flags,
        "--dropout=0.1",
        "--word_drop=0.1",
        "--optimizer=adam",
        "--learning_rate=0.003",
        "--schedule=inverse_sqrt",
        "--warmup_steps=4",
        "--train_steps=6",
    )
    folder = tmp_path_factory.mktemp("unbroken") / "model"
    on_jax(folder, more)
    return more, folder


def test_a_run_continues_under_jax(unbroken, tmp_path):
    flags, folder = unbroken
    model_dir = tmp_path / "model"
    shutil.copytree(folder, model_dir)
    # As if it had been killed at the fourth step.
    shutil.rmtree(model_dir / "checkpoints" / "6")
    on_jax(model_dir, flags)
    assert records(model_dir) == records(folder)
    for file in ("model", "optimizer"):
        expected, actual = tensors(folder, file), tensors(model_dir, file)
        assert actual.keys() == expected.keys()
        assert any("seed_generator" in path for path in expected) == (file == "optimizer")
        for path, value in expected.items():
            np.testing.assert_array_equal(actual[path], value, err_msg=path)


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


def test_several_processes_are_refused(monkeypatch):
    import jax

    from tf_teaforn.jax_backend.strategy import make_strategy

    monkeypatch.setattr(jax, "process_count", lambda: 4)
    message = (
        "KERAS_BACKEND=jax runs in one process, and JAX found 4: take the devices of one machine. "
        "--strategy=multi_worker is for TensorFlow."
    )
    for settings in {}, {"name": "one"}, {"mesh": "batch:1"}:
        with pytest.raises(UserError) as refused:
            make_strategy(**settings)
        assert str(refused.value) == message


@pytest.mark.parametrize(("backend", "hidden"), [("jax", [([], "GPU")]), ("tensorflow", [])])
def test_tensorflow_leaves_gpus_to_jax(call_command, monkeypatch, capsys, backend, hidden):
    import tensorflow as tf

    calls = []
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *call: calls.append(call))
    monkeypatch.setattr(decode, "decode", lambda values: print(f"decoded after {len(calls)}"))
    assert call_command("decode", "--model_dir=model") == 0
    assert calls == hidden and capsys.readouterr().out == f"decoded after {len(hidden)}\n"


def test_too_little_memory_is_told_in_a_line(call_command, monkeypatch, capsys):
    from jax.errors import JaxRuntimeError

    def fail(text):
        raise JaxRuntimeError(text)

    reason = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
    monkeypatch.setattr(decode, "decode", lambda values: fail(f"{reason}\nAllocator: x"))
    assert call_command("decode") == 2
    line = f"Not enough memory ({reason}). Take a smaller beam, batch or model."
    assert capsys.readouterr().err == f"decode: {line}\n"
    monkeypatch.setattr(decode, "decode", lambda values: fail("INTERNAL: of another kind"))
    with pytest.raises(JaxRuntimeError, match="^INTERNAL: of another kind$"):
        call_command("decode")


def test_a_mesh_is_told_to_jax_alone(flags, call_command, capsys, tmp_path):
    flags = (*flags, "--train_steps=1", "--mesh=batch:2", f"--model_dir={tmp_path / 'model'}")
    assert call_command("train", *flags) == 2
    expected = "train: --mesh=batch:2 needs JAX: set KERAS_BACKEND=jax.\n"
    assert capsys.readouterr().err == expected
