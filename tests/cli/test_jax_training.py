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

from tests import nano_model
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
        *nano_model.FLAGS,
        "--n=2",
        "--dropout=0",
        "--word_drop=0",
        "--optimizer=sgd",
        "--learning_rate=0.5",
        "--schedule=constant",
        "--warmup_steps=0",
        "--batching=fixed",
        # 20 rows, which four parts of the mesh share without more.
        "--batch_tokens=480",
        "--decode_length=4",
        "--log_every=1",
        "--eval_every=3",
    )


def on_jax(model_dir, flags, devices=1, **environment):
    done = subprocess.run(
        [sys.executable, ROOT / "bin" / "train", *flags, f"--model_dir={model_dir}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "KERAS_BACKEND": "jax",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def runs(flags, call_command, eagerly, tmp_path_factory):
    """{name: folder}: seven steps on TensorFlow; JAX continues from the third to the sixth."""
    folder = tmp_path_factory.mktemp("jax_training")
    whole = folder / "tensorflow"
    with eagerly():
        assert call_command("train", *flags, "--train_steps=7", f"--model_dir={whole}") == 0
    # As if it had ended there: what is compared with the whole run is made by JAX.
    first = [record for record in records(whole) if record["step"] <= 3]
    for name in ("jax", "mesh"):
        shutil.copytree(whole, folder / name)
        for later in ("checkpoints/6", "checkpoints/7", "best"):
            shutil.rmtree(folder / name / later)
        lines = "".join(f"{json.dumps(record)}\n" for record in first)
        (folder / name / "metrics.jsonl").write_text(lines)
    more = (*flags, "--train_steps=6")
    on_jax(folder / "jax", more)
    on_jax(folder / "mesh", (*more, "--mesh=batch:4,model:2"), devices=8)
    return folder


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def tensors(folder, file="model", step=6):
    return safetensors.numpy.load_file(folder / "checkpoints" / f"{step}" / f"{file}.safetensors")


def assert_same_records(actual, expected):
    assert [r.pop("kind") for r in actual] == [r.pop("kind") for r in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def assert_same_checkpoints(actual_folder, expected_folder, step):
    for file in ("model", "optimizer"):
        expected = tensors(expected_folder, file, step)
        actual = tensors(actual_folder, file, step)
        assert actual.keys() == expected.keys()
        for path, value in expected.items():
            assert actual[path].shape == value.shape, path
            if value.dtype.kind == "f":
                assert actual[path].dtype == value.dtype, path
                np.testing.assert_allclose(actual[path], value, rtol=0, atol=2e-5, err_msg=path)
            else:
                # Counters have 32 bits under JAX.
                np.testing.assert_array_equal(actual[path], value, err_msg=path)


@pytest.mark.parametrize("name", ["jax", "mesh"])
def test_a_run_changes_to_jax(runs, name):
    actual = records(runs / name)
    expected = [record for record in records(runs / "tensorflow") if record["step"] <= 6]
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.1
    assert [record["step"] for record in expected] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert_same_records(actual, expected)


@pytest.mark.parametrize("name", ["jax", "mesh"])
def test_checkpoints_are_the_same(runs, name):
    assert_same_checkpoints(runs / name, runs / "tensorflow", 6)


@pytest.fixture(scope="module")
def unbroken(flags, tmp_path_factory):
    """Six steps under JAX of what has a state: moments, a schedule, dropout.

    (flags, folder, environment in which what was compiled is found again.)
    """
    more = (
        *flags,
        "--n=1",
        "--dropout=0.1",
        "--word_drop=0.1",
        "--optimizer=adam",
        "--learning_rate=0.003",
        "--schedule=inverse_sqrt",
        "--warmup_steps=4",
        "--train_steps=6",
    )
    root = tmp_path_factory.mktemp("unbroken")
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    on_jax(root / "model", more, **cache)
    return more, root / "model", cache


def test_a_run_continues_under_jax(unbroken, tmp_path):
    flags, folder, cache = unbroken
    model_dir = tmp_path / "model"
    shutil.copytree(folder, model_dir)
    # As if it had been killed at the fourth step.
    shutil.rmtree(model_dir / "checkpoints" / "6")
    on_jax(model_dir, flags, **cache)
    assert records(model_dir) == records(folder)
    for file in ("model", "optimizer"):
        expected, actual = tensors(folder, file), tensors(model_dir, file)
        assert actual.keys() == expected.keys()
        assert any("seed_generator" in path for path in expected) == (file == "optimizer")
        for path, value in expected.items():
            np.testing.assert_array_equal(actual[path], value, err_msg=path)


def test_a_run_changes_back(runs, flags, call_command, eagerly, tmp_path):
    model_dir = shutil.copytree(runs / "mesh", tmp_path / "model")
    with eagerly():
        assert call_command("train", *flags, "--train_steps=7", f"--model_dir={model_dir}") == 0
    actual, expected = (
        [record for record in records(folder) if record["step"] == 7]
        for folder in (model_dir, runs / "tensorflow")
    )
    assert [record["kind"] for record in expected] == ["train", "validation"]
    assert_same_records(actual, expected)
    assert_same_checkpoints(model_dir, runs / "tensorflow", 7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh=batch:2,model:2",), "--mesh=batch:2,model:2 is for 4 devices; there are 1."),
        (("--mesh=data:4",), "--mesh=data:4: write axis:parts with the axes batch and model, .*"),
        (("--mesh=batch:0",), "--mesh=batch:0: write axis:parts .*"),
        (("--mesh=batch:2,batch:1",), "--mesh=batch:2,batch:1: write axis:parts .*, each once, .*"),
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
    line = (
        f"Not enough memory ({reason}). Take a smaller --batch_size (of bin/train: "
        "--micro_batch_tokens or --batch_tokens), --beam_size or model."
    )
    assert capsys.readouterr().err == f"decode: {line}\n"
    monkeypatch.setattr(decode, "decode", lambda values: fail("INTERNAL: of another kind"))
    with pytest.raises(JaxRuntimeError, match="^INTERNAL: of another kind$"):
        call_command("decode")


def test_a_mesh_is_told_to_jax_alone(flags, call_command, capsys, tmp_path):
    flags = (*flags, "--train_steps=1", "--mesh=batch:2", f"--model_dir={tmp_path / 'model'}")
    assert call_command("train", *flags) == 2
    expected = "train: --mesh=batch:2 needs JAX: set KERAS_BACKEND=jax.\n"
    assert capsys.readouterr().err == expected
