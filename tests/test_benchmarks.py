"""What the benchmarks share, and what they say when a program or a model fails."""

import json
import sys

import pytest

from benchmarks import load
from benchmarks.contender import Contender

# A negative factor ends it, at once or just after its answer; 0 takes long.
PROGRAM = """
import os, sys, threading, time
from benchmarks.contender import take_turns

def measure(factor):
    if factor == 0:
        time.sleep(60)
    if factor == -1:
        threading.Timer(1, os._exit, [3]).start()
    if factor == -2:
        sys.exit(4)
    return {"seconds": 2 * factor}

take_turns(measure)
"""


@pytest.fixture
def contender():
    """Function that starts `PROGRAM`."""
    started = []

    def start(**options):
        started.append(Contender("one", [sys.executable, "-c", PROGRAM], **options))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def test_turns_have_arguments(contender):
    one = contender()
    assert one.turn(factor=2) == {"seconds": 4}
    one.turn(factor=5)
    one.turn(factor=1)
    assert one.measured == [{"seconds": 4}, {"seconds": 10}, {"seconds": 2}]
    assert one.median("seconds") == 4


def test_the_end_between_turns_is_told(contender):
    one = contender()
    assert one.turn(factor=-1) == {"seconds": -2}
    assert one._process.wait(60) == 3
    with pytest.raises(RuntimeError, match="^one stopped with exit code 3$"):
        one.turn(factor=1)


def test_the_end_in_a_turn_is_told(contender):
    with pytest.raises(RuntimeError, match="^one stopped with exit code 4$"):
        contender().turn(factor=-2)


def test_the_end_by_its_limit_is_told(contender):
    one = contender(limit_s=2)
    with pytest.raises(RuntimeError, match=r"^one was ended after 2 s \(--limit_s\)$"):
        one.turn(factor=0)


@pytest.mark.parametrize("failing", [True, False])
def test_load_has_a_result_whatever_fails(tmp_path, monkeypatch, capsys, failing):
    texts, output = tmp_path / "texts", tmp_path / "load.json"
    texts.write_text("a\nb\n")
    alone = []

    def answer(asked):
        if failing and len(alone) == 2:
            raise ValueError("too many")
        alone.extend(asked[: 2 - len(alone)])
        return [text.upper() for text in asked]

    monkeypatch.setattr(load, "signature_of", lambda folder: answer)
    monkeypatch.setattr(load, "memory_megabytes", lambda: (2.0, 1.0))
    flags = ["--export_dir=none", f"--input={texts}", "--minutes=0.002", "--clients=2"]
    monkeypatch.setattr(sys, "argv", ["load.py", *flags, f"--output={output}"])
    with pytest.raises(SystemExit) as ended:
        load.main()
    assert ended.value.code == failing
    result = json.loads(output.read_text())
    assert set(result["errors"]) == ({"ValueError('too many')"} if failing else set())
    assert (result["requests"] == 0) == failing
    assert ("p50_seconds" in result) != failing
    if not failing:
        assert 0 < result["p50_seconds"] <= result["p95_seconds"] < 0.12
    assert len(result["memory"]) == 11 and not result["different_answers"]
    assert "resident MB" in capsys.readouterr().out
