"""Runs that are continued, and runs that go wrong."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks  # noqa: F401
import tf_teaforn
from tests import nano_model
from tests.checkpoints import tensors
from tf_teaforn import checkpoint, lock, metrics, training
from tf_teaforn import model_dir as model_dirs
from tf_teaforn.config import RunConfig
from tf_teaforn.data.tokenizer import train_sentencepiece
from tf_teaforn.data.tokenizers import load_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.task import get_task
from tf_teaforn.tf_backend import nonfinite, step_runner


@pytest.fixture
def train(corpus, small_model, call_command):
    """bin/train on the corpus, in this process; returns its exit code."""

    def run(model_dir, *flags):
        return call_command(
            "train",
            "--task=text",
            *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
            *small_model,
            "--log_every=1",
            "--warmup_steps=1",
            f"--model_dir={model_dir}",
            *flags,
        )

    return run


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    """What a run has tokenised, the next ones find there."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def compiled(train, cache_dir, monkeypatch):
    """`train` with a model that compiles fast, and with a fixed score in place of a search."""
    scored = metrics.MetricResult({"bleu": 1.0, "rougeL": 1.0}, {})
    monkeypatch.setattr(training, "evaluate_translator", lambda *_: scored)

    def run(model_dir, *flags):
        fixed = (*nano_model.FLAGS, "--n=1", "--decode_length=4", f"--cache_dir={cache_dir}")
        return train(model_dir, *fixed, *flags)

    return run


@pytest.fixture
def nano(compiled, eagerly):
    """`compiled` without a compilation, for what a run does around its steps."""

    def run(*args):
        with eagerly():
            return compiled(*args)

    return run


def test_weights_that_are_not_finite_are_never_saved(nano, tmp_path, capsys):
    flags = (
        "--n=2",
        "--learning_rate=1e38",
        "--eval_every=9",
        "--checkpoint_every=1",
        "--train_steps=5",
    )
    assert nano(tmp_path, *flags) == 2
    error = capsys.readouterr().err
    assert "Not a finite number at step 2: the loss of stage 0, the loss of stage 1" in error
    # Its batch is what the order of the data says, in the words of the corpus.
    assert re.search(r"has the training examples \d+, \d+.* begins: '(I see|you have) the ", error)
    assert "Good checkpoints: 1." in error
    assert not (tmp_path / "best").exists()
    for step in checkpoint.steps(tmp_path):
        assert all(np.isfinite(value).all() for value in tensors(tmp_path, step).values())


def test_settings_may_change_until_there_is_a_checkpoint(nano, tmp_path, capsys):
    assert nano(tmp_path, "--train_steps=2", "--learning_rate=1e38", "--eval_every=1") == 2
    assert checkpoint.steps(tmp_path) == []
    assert nano(tmp_path, "--train_steps=2", "--learning_rate=1e-3", "--eval_every=1") == 0
    assert nano(tmp_path, "--train_steps=2", "--learning_rate=2e-3", "--eval_every=1") == 2
    assert "--learning_rate: 0.001 there, 0.002 here" in capsys.readouterr().err


def test_an_option_that_is_left_out_is_another_run(nano, tmp_path, capsys):
    flags = ("--eval_every=1", "--schedule=linear")
    assert nano(tmp_path, *flags, "--train_steps=1", "--metric=rouge") == 0
    # The rate of a linear schedule depends on the last step.
    assert nano(tmp_path, *flags, "--train_steps=2") == 2
    assert (
        "other settings: --metric: rouge there, bleu here; --train_steps: 1 there, 2 here. "
        in capsys.readouterr().err
    )


def test_the_best_of_weights_that_are_gone_is_replaced(nano, tmp_path):
    flags = ("--train_steps=1", "--eval_every=1")
    assert nano(tmp_path, *flags) == 0
    shutil.rmtree(tmp_path / "checkpoints")
    assert nano(tmp_path, *flags, "--seed=2") == 0
    best, _ = checkpoint.load_weights(tmp_path, "best")
    trained, _ = checkpoint.load_weights(tmp_path, "1")
    assert all((best[name] == trained[name]).all() for name in trained)


