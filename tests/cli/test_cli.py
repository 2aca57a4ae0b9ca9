"""The commands as a user runs them: what they write, say and refuse."""

import errno
import gzip
import io
import json
import math
import os
import pty
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import safetensors.numpy
import tensorflow as tf
from absl import flags
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

import tf_teaforn
from tf_teaforn import checkpoint
from tf_teaforn.cli import app, decode, score, stderr
from tf_teaforn.config import RunConfig, settings
from tf_teaforn.data.tokenizer import Tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.model_dir import read_config
from tf_teaforn.optimizers import WarmupSchedule
from tf_teaforn.task import get_task

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "train",
    "evaluate",
    "decode",
    "score",
    "export",
    "average",
    "build_vocab",
    "prepare",
    "report",
    "sweep",
    "tpu_check",
)


def run_code(code, stdout=None, **environment):
    """Runs Python code that imports this checkout; returns the `CompletedProcess`."""
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", code],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.fixture
def refused(call_command, capsys):
    """Checks that a command ends with code 2 and one line; returns that line."""

    def refuse(name, *flags):
        assert call_command(name, *flags) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"{name}: ") and captured.err.count("\n") == 1
        return captured.err.removeprefix(f"{name}: ").removesuffix("\n")

    return refuse


class TestTrain:
    def test_files(self, trained):
        assert trained.files == {
            "best",
            "cache",
            "checkpoints",
            "command.txt",
            "config.json",
            "examples.json",
            "metrics.jsonl",
            "tensorboard",
            "vocab.data.txt",
            "vocab.model",
        }
        assert checkpoint.steps(trained.model_dir) == [15, 30, 45]
        assert not list(trained.model_dir.rglob("*.tmp"))

    def test_config_and_command(self, trained):
        config = read_config(trained.model_dir)
        assert config.task == "text"
        assert config.model.model == "transformer_tiny" and config.training.train_steps == 45
        # The task's default where no flag is given.
        assert config.teaforn.discount == 0.5
        # Later starts add theirs.
        command = (trained.model_dir / "command.txt").read_text().splitlines()[0]
        expected = [*trained.flags, f"--model_dir={trained.model_dir}"]
        assert shlex.split(command) == [str(ROOT / "bin" / "train"), *expected]
        assert Tokenizer.load(trained.model_dir / "vocab.model").vocabulary_size == 310

    def test_what_it_says(self, trained):
        best = json.loads((trained.model_dir / "best" / "state.json").read_text())
        (line,) = trained.stdout.splitlines()
        assert f"greedy: {best['metrics']['bleu']:.2f} at step {best['step']}." in line
        assert best["metrics"]["bleu"] > 1
        # No bar, as it is no terminal, and nothing of TensorFlow's.
        lines = trained.stderr.splitlines()
        assert lines[0] == "Training a vocabulary of 310 subwords"
        for line, split in zip(lines[1:3], ("train", "validation"), strict=True):
            assert re.fullmatch(rf"{split}: \d+ examples tokenised, \d+ a second", line)
        assert [line.split(":")[0] for line in lines[3:] if "validation" in line] == [
            "step 15",
            "step 30",
            "step 45",
        ]
        train_line = re.compile(
            r"step \d+/45: loss [\d.]+ \(stages [\d.]+, [\d.]+\), learning rate [\d.e-]+, "
            r"\d+ target tokens/s, [\d:]+ left"
        )
        assert sum(train_line.fullmatch(line) is not None for line in lines) == 9
        assert len(lines) == 1 + 2 + 3 + 9

    def test_records(self, trained):
        text = (trained.model_dir / "metrics.jsonl").read_text()
        records = [json.loads(line) for line in text.splitlines()]
        steps = {
            kind: [record["step"] for record in records if record["kind"] == kind]
            for kind in ("train", "validation")
        }
        assert steps == {"train": [*range(5, 50, 5)], "validation": [15, 30, 45]}
        losses = [r["loss"] for r in records if r["kind"] == "train"]
        assert losses[-1] < losses[0] / 2
        for record in records:
            assert record["loss"] == pytest.approx(record["loss_0"] + 0.5 * record["loss_1"])
        events = EventAccumulator(str(trained.model_dir / "tensorboard"))
        events.Reload()
        shown = {
            tag: {e.step: float(tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)}
            for tag in events.Tags()["tensors"]
        }
        expected = {"loss", "loss_1", "accuracy", "learning_rate", "target_tokens_per_second"}
        assert {*expected, "seconds_left", "validation/bleu"} <= shown.keys()
        for record in records:
            prefix = "validation/" if record["kind"] == "validation" else ""
            for name in record.keys() - {"kind", "step"}:
                found = shown[prefix + name][record["step"]]
                assert found == pytest.approx(record[name], rel=1e-6), name
        training = read_config(trained.model_dir).training
        rate = WarmupSchedule(
            training.schedule, training.learning_rate, training.warmup_steps, training.train_steps
        )
        for step in range(5, 50, 5):
            assert shown["learning_rate"][step] == pytest.approx(float(rate(step)), rel=1e-5)
            assert shown["target_tokens_per_second"][step] > 0
        left = shown["seconds_left"]
        assert left[5] > left[40] > 0 and left[45] == 0

    def test_again(self, trained, call_command, capsys, tmp_path, monkeypatch):
        """The same command, on a finished run and on one that was stopped after step 15.

        The latter is of before there were some of the settings.
        """
        bar = []
        monkeypatch.setattr(tqdm, "set_postfix", lambda self, values: bar.append(values))
        model_dir = tmp_path / "model"
        shutil.copytree(trained.model_dir, model_dir)
        assert call_command("train", *trained.flags, f"--model_dir={model_dir}") == 0
        assert capsys.readouterr().out.splitlines() == [
            trained.stdout.splitlines()[-1].replace(str(trained.model_dir), str(model_dir))
        ]
        assert len((model_dir / "command.txt").read_text().splitlines()) == 2

        for step in (30, 45):
            shutil.rmtree(model_dir / "checkpoints" / str(step))
        shutil.rmtree(model_dir / "best")
        content = json.loads((model_dir / "config.json").read_text())
        for setting in ("clip_norm", "weight_decay"):
            del content["training"][setting]
        (model_dir / "config.json").write_text(json.dumps(content))
        assert call_command("train", *trained.flags, f"--model_dir={model_dir}") == 0
        for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
            for step in (30, 45):
                file = f"checkpoints/{step}/{name}"
                assert (model_dir / file).read_bytes() == (trained.model_dir / file).read_bytes()
        for file in ("best/model.safetensors", "metrics.jsonl", "config.json"):
            assert (model_dir / file).read_bytes() == (trained.model_dir / file).read_bytes()
        # What the bar showed after steps 20 to 45.
        lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
        logs = [line for line in lines if line["kind"] == "train" and line["step"] > 15]
        assert len(bar) == len(logs) == 6
        for shown, log in zip(bar, logs, strict=True):
            assert shown["loss"] == f"{log['loss']:.3f}"
            assert shown["stages"] == f"{log['loss_0']:.3f}/{log['loss_1']:.3f}"
            assert float(shown["lr"]) > 0 and float(shown["tokens_per_s"]) > 0

    def test_other_settings_are_refused(self, trained, refused, tmp_path):
        line = refused(
            "train",
            *trained.flags,
            f"--model_dir={trained.model_dir}",
            "--n=3",
            "--metric=rouge",
            "--seed=5",
            "--keep=7",
        )
        assert line == (
            f"--model_dir={trained.model_dir} holds a run with other settings: "
            "--metric: bleu there, rouge here; --n: 2 there, 3 here; --seed: 1 there, 5 here. "
            "Take them up, or another --model_dir."
        )

    def test_a_run_that_was_begun_with_clone_init_goes_on_with_it(
        self, trained, call_command, capsys, tmp_path
    ):
        """Of decoders that share their weights, for which a new run refuses it."""
        model_dir = shutil.copytree(trained.model_dir, tmp_path / "model")
        content = json.loads((model_dir / "config.json").read_text())
        content["teaforn"]["clone_init"] = "independent"
        (model_dir / "config.json").write_text(json.dumps(content))
        flags = [*trained.flags, f"--model_dir={model_dir}"]
        assert call_command("train", *flags, "--clone_init=independent") == 0
        assert call_command("train", *flags) == 2
        assert "--clone_init: independent there, copy here" in capsys.readouterr().err

    def test_patience_stops_and_the_best_is_exported(self, unshared):
        assert checkpoint.steps(unshared.model_dir) == [1, 2]
        best = checkpoint.resolve(unshared.model_dir, "best")
        assert best.steps == (1,)
        (version,) = (unshared.model_dir / "export").iterdir()
        details = json.loads((version / "assets.extra" / "decode.json").read_text())
        assert details["checkpoint"] == "1" and details["steps"] == [1]

    def test_exported_variables_are_those_of_decoder_0(self, unshared):
        """N = 3 with weights of their own: nothing of the other two decoders, nothing of Adam."""
        (version,) = (unshared.model_dir / "export").iterdir()
        loaded = tf.saved_model.load(version)
        seq2seq = tf_teaforn.load(unshared.model_dir).seq2seq
        expected = {weight.path: weight.numpy() for weight in seq2seq.weights}
        stored = {
            name: tf.train.load_variable(str(version / "variables" / "variables"), name)
            for name, _ in tf.train.list_variables(str(version / "variables" / "variables"))
            if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
        }
        assert len(loaded.weights) == len(stored) == len(expected)
        assert sum(value.nbytes for value in stored.values()) == sum(
            value.nbytes for value in expected.values()
        )
        assert [variable.name for variable in loaded.weights] == [f"{path}:0" for path in expected]
        for variable, value in zip(loaded.weights, expected.values(), strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        trained = safetensors.numpy.load_file(
            unshared.model_dir / "checkpoints/1/model.safetensors"
        )
        assert len(trained) > len(expected) and {*expected} < {*trained}

    def test_relative_paths_are_kept_absolute(self, unshared, corpus):
        options = read_config(unshared.model_dir).task_options
        assert options == {
            "train_files": f"{corpus}/train.en.gz,{corpus}/train.fr",
            "valid_files": f"{corpus}/valid.en.gz,{corpus}/valid.fr",
            "test_files": f"{corpus}/test.en.gz,{corpus}/test.fr",
            "metric": "rouge",
        }

    def test_two_files_give_the_same_data_as_one(self, unshared, trained):
        vocabularies = [run.model_dir / "vocab.model" for run in (unshared, trained)]
        assert vocabularies[0].read_bytes() == vocabularies[1].read_bytes()

    def test_weights_of_the_shared_and_the_unshared_run(self, trained, unshared):
        shapes = [
            {
                name: value.shape
                for name, value in safetensors.numpy.load_file(
                    run.model_dir / "best" / "model.safetensors"
                ).items()
            }
            for run in (trained, unshared)
        ]
        clones = {name for name in shapes[1] if name not in shapes[0]}
        assert {name: shapes[1][name] for name in shapes[0]} == shapes[0]
        assert clones and all("decoder_1" in name or "decoder_2" in name for name in clones)


class TestTrainRefusals:
    """All of these before anything is written."""

    @pytest.fixture
    def refused(self, refused, corpus, tmp_path):
        flags = {
            "--task": "text",
            "--train_files": f"{corpus}/train.tsv",
            "--valid_files": f"{corpus}/valid.tsv",
            "--model_dir": str(tmp_path / "model"),
        }

        def refuse(*changes):
            given = flags | dict(change.split("=", 1) for change in changes)
            line = refused("train", *(f"{name}={value}" for name, value in given.items() if value))
            assert not (tmp_path / "model").exists()
            return line

        return refuse

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--task=txet", r"Unknown task 'txet'. Did you mean text\? Write --task= one of: .*"),
            ("--task=", r"--task is missing\. What to train on\."),
            ("--model_dir=", r"--model_dir is missing\. Folder for everything the run writes\."),
            ("--model=transformer_tinny", r"Unknown --model=.*Did you mean transformer_tiny\?.*"),
            (
                "--discont=0.5",
                r"Unknown flag --discont\. Did you mean discount\? --help lists all\.",
            ),
            ("--n=two", r"--n=two: write a whole number\."),
            ("--discount=.", r"--discount=\.: write a number\."),
            ("--n=0", r"--n=0: write 1 or more\."),
            ("--discount=1.5", r"--discount=1\.5: write a number from 0 to 1\."),
            ("--discount=nan", r"--discount=nan: write a number from 0 to 1\."),
            ("--stage_input=top-k", r"--stage_input=top-k: write one of hidden, top_k\."),
            ("--top_k=4", r"--top_k=4 has no effect: add --stage_input=top_k or drop it\."),
            ("--word_drop=1", r"--word_drop=1\.0: write a number from 0, below 1\."),
            ("--label_smoothing=1", r"--label_smoothing=1\.0: write a number from 0, below 1\."),
            ("--optimizer=Adam", r"--optimizer=Adam: write one of adam, adafactor, sgd\."),
            ("--eval_every=0", r"--eval_every=0: write 1 or more\."),
            ("--clip_norm=0", r"--clip_norm=0\.0: write a positive number\."),
            ("--shared=perhaps", r"--shared=perhaps: write true or false\."),
            ("--noshared=1", r"--noshared=1: write --shared=true or --shared=false\."),
            ("--strategy=pod", r"--strategy=pod: write one of auto, one, mirrored, multi_.*"),
            ("--tpu=local", r"--strategy=tpu --tpu=local: no TPU found \(.*"),
            ("--clone_init=copy", r"--clone_init=copy has no effect where all decoders share .*"),
            ("--metric=ter", r"Unknown --metric=ter\. Write one of: bleu, chrf, rouge\."),
            ("--train_files=", r"There are no files for split 'train'\. Give --train_files=.*"),
            ("--valid_files=", r"There are no files for split 'validation'\. Give --valid_.*"),
            ("--train_files=/no.tsv", r"/no\.tsv: no such file\. Check --train_files\."),
            ("--valid_files=/no.tsv", r"/no\.tsv: no such file\. Check --valid_files\."),
            ("--test_files=/no.tsv", r"/no\.tsv: no such file\. Check --test_files\."),
            ("--train_files=a,b,c", r"--train_files=\S+ is neither one file nor two\..*"),
            ("--vocab=/no.model", r"/no\.model: cannot read the vocabulary: No such file.*"),
            ("--data_dir=/data", r"--data_dir is for tasks that read TFDS; .*"),
            ("--module_import=no_such", r"--module_import=no_such: No module named 'no_such'\."),
        ],
    )
    def test_mistakes(self, refused, flag, message):
        assert re.fullmatch(message, refused(flag))

    def test_weight_decay_of_another_optimizer(self, refused):
        assert refused("--optimizer=sgd", "--weight_decay=0.1") == (
            "--weight_decay=0.1 is for --optimizer=adam, not for sgd. Leave it out, or write "
            "--optimizer=adam."
        )

    def test_tpu_of_another_strategy(self, refused):
        assert refused("--strategy=one", "--tpu=pod-7") == (
            "--tpu=pod-7 belongs to --strategy=tpu, not to --strategy=one. Leave it out, or "
            "write --strategy=tpu."
        )

    def test_tpu_under_jax(self, refused, monkeypatch):
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        assert refused("--strategy=tpu", "--tpu=pod-7") == (
            "--tpu=pod-7 has no effect with KERAS_BACKEND=jax, which takes the TPU of this "
            "machine. Leave it out."
        )

    def test_top_k_beyond_the_vocabulary(self, refused):
        line = refused("--stage_input=top_k", "--top_k=500", "--vocab_size=310")
        assert line.startswith("--top_k=500: ") and line.endswith("vocabulary size, 310.")

    def test_files_of_another_task(self, refused):
        line = refused("--task=demo_enfr")
        assert line == "--train_files belongs to --task=gsg or text, not to demo_enfr."

    def test_malformed_validation_file(self, refused, tmp_path):
        (tmp_path / "valid.tsv").write_text("a\tb\nc d\n")
        line = refused(f"--valid_files={tmp_path}/valid.tsv")
        assert line.startswith(f"{tmp_path}/valid.tsv:2: 0 tabs.")

    def test_wrong_vocabulary(self, refused, trained, corpus):
        line = refused(f"--vocab={corpus}/train.fr")
        assert line.startswith(f"{corpus}/train.fr: not a SentencePiece model")
        ready = trained.model_dir / "vocab.model"
        assert refused(f"--vocab={ready}", "--vocab_size=300") == (
            f"--vocab_size=300, but {ready} has 310 subwords. Leave out one of the two."
        )

    def test_words_that_are_no_flags(self, call_command, capsys):
        assert call_command("train", "text", "--n=1") == 2
        expected = "train: What is 'text'? Flags are written --name=value.\n"
        assert capsys.readouterr().err == expected

    def test_another_backend(self, refused, monkeypatch):
        monkeypatch.setenv("KERAS_BACKEND", "torch")
        message = "KERAS_BACKEND=torch: this command runs on tensorflow or jax. Unset it."
        assert refused() == message

    def test_a_model_dir_that_cannot_be_made(self, call_command, capsys, trained, corpus):
        model_dir = corpus / "train.tsv" / "model"
        assert call_command("train", *trained.flags, f"--model_dir={model_dir}") == 2
        assert capsys.readouterr().err.endswith(f"{model_dir}: Not a directory.\n")

    def test_a_vocabulary_of_another_run(self, call_command, capsys, trained, tmp_path, corpus):
        vocabulary = tmp_path / "v.model"
        flags = ["--task=text", f"--train_files={corpus}/test.tsv", "--vocab_size=300"]
        assert call_command("build_vocab", *flags, f"--output={vocabulary}") == 0
        assert capsys.readouterr().out == f"Wrote {vocabulary}\n"
        flags = [f"--model_dir={trained.model_dir}", f"--vocab={vocabulary}"]
        assert call_command("train", *trained.flags, *flags) == 2
        assert "differs from" in capsys.readouterr().err
        # Without it the run goes on.
        assert call_command("train", *trained.flags, f"--model_dir={trained.model_dir}") == 0


