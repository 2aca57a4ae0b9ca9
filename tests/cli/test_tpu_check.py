"""bin/tpu_check: what it refuses, and with the TPU's compiler installed what it prints."""

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import keras
import pytest

from tests import nano_model  # noqa: F401
from tf_teaforn import TeaForN, build_model
from tf_teaforn.cli import tpu_check
from tf_teaforn.config import RunConfig
from tf_teaforn.errors import UserError
from tf_teaforn.flops import training_flops
from tf_teaforn.optimizers import Adafactor

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--task=wmt14_enfr",
    "--module_import=tests.nano_model",
    "--model=transformer_thin",
    "--vocab_size=500",
    "--max_source_length=16",
    "--max_target_length=8",
    "--batch_size=4",
    "--optimizer=adafactor",
)
SHAPE = {
    "batch_size": 4,
    "source_length": 16,
    "target_length": 8,
    "vocabulary_size": 500,
    "num_layers": 1,
    "hidden_dim": 128,
    "intermediate_dim": 512,
}
INSTALLED = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))


def state_bytes():
    """Of weights and optimizer; arrays on a TPU are padded to multiples of some sizes."""
    model = TeaForN(build_model("transformer_thin", 500), n=1)
    optimizer = Adafactor()
    optimizer.build(model.trainable_variables)
    variables = [*model.weights, *optimizer.variables]
    return sum(4 * math.prod(variable.shape) for variable in variables)