def test_of_equal_scores_the_lower_loss_is_best(nano, tmp_path, monkeypatch):
    scores = iter([0.0, 0.0, 1.0, 1.0, 1.0, 0.5])
    fixed = lambda *_: metrics.MetricResult({"bleu": next(scores)}, {})  # noqa: E731
    monkeypatch.setattr(training, "evaluate_translator", fixed)
    flags = ("--eval_every=1", "--schedule=constant", "--learning_rate=0.1", "--patience=3")
    assert nano(tmp_path, *flags, "--train_steps=4") == 0
    # A power cut, a full disk, and a process that was killed while it wrote the next line.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\0\0 0.5}\n{"kind": "tr{"kind": "train", "step": 5}\n{"kind": "tra')
    assert nano(tmp_path, *flags, "--train_steps=9") == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [*map(json.loads, lines)]
    assert [record["step"] for record in records] == [i for i in range(1, 7) for _ in range(2)]
    records = [record for record in records if record["kind"] == "validation"]
    # Only a better score is a gain: the three after step 3 are none.
    assert [record["bleu"] for record in records] == [0, 0, 1, 1, 1, 0.5]
    equal = [record for record in records if record["bleu"] == 1]
    assert len({record["loss_0"] for record in equal}) == 3
    best = min(equal, key=lambda record: record["loss_0"])
    assert checkpoint.resolve(tmp_path, "best").steps == (best["step"],)


def test_a_script_that_rouge_does_not_see_is_told(nano, tmp_path, caplog):
    (tmp_path / "ru.tsv").write_text("I see the cat\tя вижу кота\n")
    flags = ("--train_steps=1", "--metric=rouge", f"--valid_files={tmp_path}/ru.tsv")
    assert nano(tmp_path / "model", *flags) == 0
    assert "Warning: 1 of 1 references have none of the " in caplog.text


def test_the_first_validation_examples_alone_are_scored(nano, corpus, tmp_path, monkeypatch):
    scored = []

    def score(translator, task, sources, references):
        scored.append(list(zip(sources, references, strict=True)))
        return metrics.MetricResult({"bleu": 1.0}, {})

    monkeypatch.setattr(training, "evaluate_translator", score)
    flags = ("--train_steps=1", "--eval_every=1", "--learning_rate=1e-3")
    assert nano(tmp_path, *flags, "--eval_examples=5") == 0
    lines = (corpus / "valid.tsv").read_text().splitlines()[:5]
    assert scored == [[tuple(line.split("\t")) for line in lines]]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    encode = load_tokenizer(tmp_path).encode
    targets = encode([line.partition("\t")[2] for line in lines], 24)
    assert last["kind"] == "validation" and last["tokens"] == np.count_nonzero(targets)


@pytest.mark.parametrize(
    ("steps", "digests", "different"),
    [
        ([9, 9], ["ab12cd34ef", "ab12cd34ef"], None),
        ([8, 9, 10], ["ab12cd34ef", "ab12cd34ef", "ab12cd34ef"], "checkpoint"),
        ([9, 9], ["ab12cd34ef", "ffff000011"], "split train"),
    ],
)
def test_workers_that_would_not_compute_one_run_are_refused(steps, digests, different, tmp_path):
    numbers = [int(digest[:5], 16) for digest in digests]
    for step, digest in zip(steps, digests, strict=True):
        sums = iter([sum(x**k for x in facts) for facts in (steps, numbers) for k in range(3)])
        run = types.SimpleNamespace(step=step, state={"data": {"train": digest}})
        run.workers = types.SimpleNamespace(sum=lambda value, sums=sums: float(next(sums)))
        run.model_dir = tmp_path
        refused = pytest.raises(UserError, match=f"another worker has another {different}")
        with refused if different else contextlib.nullcontext():
            training.Run._check_workers(run)