class TestBuildVocab:
    def test_task_default(self, call_command, corpus, tmp_path, monkeypatch):
        sizes = []
        monkeypatch.setattr(
            "tf_teaforn.training.build_vocabulary", lambda source, size, path: sizes.append(size)
        )
        flags = ["--task=text", f"--train_files={corpus}/train.tsv", "--output=x"]
        assert call_command("build_vocab", *flags) == 0
        assert sizes == [8000]

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--task=text"], "--output is missing. The .model file to write."),
            (["--task=text", "--output=x"], "There are no files for split 'train'."),
            (["--output=x"], "--task is missing."),
            (["--task=text", "--output=x", "--vocab_size=0"], "--vocab_size=0: write 1 or more."),
        ],
    )
    def test_mistakes(self, refused, flags, message):
        assert refused("build_vocab", *flags).startswith(message)

    def test_vocabulary_larger_than_the_text_allows(self, refused, corpus, tmp_path):
        flags = ["--task=text", f"--train_files={corpus}/train.tsv", f"--output={tmp_path}/v"]
        line = refused("build_vocab", *flags, "--vocab_size=5000")
        assert line.startswith("--vocab_size=5000 is too large for this text: the highest possible")
        assert list(tmp_path.iterdir()) == []


class TestEvaluate:
    def test_from_another_folder(self, unshared, call_command, capsys, tmp_path, monkeypatch):
        """Where the paths that training was given lead nowhere."""
        monkeypatch.chdir(tmp_path)
        flags = [f"--model_dir={unshared.model_dir}", "--beam_size=1,4"]
        assert call_command("evaluate", *flags) == 0
        names = sorted(path.name for path in (unshared.model_dir / "eval").iterdir())
        files = [f"test-best-beam{k}-alpha0.6.{kind}" for k in (1, 4) for kind in ("json", "txt")]
        assert names == [*files, "test.references.txt"]
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("test · checkpoint best · beam 1 · alpha 0.6 · 12 examples · ")
        rouge = [line.split()[0] for line in lines[1:5]]
        assert rouge == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
        assert lines[9].startswith("  references: sha256 ")
        assert lines[10].startswith("test · checkpoint best · beam 4 ")

    def test_checkpoints(self, trained, call_command, corpus):
        folder = trained.model_dir / "eval"
        references = (corpus / "valid.fr").read_text().splitlines()
        for spec, name in (("latest", "45"), ("15", "15"), ("average:2", "average-2-45")):
            flags = [f"--model_dir={trained.model_dir}", f"--checkpoint={spec}"]
            flags += ["--split=validation", "--beam_size=1", "--beam_alpha=1"]
            assert call_command("evaluate", *flags) == 0
            result = json.loads((folder / f"validation-{name}-beam1-alpha1.0.json").read_text())
            assert result["checkpoint"] == name and result["examples"] == 12
            text = (folder / f"validation-{name}-beam1-alpha1.0.txt").read_text()
            hypotheses = text.removesuffix("\n").split("\n")
            bleu = sacrebleu.corpus_bleu(hypotheses, [references]).score
            assert result["metrics"]["bleu"] == pytest.approx(bleu)
        # Training validated on the same sentences, greedily too.
        state = json.loads((trained.model_dir / "metrics.jsonl").read_text().splitlines()[-1])
        latest = json.loads((folder / "validation-45-beam1-alpha1.0.json").read_text())
        assert latest["metrics"]["bleu"] == pytest.approx(state["bleu"])

    def test_what_outputs_may_be(self, trained, call_command, capsys, corpus, tmp_path):
        """The scores of such a search lie beside those of one without its flags."""
        model_dir = tmp_path / "model"
        shutil.copytree(trained.model_dir, model_dir, ignore=shutil.ignore_patterns("eval"))
        fields = {"max_length": 5, "min_length": 4, "no_repeat_ngram": 1}
        searches = ({}, {"no_repeat_ngram": 1}, fields)
        sources = [line.split("\t")[0] for line in (corpus / "test.tsv").read_text().splitlines()]
        texts, names = [], []
        for search in searches:
            flags = [f"--{field}={value}" for field, value in search.items()]
            flags += [f"--model_dir={model_dir}", "--beam_size=2"]
            assert call_command("evaluate", *flags) == 0
            name = "test-best-beam2-alpha0.6"
            name += "".join(f"-{field}{value}" for field, value in search.items())
            result = json.loads((model_dir / "eval" / f"{name}.json").read_text())
            assert {field: result[field] for field in fields if field in result} == search
            said = "".join(f"{field} {value} · " for field, value in search.items())
            line = capsys.readouterr().out.splitlines()[0]
            assert f"beam 2 · alpha 0.6 · {said}12 examples" in line
            texts.append((model_dir / "eval" / f"{name}.txt").read_text().splitlines())
            names += [f"{name}.json", f"{name}.txt"]
            assert texts[-1] == tf_teaforn.load(model_dir, beam_size=2, **search)(sources)
        assert texts[0] != texts[2] and texts[1] != texts[2]
        found = {path.name for path in (model_dir / "eval").iterdir()}
        assert found == {*names, "test.references.txt"}
        # With other references all of them are moved.
        other = f"--test_files={corpus}/valid.tsv"
        assert call_command("evaluate", f"--model_dir={model_dir}", other, "--beam_size=1") == 0
        (aside,) = (path for path in (model_dir / "eval").iterdir() if path.is_dir())
        assert {path.name for path in aside.iterdir()} == found

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ([], "--model_dir is missing. Folder of a trained model."),
            (["--model_dir={tmp}/none"], "--model_dir={tmp}/none: there is no such folder."),
            (["--model_dir={tmp}"], "--model_dir={tmp} has no config.json: bin/train did not .*"),
            (["--split=tset"], "A text task has no split 'tset'. Write one of: train, valid.*"),
            (["--checkpoint=25"], ".* does not have it; steps saved: 15, 30, 45"),
            (["--checkpoint=newest"], "--checkpoint=newest is not best, latest, .*"),
            (["--checkpoint=average:9"], ".* does not have 9 checkpoints; steps saved: .*"),
            (["--beam_size=1,x"], "--beam_size=1,x: write whole numbers, e.g. 1,4."),
            (["--beam_size=4,1,4"], "--beam_size=4,1,4: write each number once."),
            (["--beam_size=0"], "--beam_size=0: write 1 or more."),
            (["--no_repeat_ngram=-1"], "--no_repeat_ngram=-1: write 0 or more."),
            (["--batch_size=0"], "--batch_size=0: write 1 or more."),
            (["--min_length=60"], "--min_length=60 exceeds the maximum, 51 for the shortest .*"),
            (["--metrics=meteor"], "there is no metric 'meteor'; choose from bleu, .*"),
            (["--test_set=wmt14"], "--test_set=wmt14: the task does not say which .*"),
            (
                ["--split=test", "--test_set=wmt14"],
                "--split=test and --test_set=wmt14 name two sets. Leave out one of them.",
            ),
            (["--test_files={tmp}/no"], "{tmp}/no: no such file. Check --test_files."),
            (["--data_dir=/data"], "--data_dir is for tasks that read TFDS; .*"),
        ],
    )
    def test_mistakes(self, refused, trained, tmp_path, flags, message):
        flags = [flag.format(tmp=tmp_path) for flag in flags]
        if flags and not flags[0].startswith("--model_dir"):
            flags.append(f"--model_dir={trained.model_dir}")
        assert re.fullmatch(message.format(tmp=tmp_path), refused("evaluate", *flags))

    def test_model_dir_of_another_kind(self, refused, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
        line = refused("evaluate", f"--model_dir={tmp_path}")
        assert line.startswith(f"{tmp_path}/config.json is not a configuration of tf_teaforn")

    def test_vocabulary_is_missing(self, refused, trained, tmp_path):
        shutil.copy(trained.model_dir / "config.json", tmp_path)
        line = refused("evaluate", f"--model_dir={tmp_path}")
        assert line.startswith(f"{tmp_path}/vocab.model: cannot read the vocabulary")


class TestAverage:
    def test_it_can_be_used_by_name(self, trained, call_command, capsys, tmp_path):
        model_dir = tmp_path / "model"
        shutil.copytree(trained.model_dir, model_dir)
        assert call_command("average", f"--model_dir={model_dir}", "--last=2") == 0
        assert capsys.readouterr().out == (
            f"Wrote {model_dir}/averages/average-2-45, the mean of steps 30, 45. Use it by "
            "--checkpoint=average-2-45\n"
        )
        results = []
        for spec in ("average-2-45", "average:2"):
            flags = [f"--model_dir={model_dir}", f"--checkpoint={spec}", "--beam_size=1"]
            assert call_command("evaluate", *flags, "--metrics=bleu") == 0
            path = model_dir / "eval" / "test-average-2-45-beam1-alpha0.6.json"
            results.append(json.loads(path.read_text()))
            path.unlink()
        for name in ("metrics", "checkpoint", "steps", "references_sha256"):
            assert results[0][name] == results[1][name]

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ([], "--model_dir is missing. Folder of a trained model."),
            (["--model_dir=/none"], "there is no model directory /none: check --model_dir"),
            (["--model_dir={}", "--last=0"], "--last=0: write 1 or more."),
            (
                ["--model_dir={}", "--last=4"],
                "--last=4: {} does not have so many checkpoints; steps saved: 15, 30, 45. Take "
                "fewer, or train on",
            ),
            (
                ["--model_dir={}/best", "--last=1"],
                "--last=1: {}/best does not have so many checkpoints; steps saved: none. Take "
                "fewer, or train on",
            ),
        ],
    )
    def test_mistakes(self, refused, trained, flags, message):
        flags = [flag.format(trained.model_dir) for flag in flags]
        assert refused("average", *flags) == message.format(trained.model_dir)


