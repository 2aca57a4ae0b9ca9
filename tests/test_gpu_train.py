"""benchmarks/gpu_train.py with tiny sizes, where TensorFlow cannot be imported."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks import gpu_train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)


@pytest.fixture
def run(tmp_path):
    """Function that runs it with some flags; the `CompletedProcess`."""
    for name in ("tensorflow", "tensorflow_text", "tensorflow_datasets"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")

    def run(*flags, **options):
        return subprocess.run(
            [sys.executable, gpu_train.__file__, "--model=transformer_big", *flags],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "KERAS_BACKEND": "jax"},
            **options,
        )

    return run


def test_some_contenders(run):
    done = run("--toy", "--contenders=ours:2", "--seconds=0.05")
    assert done.returncode == 0, done.stderr
    first, *table, records = done.stdout.splitlines()
    row = json.loads(first)["ours:2"]
    assert row["times the first"] == 1.0 and row["card"] == "cpu"
    # Of 4 rows of 8 tokens.
    assert row["target tokens/s"] == pytest.approx(32 / (row["ms a step"] / 1000))
    assert [line.split()[0] for line in table] == ["name", "ours:2"]
    assert [len(turns) for turns in json.loads(records).values()] == [3]


def test_a_contender_that_takes_too_long_is_ended(run):
    done = run("--toy", "--contenders=ours:1,ours:3", "--limit_s=0.1")
    assert done.returncode == 1 and done.stdout == "{}\n"
    stopped = [line for line in done.stderr.splitlines() if line.startswith("ours:")]
    assert stopped == [f"ours:{n} was ended after 0.1 s (--limit_s)" for n in (1, 3)]


def test_nothing_is_measured_without_a_gpu(run):
    done = run("--contenders=ours:1")
    assert done.returncode == 1 and done.stdout == "{}\n"
    *_, reason, stopped = done.stderr.splitlines()
    assert reason == "JAX found no GPU but cpu: install jax[cuda13]."
    assert stopped == "ours:1 stopped with exit code 1"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--peers=no/python", "--peers=no/python: there is no such program"),
        ("--contenders=eager", "--contenders=eager: there are ours:1, ours:2, ours:3"),
    ],
)
def test_what_cannot_run_is_told_at_once(monkeypatch, capsys, flag, message):
    monkeypatch.setattr(sys, "argv", ["gpu_train.py", "--model=transformer_big", flag])
    with pytest.raises(SystemExit) as ended:
        gpu_train.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"gpu_train.py: error: {message}"