def test_runs_share_a_cache(nano, tmp_path):
    # Vocabularies of the same text are the same.
    flags = ("--train_steps=1", "--learning_rate=1e-3", f"--cache_dir={tmp_path}/cache")
    written = []
    for name in ("a", "b"):
        assert nano(tmp_path / name, *flags) == 0
        assert not (tmp_path / name / "cache").exists()
        manifests = sorted((tmp_path / "cache").glob("*/manifest.json"))
        written.append([(path.parent.name, path.stat().st_mtime_ns) for path in manifests])
    assert len(written[0]) == 2 and written[0] == written[1]
    # A run that goes on may have it elsewhere.
    flags = ("--train_steps=2", "--learning_rate=1e-3", "--cache_dir=")
    assert nano(tmp_path / "b", *flags) == 0
    assert (tmp_path / "b" / "cache").exists()


def test_an_interrupted_checkpoint_that_a_kill_has_left_goes_with_the_next_save(nano, tmp_path):
    assert nano(tmp_path, "--train_steps=2", "--checkpoint_every=1") == 0
    weights, optimizer, state = checkpoint.load_training(tmp_path)
    # Written by a signal, and not yet deleted when step 2 was there.
    checkpoint.save(tmp_path, 1, weights, optimizer, {**state, "interrupted": True}, keep=9)
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert nano(tmp_path, "--train_steps=3", "--checkpoint_every=1") == 0
    assert checkpoint.steps(tmp_path) == [2, 3]
    # The kill may have been in the last save.
    checkpoint.save(tmp_path, 1, weights, optimizer, {**state, "interrupted": True}, keep=9)
    assert nano(tmp_path, "--train_steps=3", "--checkpoint_every=1") == 0
    assert checkpoint.steps(tmp_path) == [2, 3]


def test_a_worker_of_other_settings_is_refused(nano, tmp_path):
    """On a fresh run too, where one process may start anew with other ones."""
    model_dir = tmp_path / "run"
    model_dir.mkdir()
    run = object.__new__(training.Run)
    run.model_dir, run.task = model_dir, get_task("demo_enfr")
    chiefs = RunConfig(task="demo_enfr", data_dir="a")
    model_dirs.write_config(model_dir, chiefs, [])
    run.config = dataclasses.replace(chiefs, data_dir="b")
    run._check_settings(of_all_workers=True)
    for name, value in (("seed", 2), ("log_every", 7), ("batch_tokens", 99), ("train_steps", 3)):
        run.config = chiefs.replace({name: value})
        run._check_settings()
        with pytest.raises(UserError, match=f"other settings: --{name}: .* there, {value} here"):
            run._check_settings(of_all_workers=True)


def test_other_data_need_another_vocabulary(tmp_path):
    """Also while there is no checkpoint, but the vocabulary of the first data."""
    run = object.__new__(training.Run)
    run.model_dir, run.task = tmp_path, get_task("gsg")
    earlier = RunConfig(task="gsg", task_options={"prepared": "/a"})
    model_dirs.write_config(tmp_path, earlier, [])
    run.config = dataclasses.replace(earlier, task_options={"prepared": "/b"})
    with pytest.raises(UserError, match="--prepared: /a there, /b here"):
        run._check_settings()


# Step 3 has its turn anyway, or is saved because of the signal only: then the next save removes it.
@pytest.mark.parametrize(("every", "kept"), [(3, [2, 3, 4]), (5, [2, 4])])
def test_a_signal_after_a_validation(nano, tmp_path, monkeypatch, every, kept):
    update_state = checkpoint.update_state

    def interrupted(model_dir, step, *args, **kwargs):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        update_state(model_dir, step, *args, **kwargs)

    flags = ("--train_steps=4", "--eval_every=2", f"--checkpoint_every={every}")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "update_state", interrupted)
        assert nano(tmp_path, *flags) == 143
    assert checkpoint.steps(tmp_path) == [2, 3] and checkpoint.is_best(tmp_path, 2)
    assert nano(tmp_path, *flags) == 0
    assert checkpoint.steps(tmp_path) == kept