class TestSweepAndReport:
    def test_dry_run(self, call_command, capsys, tmp_path):
        flags = ["--experiment=base", "--scale=small", "--seeds=3", "--task=wmt14_enfr"]
        flags += [f"--output_dir={tmp_path}/out", "--train_steps=40", "--dry_run"]
        assert call_command("sweep", *flags) == 0
        lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
        names = ["bin/build_vocab", *["bin/train", "bin/evaluate"] * 3]
        assert [line[0] for line in lines] == names
        assert {"--task=demo_enfr", "--train_steps=40", "--seed=3", "--n=1"} < set(lines[1])
        assert {"--n=2", "--discount=0.5", "--shared=false"} < set(lines[3])
        assert {"--checkpoint=average:5", "--split=test", "--beam_size=1,4"} < set(lines[4])
        assert list(tmp_path.iterdir()) == []
        # A preset of KerasHub's names the weights too.
        flags += ["--model=keras_nlp:hf://some/bart"]
        assert call_command("sweep", *flags) == 0
        line = shlex.split(capsys.readouterr().out.splitlines()[0])
        name = "demo_enfr-keras_nlp_hf_some_bart-n1-seed3"
        given = {"--init_from=keras_nlp:hf://some/bart", f"--model_dir={tmp_path}/out/runs/{name}"}
        assert given < set(line)
        # Without --seeds and --task: all of the experiment's.
        flags = ["--experiment=base", "--scale=small", f"--output_dir={tmp_path}/out", "--dry_run"]
        assert call_command("sweep", *flags) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith("bin/train") for line in lines) == 2 * 3 * 5

    @pytest.mark.parametrize(
        ("command", "flags", "message"),
        [
            ("sweep", [], r"--experiment is missing\. Which experiment\."),
            ("sweep", ["--experiment=bas"], r"Unknown --experiment=bas\. Did you mean base\?.*"),
            ("sweep", ["--experiment=base", "--n=2"], r"Unknown flag --n\. --help lists all\."),
            (
                "sweep",
                ["--experiment=base", "--beam_size=4"],
                r"Unknown flag --beam_size\. .*",
            ),
            ("sweep", ["--scale=medium"], r"--scale=medium: write one of paper, small\."),
            ("sweep", ['--seeds="1'], r"--seeds=\"1: write values with commas between them\."),
            (
                "sweep",
                ["--experiment=base", "--seeds=1,1"],
                r"--seeds=1,1: write each number once\.",
            ),
            ("sweep", ["--experiment=base", "--seeds=a"], r"--seeds=a: write whole numbers.*"),
            ("sweep", ["--experiment=base", "--parallel=0"], r"--parallel=0: write 1 or more\."),
            ("report", ["--output_dir=x"], r"--results is missing\. Files that bin/sweep wrote.*"),
            (
                "report",
                ["--output_dir=x", "--results=a.json,gs://b/c.json"],
                r"--results=gs://b/c\.json: this has to be on a local disk\. Copy from or to it\.",
            ),
            (
                "sweep",
                ["--experiment=big", "--output_dir=gs://b/c"],
                r"--output_dir=gs://b/c: this has to be on a local disk\. Copy from or to it\.",
            ),
            ("report", ["--output_dir=x", "--results=/no"], r"--results=/no: there is no such .*"),
        ],
    )
    def test_mistakes(self, refused, tmp_path, command, flags, message):
        if "--experiment=base" in flags:
            flags = [*flags, f"--output_dir={tmp_path}"]
        elif "--experiment=bas" in flags:
            flags = [*flags, "--output_dir=x"]
        assert re.fullmatch(message, refused(command, *flags))


