"""bin/tpu_check: what it refuses, and with the TPU's compiler installed what it prints."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--task=wmt14_enfr",
    "--model=transformer_tiny",
    "--vocab_size=500",
    "--max_source_length=16",
    "--max_target_length=8",
    "--batch_size=4",
    "--optimizer=adafactor",
)
INSTALLED = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))


def check(*flags, backend="tensorflow"):
    return subprocess.run(
        [sys.executable, ROOT / "bin" / "tpu_check", *SMALL, *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": backend},
    )


def test_the_compiler_is_named_when_missing(call_command, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert call_command("tpu_check", *SMALL) == 2
    message = "The TPU's compiler needs jax and libtpu: pip install 'tf-teaforn[tpu_check]'."
    assert capsys.readouterr().err == f"tpu_check: {message}\n"


def test_wrong_numbers(call_command, capsys):
    assert call_command("tpu_check", *SMALL, "--n=1,two") == 2
    expected = "tpu_check: --n=1,two: write whole numbers, e.g. 1,2,3.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.skipif(not INSTALLED, reason="libtpu is not installed")
class TestCompiler:
    @pytest.mark.parametrize("flag", ["--topology=v9:1x1", "--topology=v5e"])
    def test_unknown_topologies(self, flag):
        done = check(flag)
        assert done.returncode == 2 and flag in done.stderr.splitlines()[-1]

    def test_rows_that_the_chips_cannot_share(self):
        done = check("--topology=v5e:2x2", "--batch_size=6")
        assert done.returncode == 2
        assert "multiple of the 4 devices" in done.stderr.splitlines()[-1]

    @pytest.mark.parametrize("backend", ["tensorflow", "jax"])
    def test_memory_and_arithmetic(self, backend, tmp_path):
        output = f"--output={tmp_path / 'steps.jsonl'}"
        done = check("--n=1,2", output, backend=backend)
        assert done.returncode == 0, done.stderr
        _, head, one, two = (line.split() for line in done.stdout.splitlines())
        assert head == ["n", "remat", "arguments", "temporaries", "program", "total", "ratio"] + [
            "fits",
            "seconds",
            "TFLOP",
            "ratio",
        ]
        assert one[:2] == ["1", "none"] and two[:2] == ["2", "none"] and one[-4] == "yes"
        assert float(one[-1]) == 1.0 and 1.1 < float(two[-1]) < 1.6
        records = [json.loads(line) for line in open(output.partition("=")[2])]
        assert [record["step"]["settings"]["n"] for record in records] == [1, 2]
        # Taken from the file: a compilation would not take exactly as long again.
        records[0]["measured"]["seconds"] = 12345
        (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        again = check("--n=1,2", output, backend=backend).stdout.splitlines()
        assert again[2].split()[-3] == "12345" and again[3].split() == two

    def test_several_chips(self):
        done = check("--topology=v5e:2x2", "--n=1", backend="jax")
        assert done.returncode == 0, done.stderr
