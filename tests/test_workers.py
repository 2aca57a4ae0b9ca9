"""Two processes of bin/train on this machine are one, also when one of them is taken away."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests import nano_model
from tf_teaforn import checkpoint

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60


def addresses():
    """Two free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    found = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


class Pair:
    """Both workers of a run."""

    def __init__(self, flags, folder):
        cluster = {"worker": addresses()}
        self.logs = [folder / f"worker{index}.txt" for index in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, ROOT / "bin" / "train", *flags, "--strategy=multi_worker"],
                        stdout=file,
                        stderr=file,
                        cwd=ROOT,
                        env={**os.environ, "TF_CONFIG": json.dumps(config)},
                    )
                )

    def wait_for_step_after(self, model_dir, step):
        give_up = time.monotonic() + 600
        while max(checkpoint.steps(model_dir), default=0) <= step:
            assert all(process.poll() is None for process in self.processes), self.output(0)
            if time.monotonic() > give_up:
                self.kill()
                pytest.fail(self.output(0) + self.output(1))
            time.sleep(0.01)

    def kill(self):
        for process in self.processes:
            process.kill()

    def exit_codes(self):
        try:
            return [process.wait(timeout=300) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(self.output(0) + self.output(1))

    def output(self, index):
        return self.logs[index].read_text()


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory, call_command):
    """(folder of one process, folder of two, what happened to the two)."""
    folder = tmp_path_factory.mktemp("workers")
    flags = (
        "--task=text",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        *nano_model.FLAGS,
        "--vocab_size=310",
        "--max_source_length=24",
        "--max_target_length=24",
        # An even number of rows for every length.
        "--batch_tokens=192",
        "--dropout=0",
        "--n=1",
        "--optimizer=sgd",
        "--learning_rate=0.1",
        "--schedule=constant",
        "--warmup_steps=0",
        f"--train_steps={STEPS}",
        f"--eval_every={STEPS}",
        "--decode_length=8",
        "--checkpoint_every=1",
        "--keep=100",
        "--log_every=1",
    )
    one, two = folder / "one", folder / "two"
    assert call_command("train", *flags, f"--model_dir={one}", "--strategy=one") == 0
    flags = (*flags, f"--model_dir={two}", f"--vocab={one / 'vocab.model'}")
    happened = {}

    pair = Pair(flags, folder)
    pair.wait_for_step_after(two, 0)
    pair.processes[1].send_signal(signal.SIGTERM)
    happened["stopped"] = pair.exit_codes(), pair.output(0)

    pair = Pair(flags, folder)
    pair.wait_for_step_after(two, max(checkpoint.steps(two)))
    pair.processes[1].kill()
    happened["killed"] = pair.exit_codes(), pair.output(0)

    pair = Pair(flags, folder)
    happened["finished"] = pair.exit_codes(), pair.output(0) + pair.output(1)
    return one, two, happened


def test_two_workers_are_one_process(run):
    one, two, happened = run
    assert happened["finished"][0] == [0, 0], happened["finished"][1]
    for step, tolerance in ((5, 1e-6), (STEPS, 1e-5)):
        expected, found = (
            safetensors.numpy.load_file(folder / "checkpoints" / str(step) / "model.safetensors")
            for folder in (one, two)
        )
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)
    for name in ("loss", "tokens"):
        values = [
            [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (one, two)
        ]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-5)


def test_a_signal_to_one_stops_both_and_a_lost_one_is_told_of(run):
    _, _, happened = run
    codes, output = happened["stopped"]
    assert codes == [143, 143], output
    assert "The same command continues from there." in output
    codes, output = happened["killed"]
    assert codes == [75, -signal.SIGKILL], output
    assert "Another worker has stopped or cannot be reached." in output.splitlines()[-1]