class TestDecode:
    SOURCES = (
        "I see the cat",
        "",
        "you\u2028have\x0c the\x85horse",
        "   ",
        "you<n>have the cat",
        "I see the dog\r",
    )

    def test_standard_input_to_standard_output(self, trained, translator, run_command):
        text = "\n".join(self.SOURCES) + "\n"
        done = run_command("decode", f"--model_dir={trained.model_dir}", input=text.encode())
        assert done.returncode == 0 and done.stderr == b""
        lines = done.stdout.decode().removesuffix("\n").split("\n")
        texts = [source.replace("<n>", "\n").removesuffix("\r") for source in self.SOURCES]
        assert lines == [answer.replace("\n", "<n>") for answer in translator(texts)]
        assert [not line for line in lines] == [False, True, False, True, False, False]

    def test_files_n_best_and_scores(self, trained, n_best_translator, call_command, tmp_path):
        (tmp_path / "in").write_bytes(b"\xef\xbb\xbf" + "\n".join(self.SOURCES).encode())
        flags = [f"--model_dir={trained.model_dir}", f"--input={tmp_path}/in"]
        flags += [f"--output={tmp_path}/out", "--checkpoint=45", "--beam_size=3", "--n_best=2"]
        assert call_command("decode", *flags, "--scores", "--beam_alpha=1") == 0
        lines = (tmp_path / "out").read_bytes().decode().removesuffix("\n").split("\n")
        texts = [source.removesuffix("\r") for source in self.SOURCES]
        assert lines == [
            f"{index} ||| {text} ||| {score:.6f} {penalized:.6f}"
            for index, hypotheses in enumerate(n_best_translator.decode(texts))
            for text, score, penalized in hypotheses
        ]
        assert lines[2] == lines[3] == "1 |||  ||| 0.000000 0.000000"

    def test_newlines_in_answers(self, trained, call_command, capsys, monkeypatch):
        translator = types.SimpleNamespace(
            decode=lambda texts, progress: [[("a\nb", -1.0, -2.0)] for _ in texts],
            cut_sources=0,
            max_source_length=24,
        )
        monkeypatch.setattr("tf_teaforn.inference.load", lambda *args, **fields: translator)
        stdin = types.SimpleNamespace(buffer=io.BytesIO(b"x\ny"), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)
        flags = ("--scores", "--batch_size=9")
        assert call_command("decode", f"--model_dir={trained.model_dir}", *flags) == 0
        assert translator.batch_size == 9
        assert capsys.readouterr().out == (
            "0 ||| a<n>b ||| -1.000000 -2.000000\n1 ||| a<n>b ||| -1.000000 -2.000000\n"
        )

    def test_terminal(self, trained, translator, call_command, capsys, monkeypatch):
        ours, theirs = pty.openpty()
        lines = ["I see the cat", "", "you have the bird"]
        os.write(ours, "".join(f"{line}\n" for line in lines).encode() + b"\xff\n\x04")
        with os.fdopen(theirs) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert call_command("decode", f"--model_dir={trained.model_dir}") == 0
        os.close(ours)
        captured = capsys.readouterr()
        assert captured.out.removesuffix("\n").split("\n") == translator(lines)
        complaint = "standard input:4: byte 1 of the line (0xff) is not UTF-8."
        assert captured.err.count("> ") == 5 and complaint in captured.err

    def test_packed_input_and_long_lines(self, trained, translator, call_command, capsys, tmp_path):
        lines = ["the dog " * 20, "I see the cat", "the cat " * 20]
        with gzip.open(tmp_path / "in.gz", "wt") as file:
            file.write("\n".join(lines))
        (tmp_path / "out").write_text("old")
        flags = [f"--model_dir={trained.model_dir}", f"--input={tmp_path}/in.gz"]
        assert call_command("decode", *flags, f"--output={tmp_path}/out") == 0
        assert (tmp_path / "out").read_text().removesuffix("\n").split("\n") == translator(lines)
        assert {path.name for path in tmp_path.iterdir()} == {"in.gz", "out"}
        assert call_command("decode", *flags, f"--output={tmp_path}/out.gz") == 0
        assert (
            gzip.decompress((tmp_path / "out.gz").read_bytes()) == (tmp_path / "out").read_bytes()
        )
        err, rest = capsys.readouterr().err.split(f"{tmp_path}/out.\n")
        assert rest.endswith(f"Wrote 3 lines to {tmp_path}/out.gz.\n")
        assert err == (
            "Warning: 2 of 3 source lines were cut: more than 24 subwords, the end of sentence "
            "included (--max_source_length of bin/train).\n"
            "Wrote 3 lines to "
        )

    def test_search_flags(self):
        values = flags.FlagValues()
        decode.define_flags(values)
        given = {"--beam_size=3": 3, "--beam_alpha=0.5": 0.5, "--n_best=2": 2}
        given |= {"--max_length=9": 9, "--min_length=4": 4, "--no_repeat_ngram=2": 2}
        values(["decode", *given])
        names = ("beam_size", "alpha", "n_best", "max_length", "min_length", "no_repeat_ngram")
        assert decode.search_flags(values) == {
            **dict(zip(names, given.values(), strict=True)),
            "temperature": 0.0,
            "sample_top_k": 0,
            "sample_top_p": 1.0,
            "seed": 0,
        }

    def test_samples(self, trained, call_command, capsys, tmp_path):
        (tmp_path / "in").write_text("I see the cat\n")
        flags = [f"--model_dir={trained.model_dir}", f"--input={tmp_path}/in"]
        flags += ["--temperature=1", "--n_best=3"]
        outputs = []
        for seed in (1, 2):
            assert call_command("decode", *flags, f"--seed={seed}") == 0
            outputs.append(capsys.readouterr().out)
        assert outputs[0] != outputs[1]
        assert len(set(outputs[0].removesuffix("\n").split("\n"))) == 3

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--input={tmp}/none"], "{tmp}/none: cannot be read: No such file or directory."),
            (["--input={tmp}"], "{tmp}: cannot be read: Is a directory."),
            (
                ["--input={tmp}/latin1"],
                r"{tmp}/latin1:2: byte 4 of the line \(0xe9\) is not UTF-8. .*",
            ),
            (["--input={tmp}/nul"], "{tmp}/nul:2: byte 3 of the line is NUL. Is this .*"),
            (["--input={tmp}/no.gz"], "{tmp}/no.gz: not a whole gzip file: .*"),
            (["--beam_size="], "--beam_size=: write a whole number."),
            (["--batch_size=0"], "--batch_size=0: write 1 or more."),
            (["--min_length=60"], "--min_length=60 exceeds the maximum, 51 for the shortest .*"),
            (["--output={tmp}"], "--output={tmp} is a folder. Name a file."),
            (["--noscores=true"], "--noscores=true: write --scores=true or --scores=false."),
            (["--output={tmp}/no/x"], "--output={tmp}/no/x: there is no such folder. Make .*"),
            (["--model_dir="], "--model_dir is missing. Folder of a trained model."),
            (["--n_best=9"], "--n_best=9 exceeds --beam_size=4: write --beam_size=9 or more.*"),
            (["--sample_top_k=4"], "--sample_top_k and --sample_top_p have no effect at .*"),
            (["--seed=0"], "--seed=0 has no effect at --temperature=0, which draws nothing. .*"),
            (["--temperature=1", "--beam_size=2"], "--temperature=1.0 samples, --beam_size=2 .*"),
            (["--checkpoint=5"], ".* does not have it; steps saved: 15, 30, 45"),
        ],
    )
    def test_mistakes(self, refused, trained, tmp_path, flags, message):
        (tmp_path / "latin1").write_bytes("x\ncaf\xe9\n".encode("latin-1"))
        (tmp_path / "nul").write_bytes(b"x\ny \0\n")
        (tmp_path / "no.gz").write_bytes(b"x\n")
        (tmp_path / "good").write_text("x\n")
        given = {"--model_dir": trained.model_dir, "--input": "{tmp}/good"}
        given |= dict(flag.split("=", 1) for flag in flags)
        flags = [f"{name}={value}".format(tmp=tmp_path) for name, value in given.items()]
        assert re.fullmatch(message.format(tmp=tmp_path), refused("decode", *flags))

    def test_model_dir_is_missing(self, refused):
        assert refused("decode") == "--model_dir is missing. Folder of a trained model."