def test_a_validation_that_does_not_end_is_made_up_for(nano, tmp_path, monkeypatch):
    went_on = []

    def failed(*_):
        raise MemoryError

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        went_on.append(True)

    flags = ("--train_steps=3", "--eval_every=2")
    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluate_translator", failed)
        assert nano(tmp_path / "parts", *flags) == 2
        assert checkpoint.steps(tmp_path / "parts") == [2]
        patch.setattr(training, "evaluate_translator", interrupted)
        assert nano(tmp_path / "parts", *flags) == 143
    assert not went_on and checkpoint.steps(tmp_path / "parts") == [2]
    assert not (tmp_path / "parts" / "best").exists()
    assert nano(tmp_path / "parts", *flags) == 0
    assert nano(tmp_path / "whole", *flags) == 0
    parts, whole = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("parts", "whole"))
    assert parts == whole and whole.count('"validation"') == 2
    assert all(checkpoint.is_best(tmp_path / name, 3) for name in ("parts", "whole"))


def test_a_validation_loss_that_is_not_finite(nano, tmp_path, monkeypatch, capsys):
    test = training.StepRunner.test
    flags = ("--train_steps=4", "--eval_every=2", "--checkpoint_every=2", "--keep=1")

    def second(self, dataset):
        logs = test(self, dataset)
        return logs | {"loss": np.nan} if checkpoint.steps(tmp_path)[-1] == 4 else logs

    with monkeypatch.context() as patch:
        patch.setattr(training.StepRunner, "test", second)
        assert nano(tmp_path, *flags) == 2
    assert "step 4: the validation loss." in capsys.readouterr().err
    assert checkpoint.steps(tmp_path) == [2]
    assert nano(tmp_path, *flags) == 0
    assert checkpoint.steps(tmp_path) == [4]


def test_where_a_run_was_stopped_may_become_its_last_step(nano, tmp_path, monkeypatch):
    save = checkpoint.save

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(*args, **kwargs)

    flags = ("--eval_every=9", "--checkpoint_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", interrupted)
        assert nano(tmp_path, *flags, "--train_steps=9") == 143
    assert nano(tmp_path, *flags, "--train_steps=2") == 0
    assert checkpoint.steps(tmp_path) == [1, 2] and checkpoint.is_best(tmp_path, 2)


def test_the_vocabulary_that_is_given_is_taken(nano, tmp_path):
    given = tmp_path / "given.model"
    train_sentencepiece(["jag ser katten", "du har huset"] * 9, 275, given)
    flags = (f"--vocab={given}", "--vocab_size=275", "--precision=mixed_bfloat16")
    # It spells other words.
    flags += ("--max_source_length=64", "--max_target_length=64")
    assert nano(tmp_path / "run", *flags, "--train_steps=1") == 0
    assert (tmp_path / "run" / "vocab.model").read_bytes() == given.read_bytes()
    # The precision is that of training alone.
    seq2seq = tf_teaforn.load(tmp_path / "run").seq2seq
    assert {layer.compute_dtype for layer in seq2seq._flatten_layers()} == {"float32"}


