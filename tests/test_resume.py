"""Runs that are killed at random moments end as if nothing had happened.

The runs are those of bin/train. All are children of one process that has imported TensorFlow but
not used it yet, so that a start takes no more than what comes after the imports.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.checkpoints import tensors
from tf_teaforn import checkpoint

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVAL_EVERY = 24, 12
# Name -> flags, and the signals of further interruptions.
CASES = {
    "bucket": (("--batching=bucket", "--optimizer=adam"), [signal.SIGTERM]),
    "bucket-unshared": (
        (
            "--batching=bucket",
            "--n=2",
            "--noshared",
            "--optimizer=adafactor",
            "--micro_batch_tokens=48",
        ),
        [signal.SIGINT],
    ),
    "pack": (("--batching=pack", "--optimizer=sgd", "--steps_per_execution=3", "--n=2"), []),
    # Where validations have checkpoints of their own.
    "fixed": (
        (
            "--batching=fixed",
            "--optimizer=sgd",
            "--log_every=5",
            "--micro_batch_tokens=48",
            "--checkpoint_every=2",
            "--eval_every=9",
        ),
        [],
    ),
}
# Signals and kills of a case, one of them aimed at a save.
INTERRUPTIONS = 4
# Seconds within which a run starts and takes its steps, however busy the machine.
DEADLINE = 600


class Trainer:
    """Starts bin/train's main function in children of this process.

    Args:
        flags: of every run.
        folder: for what the runs print.
    """

    def __init__(self, flags, folder):
        self.flags = flags
        self.log = folder / "log.txt"

    def start(self, model_dir):
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number in (1, 2):
                os.dup2(descriptor, number)
            sys.argv = ["train", *self.flags, f"--model_dir={model_dir}"]
            from tf_teaforn.cli import train

            train.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def finish(self, model_dir):
        code = exit_code(self.start(model_dir))
        assert code == 0, f"exit code {code}:\n{self.log.read_text()[-3000:]}"


def latest_step(model_dir):
    # Asked so often that what the library does for each would take time from the runs.
    try:
        names = [entry.name for entry in os.scandir(model_dir / "checkpoints")]
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def wait_for_step(trainer, model_dir, step, child, seconds=math.inf):
    """Waits until the checkpoint of a step is there, the run has ended or the time is over."""
    start = time.monotonic()
    while latest_step(model_dir) < step and time.monotonic() - start < seconds:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        if time.monotonic() - start > DEADLINE:
            os.kill(child, signal.SIGKILL)
            raise TimeoutError(f"no step {step}:\n{trainer.log.read_text()[-3000:]}")
        time.sleep(0.02)


def halt(child):
    """Halts a run, until SIGCONT, so that its files can be looked at; False if it has ended."""
    os.kill(child, signal.SIGSTOP)
    ended = os.WEXITED | os.WSTOPPED | os.WNOWAIT
    return os.waitid(os.P_PID, child, ended).si_code == os.CLD_STOPPED


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def unfinished_saves(model_dir):
    return list((model_dir / "checkpoints").glob("*.tmp"))


def kill_in_save(trainer, model_dir):
    """Starts a run and kills it in the middle of a save; returns (exit code, whether it was)."""
    step = latest_step(model_dir) + 1
    child = trainer.start(model_dir)
    # Which removes what an earlier kill may have left.
    wait_for_step(trainer, model_dir, step, child)
    while halt(child) and not unfinished_saves(model_dir):
        os.kill(child, signal.SIGCONT)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return exit_code(child), bool(unfinished_saves(model_dir))


def kill(trainer, model_dir, moments):
    """Starts a run and kills it while it starts or after some steps of its own; its exit code."""
    # A run that goes on for another two steps has not ended when the signal comes.
    last = STEPS - 2
    step = min(latest_step(model_dir) + moments.randint(1, 8), last)
    child = trainer.start(model_dir)
    if moments.random() < 0.2:
        wait_for_step(trainer, model_dir, last, child, moments.uniform(0, 3))
    else:
        wait_for_step(trainer, model_dir, step, child)
        time.sleep(moments.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    return exit_code(child)


def stop(trainer, model_dir, number):
    """Sends a run SIGTERM or SIGINT; returns (signal, exit code, steps that it still took)."""
    step = latest_step(model_dir) + 1
    child = trainer.start(model_dir)
    wait_for_step(trainer, model_dir, step, child)
    halt(child)
    step = latest_step(model_dir)
    os.kill(child, number)
    os.kill(child, signal.SIGCONT)
    code = exit_code(child)
    return number, code, latest_step(model_dir) - step


def run_case(name, folder):
    """One undisturbed run and one that is interrupted; writes what happened to result.json."""
    flags, signals = CASES[name]
    corpus = folder.parent / "corpus"
    from tests import nano_model

    flags = (
        "--task=text",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        *nano_model.FLAGS,
        f"--vocab={corpus / 'vocab.model'}",
        "--n=1",
        "--max_source_length=24",
        "--max_target_length=24",
        "--batch_tokens=128",
        "--learning_rate=0.01",
        "--warmup_steps=4",
        "--decode_length=8",
        f"--train_steps={STEPS}",
        f"--eval_every={EVAL_EVERY}",
        "--checkpoint_every=1",
        "--log_every=1",
        *flags,
    )
    trainer = Trainer(flags, folder)
    trainer.finish(folder / "whole")
    moments = random.Random(name)
    stopped = [stop(trainer, folder / "parts", number) for number in signals]
    # Random moments may miss all saves.
    code, in_save = kill_in_save(trainer, folder / "parts")
    random_kills = INTERRUPTIONS - len(stopped) - 1
    codes = [code, *(kill(trainer, folder / "parts", moments) for _ in range(random_kills))]
    trainer.finish(folder / "parts")
    result = {"stopped": stopped, "kills": codes, "in_save": in_save}
    (folder / "result.json").write_text(json.dumps(result))


def run_all(folder):
    """Runs all cases, two at a time."""
    # Imported here, once for all children.
    import tf_teaforn.training  # noqa: F401
    from tf_teaforn.cli import app, train  # noqa: F401

    app.quiet_tensorflow = lambda: None
    running = {}
    for name in CASES:
        if len(running) == 2:
            child, status = os.wait()
            assert status == 0, running[child]
            del running[child]
        (folder / name).mkdir()
        child = os.fork()
        if not child:
            code = 1
            try:
                run_case(name, folder / name)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        running[child] = name
    while running:
        child, status = os.wait()
        assert status == 0, running[child]
        del running[child]


@pytest.fixture(scope="module")
def results(corpus, tmp_path_factory, call_command):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "corpus").symlink_to(corpus)
    if not (corpus / "vocab.model").exists():
        code = call_command(
            "build_vocab",
            "--task=text",
            *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid")),
            "--vocab_size=310",
            f"--output={corpus / 'vocab.model'}",
        )
        assert code == 0
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests import test_resume as t; t.run_all(t.Path({str(folder)!r}))",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "TF_DETERMINISTIC_OPS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        check=True,
    )
    return folder


def files(model_dir):
    """Names of all files but TensorBoard's, of which every start writes one."""
    names = {path.relative_to(model_dir) for path in model_dir.rglob("*")}
    return {name for name in names if name.parts[0] != "tensorboard"}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_killed_ends_like_one_that_was_not(results, case):
    whole, parts = (results / case / name for name in ("whole", "parts"))
    for step in (EVAL_EVERY, STEPS):
        expected, found = tensors(whole, step), tensors(parts, step)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(value, found[name], err_msg=f"{step} {name}")
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    for name in ("model.safetensors", "state.json"):
        assert (whole / "best" / name).read_bytes() == (parts / "best" / name).read_bytes()
    assert checkpoint.steps(parts) == checkpoint.steps(whole)
    assert files(parts) == files(whole)


@pytest.mark.parametrize("case", CASES)
def test_the_runs_were_really_killed(results, case):
    result = json.loads((results / case / "result.json").read_text())
    assert result["kills"] == [-signal.SIGKILL] * (INTERRUPTIONS - len(CASES[case][1]))
    assert result["in_save"]


def test_signals_end_a_run_at_once_and_with_their_exit_code(results):
    stopped = [
        stop
        for case in CASES
        for stop in json.loads((results / case / "result.json").read_text())["stopped"]
    ]
    assert {number for number, _, _ in stopped} == {signal.SIGTERM, signal.SIGINT}
    for number, code, steps in stopped:
        assert code == 128 + number
        # The step that is under way, and the next where that one is about to be saved.
        assert steps <= 2


@pytest.mark.parametrize("case", CASES)
def test_tensorboard_shows_each_point_once(results, case):
    values = {}
    for name in ("whole", "parts"):
        events = EventAccumulator(str(results / case / name / "tensorboard"), {"tensors": 0})
        events.Reload()
        values[name] = [point.step for point in events.Tensors("loss")]
    assert values["whole"] == values["parts"]