class TestScore:
    def test_perplexities_beyond_all_numbers(self):
        assert score._perplexity(-8.0, 4) == pytest.approx(math.exp(2))
        assert score._perplexity(np.float32(-1e3), 1) == math.inf

    def test_pairs(self, trained, translator, call_command, capsys, corpus, tmp_path):
        sources, targets = ["I see the cat", "", "x"], ["je vois le chat", "je<n>vois", ""]
        (tmp_path / "source").write_text("".join(f"{text}\n" for text in sources))
        (tmp_path / "target").write_text("".join(f"{text}\n" for text in targets))
        flags = [f"--{side}={tmp_path / side}" for side in ("source", "target")]
        assert call_command("score", f"--model_dir={trained.model_dir}", *flags) == 0
        captured = capsys.readouterr()
        rows = [[float(part) for part in line.split("\t")] for line in captured.out.splitlines()]
        scores, counts, perplexities = np.transpose(rows)
        np.testing.assert_allclose(scores, translator.score(sources, targets), rtol=1e-4)
        pieces = translator.tokenizer.tokenize(targets).row_lengths().numpy()
        np.testing.assert_array_equal(counts, pieces + 1)
        np.testing.assert_allclose(perplexities, np.exp(-scores / counts), rtol=1e-3)
        total = np.exp(-scores.sum() / counts.sum())
        assert captured.err.startswith(f"3 lines, {int(counts.sum())} tokens, log probability ")
        assert float(captured.err.split()[-1]) == pytest.approx(total, rel=1e-3)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--source={corpus}/test.fr"], "--target is missing. Their targets, line by line."),
            (
                ["--source={corpus}/no", "--target=-"],
                "{corpus}/no: cannot be read: No such .*",
            ),
            (["--batch_size=0"], "--batch_size=0: write 1 or more."),
            (["--source=-", "--target=-"], "--source=- --target=-: standard input can be read .*"),
            (
                ["--source={corpus}/test.fr", "--target={corpus}/train.fr"],
                "--source=.* has 12 lines, --target=.* has 240: they must be as many.",
            ),
        ],
    )
    def test_mistakes(self, refused, trained, corpus, flags, message):
        flags = [
            f"--model_dir={trained.model_dir}",
            *(flag.format(corpus=corpus) for flag in flags),
        ]
        assert re.fullmatch(message.format(corpus=corpus), refused("score", *flags))