def test_several_steps_in_one_call_are_several_calls(compiled, tmp_path):
    flags = ("--train_steps=7", "--eval_every=7", "--log_every=5", "--checkpoint_every=3")
    assert compiled(tmp_path / "1", *flags) == 0
    assert compiled(tmp_path / "4", *flags, "--steps_per_execution=4") == 0
    # No call of 4 steps jumps over a report or a checkpoint.
    for name in ("1", "4"):
        assert checkpoint.steps(tmp_path / name) == [3, 6, 7]
    records = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("1", "4")]
    assert records[0] == records[1]
    expected, found = (tensors(tmp_path / name, 7) for name in ("1", "4"))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_bad_validation_leaves_the_interrupted_checkpoint(nano, tmp_path, monkeypatch):
    """It is all there is to go on from."""
    flags = ("--train_steps=4", "--eval_every=4", "--checkpoint_every=4", "--keep=1")

    class Stopped(training.Interruption):
        requested = True

    with monkeypatch.context() as patch:
        patch.setattr(training, "Interruption", Stopped)
        assert nano(tmp_path, *flags) == 143
    assert checkpoint.steps(tmp_path) == [1] == checkpoint.interrupted(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(training.StepRunner, "test", lambda *_: {"loss": np.nan})
        assert nano(tmp_path, *flags) == 2
    assert checkpoint.steps(tmp_path) == [1]
    assert nano(tmp_path, *flags) == 0
    assert checkpoint.steps(tmp_path) == [4]


def test_what_a_task_takes_anyway_may_be_given_or_not(nano, tmp_path, capsys):
    flags = ("--train_steps=1", "--eval_every=1")
    assert nano(tmp_path, *flags) == 0
    assert nano(tmp_path, *flags, "--metric=bleu") == 0
    assert nano(tmp_path, *flags, "--metric=chrf") == 2
    assert "--metric: bleu there, chrf here" in capsys.readouterr().err


def spoil_the_second_batch(monkeypatch):
    """Its weights are NaN from now on; returns the settings that batches are made with, a list."""
    dataset, settings = training.pipeline.training_dataset, []

    def spoiled(*args, **kwargs):
        settings.append(kwargs)

        def spoil(step, batch):
            inputs, targets, weights = batch
            return inputs, targets, tf.where(step == 1, np.float32("nan"), weights)

        return dataset(*args, **kwargs).enumerate().map(spoil)

    monkeypatch.setattr(training.pipeline, "training_dataset", spoiled)
    return settings


def test_a_bad_step_is_skipped_counted_and_named(compiled, tmp_path, monkeypatch, caplog):
    seeded, seeds = keras.utils.set_random_seed, []

    def noted(seed):
        seeds.append(seed)
        seeded(seed)

    batches = spoil_the_second_batch(monkeypatch)
    monkeypatch.setattr(keras.utils, "set_random_seed", noted)
    # Of a run that was killed before its first checkpoint.
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    flags = ("--on_nonfinite=skip", "--train_steps=3", "--eval_every=3", "--log_every=3")
    flags = (*flags, "--steps_per_execution=3", "--seed=7", "--batching=pack")
    assert compiled(tmp_path, *flags) == 0
    assert seeds == [7] and (batches[0]["seed"], batches[0]["mode"]) == (7, "pack")
    assert "1 steps skipped so far. Not a finite number at step 2: the loss of stage" in caplog.text
    record, _ = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["skipped_steps"] == 1 and np.isfinite(record["loss"])
    assert tensors(tmp_path, 3)["optimizer/optimizer/0/iteration"] == 2


def test_means_of_nothing_but_bad_steps_are_not_recorded(nano, tmp_path, monkeypatch, caplog):
    spoil_the_second_batch(monkeypatch)
    flags = ("--on_nonfinite=skip", "--train_steps=3", "--eval_every=3")
    with caplog.at_level("INFO"):
        assert nano(tmp_path, *flags) == 0
    assert "step 2/3: all steps were skipped, learning rate" in caplog.text
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    losses = {record["step"]: record.get("loss") for record in records if record["kind"] == "train"}
    assert losses[2] is None and losses[1] > 0 and losses[3] > 0


def test_a_model_that_cannot_be_packed_for(train, tmp_path, capsys):
    """Before any batch is made, and the same folder may be used again."""
    flags = ("--model=rnn_base", "--batching=pack", "--train_steps=1", "--eval_every=1")
    assert train(tmp_path, *flags) == 2
    assert "--batching=pack: with this model sentences of one row" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"vocab.model", "vocab.data.txt"}


