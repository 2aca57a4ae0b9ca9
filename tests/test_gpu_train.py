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
def run_toy(tmp_path):
    """Function that runs it with some flags; its output, line by line."""
    for name in ("tensorflow", "tensorflow_text", "tensorflow_datasets"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")

    def run(*flags, **options):
        done = subprocess.run(
            [sys.executable, gpu_train.__file__, "--toy", *flags],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "KERAS_BACKEND": "jax"},
            **options,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_a_turn_of_one_contender(run_toy):
    flags = ("--model=transformer_big", "--contender=ours:2", "--seconds=0.05")
    ready, turn = run_toy(*flags, input="\n")
    assert ready == "measured {}"
    assert json.loads(turn.removeprefix("measured "))["seconds"] > 0