class TestExport:
    def test_says_nothing_but_where(self, exported):
        assert exported[1].stderr == b""

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ([], "--export_dir is missing. Folder of all versions."),
            (["--mode=serve"], "--mode=serve: write predict or score."),
            (["--static_batch=8"], "--static_batch=8 alone makes no shape: add --static_length.*"),
            (
                ["--mode=score", "--beam_alpha=1"],
                "--mode=score does not .*: leave out --beam_alpha.",
            ),
            (["--n_best=9"], "--n_best=9 exceeds --beam_size=4: .*"),
            (["--checkpoint=5"], ".* does not have it; steps saved: 15, 30, 45"),
        ],
    )
    def test_mistakes(self, refused, trained, tmp_path, flags, message):
        flags = [f"--model_dir={trained.model_dir}", *flags]
        if len(flags) > 1:
            flags.append(f"--export_dir={tmp_path}/export")
        assert re.fullmatch(message, refused("export", *flags))
        assert list(tmp_path.iterdir()) == []


class TestHelp:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_help(self, name, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        monkeypatch.setattr(app, "quiet_tensorflow", lambda: None)
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(ROOT)])
        runpy.run_path(ROOT / "bin" / name, run_name="__main__")
        # What it imports is this checkout's, wherever it is called from.
        assert sys.path[0] == str(ROOT)
        text, error = capsys.readouterr()
        assert error == ""
        assert f"bin/{name} --" in text
        flags = re.findall(r"^  --(\w+)\n {6}\S", text, re.M)
        assert len(flags) == text.count("\n  --")

    def test_tensorflow_is_not_imported(self):
        """That takes several seconds, and says things on standard error."""
        code = (
            "import importlib, sys\n"
            "sys.argv = ['command', '--help']\n"
            f"for name in {COMMANDS}:\n"
            "    try:\n"
            "        importlib.import_module(f'tf_teaforn.cli.{name}').main()\n"
            "    except SystemExit as end:\n"
            "        assert not end.code\n"
            "sys.exit('tensorflow' in sys.modules)"
        )
        done = run_code(code, stdout=subprocess.DEVNULL)
        assert (done.returncode, done.stderr) == (0, b"")

    def test_every_setting_is_a_flag_of_train(self, call_command, capsys):
        assert call_command("train", "-h") == 0
        text = capsys.readouterr().out
        assert {field.name for field in settings()} <= set(re.findall(r"^  --(\w+)$", text, re.M))
        assert re.search(r"^ +demo_enfr: English-French phrases", text, re.M)
        assert max(map(len, text.splitlines())) <= 100

    def test_defaults_of_a_task(self, call_command, capsys):
        assert call_command("train", "--task=gigaword", "--help") == 0
        head, _, defaults = capsys.readouterr().out.partition("\n\nDefaults of --task=gigaword:\n")
        assert "Defaults" not in head
        expected = get_task("gigaword").defaults
        assert defaults.split() == [f"--{flag}={value}" for flag, value in expected.items()]

    def test_a_reader_that_has_gone(self):
        reader, writer = os.pipe()
        os.close(reader)
        done = run_code(PRINT_A_LOT, stdout=writer)
        os.close(writer)
        assert done.returncode == 1 and done.stderr == b""