def check(*flags, backend="tensorflow"):
    return subprocess.run(
        [sys.executable, ROOT / "bin" / "tpu_check", *SMALL, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": backend},
    )


def print_exchanging_loops():
    """Prints in which computations 4 chips add up the gradient of a loss by the softmax weights.

    Called in a process of JAX's.
    """
    import jax

    from tf_teaforn import objective
    from tf_teaforn.jax_backend.tpu import Topology

    tpu_check._prepare_environment()
    # In 16 chunks.
    objective._CHUNK_LOGITS = 2**16
    mesh = jax.sharding.Mesh(Topology("v5e:2x2").devices, "batch")

    def array(dtype, *shape, axes=("batch",)):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    loss = jax.grad(lambda *args: objective.cross_entropy(*args)[0], argnums=1)
    rows, table = array("bfloat16", 2048, 128), array("float32", 512, 128, axes=())
    targets, coefficients = array("int32", 2048), array("float32", 2048)
    program = jax.jit(loss).lower(rows, table, targets, coefficients).compile().as_text()
    computation = None
    for line in program.splitlines():
        if line.endswith(" {"):
            computation = line.split(" (")[0]
        if re.search(r"= f32\[512,128\]\S* all-reduce(-start)?\(", line):
            print(computation)


def test_the_compiler_is_named_when_missing(call_command, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert call_command("tpu_check", *SMALL) == 2
    message = "The TPU's compiler needs jax and libtpu: pip install 'tf-teaforn[tpu_check]'."
    assert capsys.readouterr().err == f"tpu_check: {message}\n"


def test_wrong_numbers(call_command, capsys):
    assert call_command("tpu_check", *SMALL, "--n=1,two") == 2
    assert capsys.readouterr().err == "tpu_check: --n=1,two: write whole numbers, e.g. 1,4.\n"
    assert call_command("tpu_check", *SMALL, "--n=") == 2
    assert capsys.readouterr().err == "tpu_check: --n=: write whole numbers, e.g. 1,4.\n"
    assert call_command("tpu_check", *SMALL, "--remat=") == 2
    assert "--remat= is empty. " in capsys.readouterr().err


@pytest.fixture
def no_compiler(monkeypatch):
    """Whoever asks the compiler for anything fails."""
    monkeypatch.setattr(tpu_check, "_prepare_environment", lambda: pytest.fail("asked"))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "text",
    ['{"kind": "train", "step": 3}\n', "[1, 2]\n", "a\tb\n", '{"step": {}, "measured": {}}\n{}\n'],
)
def test_a_file_of_another_kind_stays_as_it_is(call_command, capsys, tmp_path, text):
    output = tmp_path / "other"
    output.write_text(text)
    assert call_command("tpu_check", *SMALL, f"--output={output}") == 2
    message = f"--output={output} has other lines than bin/tpu_check writes. Name another file."
    assert capsys.readouterr().err == f"tpu_check: {message}\n"
    assert output.read_text() == text


@pytest.mark.usefixtures("no_compiler")
def test_a_file_that_cannot_be_written(call_command, capsys, tmp_path):
    output = tmp_path / "none" / "steps.jsonl"
    assert call_command("tpu_check", *SMALL, f"--output={output}") == 2
    assert capsys.readouterr().err == f"tpu_check: {output}: No such file or directory.\n"


def test_a_torn_line_costs_no_other(tmp_path):
    records = [{"step": {"n": n}, "measured": {"flops": n}} for n in (1, 2)]
    first, second = map(json.dumps, records)
    output = tmp_path / "steps.jsonl"
    output.write_text(f"{first}\n{second[:20]}")
    assert tpu_check._known(output) == records[:1]
    with output.open("a") as file:
        print(second, file=file)
    assert tpu_check._known(output) == records


def test_ratios_are_to_the_first_line():
    from tf_teaforn.tpu_check import Table

    table = Table(("n", "remat"))
    sizes = {"arguments": 2**30, "temporaries": 3 * 2**30, "total": 4 * 2**30, "program": 2**20}
    fits = {**sizes, "seconds": 1.0}
    settings = {"n": 1, "remat": "none"}
    first = table.line(settings, {**fits, "flops": 2e12}).split()
    assert first[-5:] == ["1.000", "yes", "1", "2.000", "1.000"]
    second = table.line(settings, {**fits, "total": 5 * 2**30, "flops": 3e12}).split()
    assert second[-5:] == ["1.250", "yes", "1", "3.000", "1.500"]
    table = Table(("n", "remat"))
    line = table.line(settings, {"needs": "17.00G of 16.00G", "seconds": 1.0, "flops": 2e12})
    assert " no, needs 17.00G of 16.00G " in line
    assert table.line(settings, {**fits, "flops": 3e12}).split()[-5] == "nan"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The steps of N = 1 and 2 on a backend, compiled once: (what was printed, the file)."""

    @functools.cache
    def compile_on(backend):
        output = tmp_path_factory.mktemp(backend) / "steps.jsonl"
        done = check("--n=1,2", f"--output={output}", backend=backend)
        assert done.returncode == 0, done.stderr
        return done.stdout, output

    return compile_on


@pytest.fixture
def chips(monkeypatch):
    """Sets how many chips a topology has; the compiler, which tells it, is not asked."""
    from tf_teaforn.jax_backend import tpu

    for name, value in tpu_check._ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))

    def have(count):
        topology = types.SimpleNamespace(devices=[None] * count, memory=2**34)
        monkeypatch.setattr(tpu, "Topology", lambda name: topology)

    return have


def measurements(output):
    return [json.loads(line)["measured"] for line in output.read_text().splitlines()]


@pytest.mark.skipif(not INSTALLED, reason="libtpu is not installed")
class TestCompiler:
    def test_an_unknown_version(self):
        from tf_teaforn.jax_backend.tpu import Topology

        expected = "--topology=v9:1x1: write a version, v2, v3, v4, v5e, v5p, v6e, and a shape, "
        with pytest.raises(UserError, match=f"^{expected}such as v5e:1x1.$"):
            Topology("v9:1x1")

    def test_an_unknown_shape(self):
        """In the compiler's own words."""
        done = check("--topology=v5e:1x1x1x1")
        assert done.returncode == 2
        expected = "tpu_check: --topology=v5e:1x1x1x1: INVALID_ARGUMENT: "
        assert done.stderr.splitlines()[-1].startswith(expected)

    def test_rows_that_the_chips_cannot_share(self, chips, call_command, capsys):
        chips(4)
        assert call_command("tpu_check", *SMALL, "--topology=v5e:2x2", "--batch_size=6") == 2
        assert "multiple of the 4 devices" in capsys.readouterr().err.splitlines()[-1]

    @pytest.mark.parametrize("backend", ["tensorflow", "jax"])
    def test_memory_and_arithmetic(self, backend, compiled):
        printed, output = compiled(backend)
        _, head, one, two = (line.split() for line in printed.splitlines())
        assert " ".join(head) == (
            "n remat arguments temporaries total program ratio fits seconds TFLOP ratio"
        )
        assert one[:2] == ["1", "none"] and two[:2] == ["2", "none"] and one[-4] == "yes"
        assert float(one[-1]) == 1.0 and 1.1 < float(two[-1]) < 1.6
        records = [json.loads(line) for line in output.open()]
        assert [record["step"]["settings"]["n"] for record in records] == [1, 2]
        for n, record in enumerate(records, 1):
            measured = record["measured"]
            assert measured["flops"] == pytest.approx(training_flops(**SHAPE, n=n), rel=0.02)
            assert measured["arguments"] == pytest.approx(state_bytes(), rel=0.1)

    def test_what_is_known_is_taken_from_the_file(
        self, compiled, chips, call_command, capsys, tmp_path
    ):
        # What was compiled on another backend is not known.
        printed, output = compiled(keras.backend.backend())
        records = [json.loads(line) for line in output.open()]
        # A compilation would not take exactly as long.
        records[0]["measured"]["seconds"] = 12345
        # It was written before there was such a setting.
        del records[0]["step"]["settings"]["clip_norm"]
        known = tmp_path / "steps.jsonl"
        known.write_text("\n".join(map(json.dumps, records)) + "\n")
        chips(1)
        assert call_command("tpu_check", *SMALL, "--n=1,2", f"--output={known}") == 0
        again = capsys.readouterr().out.splitlines()
        assert again[2].split()[-3] == "12345" and again[3] == printed.splitlines()[3]

    def test_several_chips(self, tmp_path):
        output = tmp_path / "steps.jsonl"
        done = check("--topology=v5e:2x2", "--n=1", f"--output={output}", backend="jax")
        assert done.returncode == 0, done.stderr
        (measured,) = measurements(output)
        # Of all four together; each holds the whole model.
        assert measured["flops"] == pytest.approx(training_flops(**SHAPE), rel=0.02)
        assert measured["arguments"] == pytest.approx(state_bytes(), rel=0.1)

    def test_sums_over_chips_are_taken_once(self):
        """Not for every chunk of the logits, of which large batches have dozens."""
        call = f"import {__name__} as tests; tests.print_exchanging_loops()"
        done = subprocess.run(
            [sys.executable, "-c", call],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": "jax"},
        )
        assert done.returncode == 0, done.stderr
        (computation,) = done.stdout.splitlines()
        assert computation.startswith("ENTRY ")

    def test_parts_are_those_of_a_device(self):
        """Each of 4 devices computes 5 rows, 2 at a time: as 6 rows, the last one empty."""
        from tf_teaforn.jax_backend.tpu import Topology
        from tf_teaforn.tpu_check import measure

        settings = dict(flag.removeprefix("--").split("=") for flag in SMALL)
        lengths = {name: int(settings[name]) for name in settings if name.endswith("_length")}
        config = RunConfig(task=settings["task"]).replace(
            {"model": settings["model"], "vocab_size": 500, "n": 1, **lengths}
        )
        # Without the compiler, which nothing asks.
        chips = object.__new__(Topology)
        chips.devices = [None] * 4
        parts, whole = (
            measure(config.replace({"micro_batch_tokens": tokens}), chips, 20, compiled=False)
            for tokens in (128, None)
        )
        assert parts["flops"] / whole["flops"] == pytest.approx(6 / 5, rel=0.01)

    def test_the_step_is_that_of_the_settings(self, compiled, tmp_path):
        output = tmp_path / "steps.jsonl"
        settings = "--n=1", "--batching=pack", "--on_nonfinite=skip"
        done = check(*settings, f"--output={output}", backend="jax")
        assert done.returncode == 0, done.stderr
        (other,) = measurements(output)
        plain, _ = measurements(compiled("jax")[1])
        # Segments and positions of a batch; masks, and a choice between two states. Of so small a
        # model temporaries say little.
        assert other["arguments"] > plain["arguments"]
        assert other["program"] > plain["program"]