def test_a_folder_in_use_and_another_vocabulary_are_refused(nano, corpus, tmp_path, capsys):
    flags = ("--train_steps=1", "--eval_every=1")
    model_dir = tmp_path / "run"
    with lock.locked(model_dir):
        assert nano(model_dir, *flags) == 2
        assert f"--model_dir={model_dir} is in use by another bin/train" in capsys.readouterr().err
    assert nano(model_dir, *flags) == 0
    weights, optimizer, state = checkpoint.load_training(model_dir)
    state["vocabulary"] = "0" * 64
    checkpoint.save(model_dir, state.pop("step"), weights, optimizer, state, keep=1)
    assert nano(model_dir, *flags) == 2
    error = capsys.readouterr().err
    assert "vocab.model is not the vocabulary that the checkpoints were trained with" in error
    with pytest.raises(UserError, match="not the one that checkpoint 1 was trained with"):
        tf_teaforn.load(model_dir, "latest")


def test_a_device_that_failed_is_no_other_worker(nano, tmp_path, monkeypatch, capsys):
    def read(_):
        raise tf.errors.UnavailableError(None, None, "Socket closed\nmore")

    monkeypatch.setattr(nonfinite.NonfiniteGuard, "read", read)
    assert nano(tmp_path, "--train_steps=1", "--eval_every=1") == 75
    error = capsys.readouterr().err.splitlines()[-1]
    assert "The device has failed or was taken away (Socket closed). Start the same" in error


def test_validation_on_a_tpu_has_one_shape(nano, tmp_path, monkeypatch):
    """Each is compiled there. The loss is that of many."""
    runner = step_runner.StepRunner
    iterator, test = runner.iterator, runner.test

    def iterator_on_tpu(self, dataset):
        self.on_tpu = True
        return iterator(self, dataset)

    def test_and_look(self, dataset):
        shapes.update(tuple(batch[1].shape) for batch in dataset)
        return test(self, dataset)

    monkeypatch.setattr(runner, "test", test_and_look)
    flags = ["--train_steps=1", "--eval_every=1", "--batching=pack", "--max_target_length=40"]
    found = []
    for name in ("cpu", "tpu"):
        shapes = set()
        if name == "tpu":
            monkeypatch.setattr(runner, "iterator", iterator_on_tpu)
        assert nano(tmp_path / name, *flags) == 0
        *_, line = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append(({length for _, length in shapes}, json.loads(line)["loss_0"]))
    assert 40 not in found[0][0] and found[1][0] == {40}
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


@pytest.mark.parametrize("when", ["in_the_step", "later"])
def test_a_step_that_does_not_fit_names_what_to_lower(nano, tmp_path, monkeypatch, capsys, when):
    """Some devices say so at once, others when they are first asked for results."""

    def fail():
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating [9,9]\nmore")

    def train(runner, *_):
        with runner.workers.readable_errors():
            fail()

    if when == "in_the_step":
        monkeypatch.setattr(step_runner.StepRunner, "train", train)
    else:
        monkeypatch.setattr(nonfinite.NonfiniteGuard, "read", lambda _: fail())
        seen = training.Run._tokens_seen
        monkeypatch.setattr(
            training.Run, "_tokens_seen", lambda run: fail() if run.step else seen(run)
        )
    assert nano(tmp_path, "--train_steps=1", "--eval_every=1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    found = re.search(
        r"Step 1 does not fit into the device's memory \(OOM when allocating \[9,9\]\)\. Weights, "
        r"optimizer and gradients take (\S+) MiB, the activations of 512 tokens about (\S+) MiB",
        error,
    )
    fixed, activations = map(float, found.groups())
    # Subwords, positions and one layer of 16 numbers each; 4 bytes, four times with Adam.
    assert 0.08 < fixed < 0.25
    # Of 21 rows of 24: attention, logits and the rest.
    assert 1 < activations < 30
    assert "Write --micro_batch_tokens=250, the same update in parts, or --remat=stage" in error