PRINT_A_LOT = """
from tf_teaforn.cli import app
app.run(lambda values: None, lambda values: print("x" * 1_000_000), "")
"""


class TestTaskOfOnesOwn:
    MODULE = """
from tf_teaforn.data.sources import GeneratedSource
from tf_teaforn.task import Task, register_task

def pairs(split):
    return [(f"{i}", f"{i}") for i in range(5)]

register_task(Task("own", "", GeneratedSource(pairs, "1"), ("bleu",), "bleu", {"vocab_size": 9}))
"""

    def test_module_in_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "own_task_module.py").write_text(self.MODULE)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tf_teaforn.task._tasks", {})
        monkeypatch.setattr(sys, "path", [*sys.path])
        task = app.load_task("own", {}, None, "own_task_module")
        assert task.name == "own"

    def test_a_module_whose_task_is_refused(self, tmp_path, monkeypatch):
        module = self.MODULE.replace('("bleu",), "bleu"', '("blue",), "blue"')
        (tmp_path / "refused_task_module.py").write_text(module)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(UserError, match="^--module_import=refused_task_module: .*blue"):
            app.load_task("own", {}, None, "refused_task_module")

    def test_evaluate_says_that_its_module_is_needed(self, refused, tmp_path):
        (tmp_path / "config.json").write_text(RunConfig(task="own").to_json())
        line = refused("evaluate", f"--model_dir={tmp_path}")
        assert line == (
            f"--model_dir={tmp_path} was trained on the task own, which does not come with "
            "tf_teaforn. Name its Python module with --module_import."
        )

    def test_data_dir_of_the_run(self, tmp_path, monkeypatch):
        config = RunConfig(task="gigaword", data_dir="/kept")
        (tmp_path / "config.json").write_text(config.to_json())
        values = types.SimpleNamespace(data_dir=None, module_import=None, model_dir=tmp_path)
        monkeypatch.setattr(app, "required", lambda values, name: values.model_dir)
        monkeypatch.setattr(app, "task_options", lambda values: {})
        assert app.trained_task(values).source.data_dir == "/kept"
        values.data_dir = "moved"
        monkeypatch.chdir(tmp_path)
        assert app.trained_task(values).source.data_dir == f"{tmp_path}/moved"


