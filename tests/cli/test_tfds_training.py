"""bin/train on the TFDS tasks: mock data with the real features, and data prepared on disk."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from tests import nano_model

TRAIN = str(Path(__file__).parents[2] / "bin" / "train")
# Small enough for seconds; what the tasks set for lengths, N and λ stays theirs.
SMALL = (
    *nano_model.FLAGS,
    "--train_steps=2",
    "--eval_every=2",
    "--log_every=1",
    "--warmup_steps=1",
    "--batch_tokens=2048",
    "--decode_length=8",
    "--vocab_size=280",
)


@pytest.fixture
def train(monkeypatch, eagerly):
    """bin/train in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train", *SMALL, *arguments])
        with eagerly():
            runpy.run_path(TRAIN, run_name="__main__")

    return run


def records(model_dir):
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("task", "n", "metric"),
    [("wmt14_ende", 2, "bleu"), ("gigaword", 3, "rougeL")],
)
def test_mock_data(task, n, metric, tmp_path, train):
    with tfds.testing.mock_data(num_examples=40):
        train(f"--task={task}", f"--model_dir={tmp_path}")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["teaforn"]["n"] == n
    assert config["teaforn"]["discount"] == 0.5
    last = records(tmp_path)[-1]
    assert last["kind"] == "validation" and last["step"] == 2
    assert {f"loss_{stage}" for stage in range(n)} <= last.keys() and metric in last
    assert (tmp_path / "best" / "model.safetensors").exists()


def test_mock_documents_are_cut_to_the_tasks_lengths(tmp_path, train):
    with tfds.testing.mock_data(num_examples=12):
        train(
            "--task=cnn_dailymail",
            f"--model_dir={tmp_path}",
            "--max_source_length=8",
            "--max_target_length=4",
        )
    # All of them are longer: without a cut none would be left to train on.
    last = records(tmp_path)[-1]
    assert "rougeLsum" in last and last["tokens"] == 12 * 4


class Wmt14Translate(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set under WMT's name and features, prepared from sentences of its own.

    Registered, it would hide the real builder.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="fr-en", version="1.0.0")]

    def _info(self):
        features = tfds.features.Translation(languages=("en", "fr"))
        return self.dataset_info_from_configs(features=features)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in ("train", "validation", "test")}

    def _generate_examples(self, split):
        for number in range(60):
            yield number, {"en": f"{split} number {number}", "fr": f"{split} numéro {number}"}


def test_prepared_on_disk(tmp_path, train):
    Wmt14Translate(data_dir=tmp_path / "tfds", config="fr-en").download_and_prepare()
    model_dir = tmp_path / "model"
    train(
        "--task=wmt14_enfr",
        f"--model_dir={model_dir}",
        f"--data_dir={tmp_path / 'tfds'}",
        "--vocab_size=285",
    )
    config = json.loads((model_dir / "config.json").read_text())
    assert (config["teaforn"]["n"], config["teaforn"]["discount"]) == (2, 0.5)
    assert "bleu" in records(model_dir)[-1]
    tokens = [r["tokens"] for r in records(model_dir) if r["kind"] == "validation"]
    assert len(tokens) == 1 and tokens[0] > 60 * 3