class TestPaths:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("", ""),
            ("a/../b", "{cwd}/b"),
            ("/a", "/a"),
            ("gs://bucket/a", "gs://bucket/a"),
        ],
    )
    def test_absolute(self, path, expected, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert app.absolute(path) == expected.format(cwd=tmp_path)


class TestStandardError:
    """What TensorFlow says when it starts is left out, and nothing else."""

    NOISE = (
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795832401.392543   12813 port.cc:153] oneDNN custom operations are on.",
        "I0000 00:00:1795832401.39   12 cudart_stub.cc:31] Could not find cuda drivers",
        "I0000 00:00:1795832401.39   12 device_compiler.h:196] Compiled cluster using XLA!",
        "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow",
        "E0000 00:00:1795832409.14   12 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA "
        "error: Failed call to cuInit: UNKNOWN ERROR (303)",
        "E0000 00:00:1795832411.13 12 util.cc:131] oneDNN supports DT_INT64 only on platforms with",
        "E0000 00:00:1795832411.13 12 util.cc:131] oneDNN supports DT_INT32 only on platforms with",
        "E0000 00:00:1750.1 12 cuda_fft.cc:477] Unable to register cuFFT factory: Attempting to",
        "W0000 00:00:1750.1 12 computation_placer.cc:177] computation placer already registered.",
        "W0000 00:00:1750.1 12 cpu_allocator_impl.cc:82] Allocation of 8 exceeds 10% of free "
        "system memory.",
        "2026-11-28 20:48:08.694956: I tensorflow/core/util/port.cc:153] oneDNN custom operations",
        "2026-11-28 20:48:08.694956: E external/local_xla/cuda_platform.cc:51] failed call to "
        "cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)",
        "normalizer.cc(51) LOG(INFO) precompiled_charsmap is empty. use identity normalization.",
    )
    NEWS = (
        "",
        "F0000 00:00:1795832401.392543   12813 a.cc:1] Check failed",
        "W0000 00:00:1795832401.392543   12813 gpu_device.cc:2342] Cannot dlopen some libraries",
        "E0000 00:00:1795832409.14   12 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA "
        "error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "2026-11-28 20:48:08.694956: E tensorflow/core/a.cc:1] Not enough I/O b.cc:2] threads",
        "2026-11-28 20:48:08.694956: I am a line of text",
        "I am a line of text",
        "train: --task is missing.",
    )

    def test_is_noise(self):
        assert all(stderr.is_noise(f"{line}\n".encode()) for line in self.NOISE)
        assert not any(stderr.is_noise(f"{line}\n".encode()) for line in self.NEWS)

    def run(self, last, **environment):
        code = f"""
import os, sys
from tf_teaforn.cli.stderr import quiet_tensorflow
quiet_tensorflow()
print("from Python", file=sys.stderr, end="\\r")
for line in {[*self.NOISE, *self.NEWS]!r}:
    os.write(2, (line + "\\n").encode())
os.write(2, b"no newline")
{last}
"""
        return run_code(code, **environment)

    @pytest.mark.parametrize(
        ("last", "code"), [("sys.exit(3)", 3), ("os.abort()", -signal.SIGABRT)]
    )
    def test_news_are_shown_however_the_process_ends(self, last, code):
        done = self.run(last)
        assert done.returncode == code
        expected = "from Python\r" + "\n".join([*self.NEWS, "no newline"])
        assert done.stderr.decode() == expected

    @pytest.mark.parametrize("shown", [{}, {"TF_CPP_MIN_LOG_LEVEL": "0"}])
    def test_a_terminal_that_is_gone(self, tmp_path, shown):
        """What is written to it raises no error, and the work is saved."""
        code = """
import logging, sys, time
from pathlib import Path
from tqdm import tqdm
from tf_teaforn.cli import app
from tf_teaforn.interruption import Interruption

def main(values):
    with Interruption() as interruption, tqdm(disable=None) as bar:
        assert not bar.disable
        Path("ready").touch()
        while not interruption.requested:
            time.sleep(0.01)
        for i in range(1000):
            bar.set_postfix(loss=i)
            bar.update()
            tqdm.write("step", file=sys.stderr)
            logging.warning("a warning")
        Path("saved").touch()
        raise interruption.stopped(7)

app.run(lambda values: None, main, "")
"""
        clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**clean, **shown, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: os.login_tty(slave) or signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        try:
            os.close(slave)
            while process.poll() is None and not (tmp_path / "ready").exists():
                time.sleep(0.01)
            os.close(master)
            assert process.wait(60) == 129
            assert (tmp_path / "saved").exists()
        finally:
            process.kill()

    def test_whoever_sets_tensorflow_s_level_sees_all(self):
        done = self.run("", TF_CPP_MIN_LOG_LEVEL="0")
        expected = "from Python\r" + "\n".join([*self.NOISE, *self.NEWS, "no newline"])
        assert done.stderr.decode() == expected


class TestApp:
    @pytest.fixture
    def run(self, monkeypatch):
        """Runs a command that raises an exception; returns its exit code."""
        monkeypatch.setattr(sys, "argv", ["command"])
        monkeypatch.setattr(app, "quiet_tensorflow", lambda: None)

        def run(error):
            def main(values):
                raise error

            with pytest.raises(SystemExit) as end:
                app.run(lambda values: None, main, "")
            return end.value.code

        return run

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (UserError("one\n  two"), 2, "command: one two"),
            (PermissionError(13, "Permission denied", "/x"), 2, "command: /x: Permission denied."),
            (
                OSError(errno.EDQUOT, "Disk quota exceeded"),
                2,
                "command: output: Disk quota exceeded.",
            ),
            (
                tf.errors.ResourceExhaustedError(None, None, "/x; No space left on device\nmore"),
                2,
                "command: /x; No space left on device.",
            ),
            (
                tf.errors.ResourceExhaustedError(None, None, "OOM when allocating [9]\nmore"),
                2,
                "command: Not enough memory (OOM when allocating [9]). Take a smaller --batch_size "
                "(of bin/train: --micro_batch_tokens or --batch_tokens), --beam_size or model.",
            ),
            (KeyboardInterrupt(), 130, "Interrupted."),
        ],
    )
    def test_one_line(self, run, capsys, error, code, line):
        assert run(error) == code
        assert capsys.readouterr() == ("", f"{line}\n")

    @pytest.mark.parametrize("error", [ValueError("a bug"), OSError("without a file")])
    def test_mistakes_of_ours_keep_their_traceback(self, run, error):
        with pytest.raises(type(error)) as raised:
            run(error)
        assert raised.value is error
