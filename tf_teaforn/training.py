"""The training run: data, model, updates, validation, checkpoints, resuming."""

import dataclasses
import datetime
import hashlib
import json
import logging
import math
import sys
import tempfile
import time

import keras
import numpy as np
from etils import epath
from tqdm import tqdm

from tf_teaforn import checkpoint
from tf_teaforn import model_dir as model_dirs
from tf_teaforn.config import RunConfig
from tf_teaforn.data import cache, pipeline
from tf_teaforn.data.tokenizer import train_sentencepiece
from tf_teaforn.data.tokenizers import has_tokenizer, save_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.evaluation import evaluate_translator, read_examples
from tf_teaforn.export import export
from tf_teaforn.inference import Translator, search_config
from tf_teaforn.optimizers import build_optimizer
from tf_teaforn.pretrained.importers import open_folder
from tf_teaforn.teaforn import TeaForN
from tf_teaforn.tf_backend.strategy import ScalarWriter

if keras.backend.backend() == "jax":
    from tf_teaforn.jax_backend.strategy import StepRunner, peak_memory
else:
    from tf_teaforn.tf_backend.strategy import StepRunner, peak_memory

_RECORDS = "metrics.jsonl"

_logger = logging.getLogger(__name__)

# What may change between a run and its continuation.
_CHANGEABLE = ("eval_every", "checkpoint_every", "keep", "patience", "log_every")
_CHANGEABLE += ("export_on_best", "beam_size", "beam_alpha", "decode_length", "data_dir")


def build_vocabulary(task, vocabulary_size, path):
    """Trains a SentencePiece vocabulary on both sides of the task's training split."""

    def sentences():
        for pair in task.source.dataset("train").as_numpy_iterator():
            yield from (text.decode() for text in pair)

    train_sentencepiece(sentences(), vocabulary_size, path, symbols=task.symbols)


class Run:
    """One training run in one model directory.

    Args:
        config: `RunConfig`.
        task: the `Task` it names.
        model_dir: where everything is written. A run found there is continued.
        strategy: `tf.distribute.Strategy`, or `jax_backend.strategy.Strategy`.
        vocabulary: path of a ready SentencePiece model, or None to train one.
        command: the command line, for the record.

    Raises:
        UserError: the folder holds a run with other settings.
    """

    def __init__(self, config, task, model_dir, strategy, vocabulary=None, command=()):
        self.config = config
        self.task = task
        self.model_dir = epath.Path(model_dir)
        self._check_settings()
        pretrained = self._pretrained()
        if pretrained is None:
            self._prepare_vocabulary(vocabulary)
        else:
            save_tokenizer(pretrained.tokenizer, self.model_dir)
        self.tokenizer = model_dirs.read_tokenizer(model_dir)
        keras.utils.set_random_seed(config.training.seed)
        with strategy.scope():
            self.model = TeaForN(
                self._build_seq2seq(pretrained), **dataclasses.asdict(config.teaforn)
            )
            if config.training.freeze:
                self.model.freeze(config.training.freeze.split(","))
            self.model.compile(optimizer=build_optimizer(config.training))
        self.runner = StepRunner(strategy, self.model)
        self.replicas = strategy.num_replicas_in_sync
        model_dirs.write_config(model_dir, config, list(command))
        self.writer = ScalarWriter(self.model_dir / "tensorboard")
        self.state = {"best": None, "best_step": None, "without_gain": 0}
        self.step = 0

    def _check_settings(self):
        if not (self.model_dir / model_dirs.CONFIG).exists():
            return
        if checkpoint.steps(self.model_dir):
            changeable = _CHANGEABLE
            if self.config.training.schedule != "linear":
                changeable += ("train_steps",)
            fixed = [name for name in self.config.flat() if name not in changeable]
        else:
            # There is nothing yet but the vocabulary.
            fixed = ["task", "vocab_size", "train_files"]
        differences = [
            line
            for line in model_dirs.read_config(self.model_dir).differences(self.config)
            if line.startswith(tuple(f"--{name}:" for name in fixed))
        ]
        if differences:
            raise UserError(
                f"--model_dir={self.model_dir} holds a run with other settings: "
                f"{'; '.join(differences)}. Take them up, or another --model_dir."
            )

    def _pretrained(self):
        """What a run that has no checkpoint yet starts from, or None."""
        folder = self.config.model.init_from
        if folder is None or checkpoint.steps(self.model_dir):
            return None
        pretrained = open_folder(folder)
        self.model_dir.mkdir(parents=True, exist_ok=True)
        if has_tokenizer(self.model_dir):
            kept = model_dirs.read_tokenizer(self.model_dir)
            if kept.fingerprint != pretrained.tokenizer.fingerprint:
                raise UserError(
                    f"--model_dir={self.model_dir} holds another vocabulary than "
                    f"--init_from={folder}: take another --model_dir."
                )
        return pretrained

    def _build_seq2seq(self, pretrained):
        model = self.config.model
        if pretrained is None:
            return model_dirs.build_seq2seq(
                self.config, self.tokenizer.vocabulary_size, self.model_dir
            )
        _logger.info("Starting from %s", model.init_from)
        seq2seq = pretrained.build(dtype=model.precision, dropout=model.dropout)
        model_dirs.write_architecture(self.model_dir, seq2seq)
        return seq2seq

    def _prepare_vocabulary(self, vocabulary):
        if has_tokenizer(self.model_dir):
            return
        path = self.model_dir / model_dirs.VOCABULARY
        if checkpoint.steps(self.model_dir):
            raise UserError(
                f"{path} is missing, but there are checkpoints that were trained with it: restore "
                "it, or take another --model_dir."
            )
        self.model_dir.mkdir(parents=True, exist_ok=True)
        if vocabulary:
            if not epath.Path(vocabulary).exists():
                raise UserError(f"--vocab={vocabulary}: there is no such file.")
            epath.Path(vocabulary).copy(path)
        else:
            _logger.info("Training a vocabulary of %d subwords", self.config.model.vocab_size)
            build_vocabulary(self.task, self.config.model.vocab_size, path)

    def _cache(self, split, drop_long):
        # Token caches are memory-mapped, so they stay on the local disk.
        remote = "://" in str(self.model_dir)
        folder = epath.Path(tempfile.gettempdir()) / "tf_teaforn" if remote else self.model_dir
        return cache.build_or_load(
            folder / "cache",
            self.task.source,
            split,
            self.tokenizer,
            self.config.data.max_source_length,
            self.config.data.max_target_length,
            drop_long=drop_long,
        )

    def restore(self):
        """Goes on from the newest good checkpoint, if there is one."""
        found = checkpoint.load_training(self.model_dir)
        if found is None:
            return
        weights, optimizer, state = found
        checkpoint.assign(model_dirs.named_weights(self.model), weights)
        checkpoint.assign(self._training_variables(), optimizer)
        self.step = state.pop("step")
        self.state.update({name: state[name] for name in self.state})
        self._forget_records_after(self.step)
        _logger.info("Continuing from step %d", self.step)

    def _training_variables(self):
        """Optimizer, random generators and running means, by name."""
        optimizer = self.model.optimizer.variables
        known = {id(variable) for variable in [*self.model.weights, *optimizer]}
        others = [variable for variable in self.model.variables if id(variable) not in known]
        # Numbered, because Keras gives Adafactor's moments of different weights the same path.
        return {
            f"{kind}/{i}/{variable.name}": variable
            for kind, variables in (("optimizer", optimizer), ("state", others))
            for i, variable in enumerate(variables)
        }

    def save(self):
        """Writes a checkpoint of the current step.

        Raises:
            UserError: a weight is not finite; nothing is written.
        """
        weights = _arrays(model_dirs.named_weights(self.model))
        for name, value in weights.items():
            self._check_finite(np.isfinite(value).all(), f"weight {name}")
        checkpoint.save(
            self.model_dir,
            self.step,
            weights,
            _arrays(self._training_variables()),
            {**self.state, "settings": self._settings()},
            keep=self.config.training.keep,
        )

    def _settings(self):
        """Digest of all that makes checkpoints ones of the same run, to be averaged."""
        free = {*_CHANGEABLE, "train_steps", *self.config.task_options}
        # Without defaults, so that a setting that a later version adds changes nothing.
        defaults = RunConfig(task="").flat()
        fixed = {
            name: value
            for name, value in self.config.flat().items()
            if name not in free and value != defaults.get(name)
        }
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]

    def run(self):
        """Trains to the last step or until patience runs out; returns the best score."""
        training = self.config.training
        train_cache = self._cache("train", drop_long=not self.task.truncate)
        valid_cache = self._cache("validation", drop_long=False)
        examples = read_examples(self.task.source, "validation")
        model_dirs.write_examples(self.model_dir, *examples)
        translator = Translator(
            self.model.seq2seq,
            self.tokenizer,
            search_config(self.config.decoding, beam_size=1),
            self.config.data.max_source_length,
            self.config.data.max_target_length,
        )
        self.restore()
        if self.step < training.train_steps and not self._out_of_patience():
            self._train(train_cache, valid_cache, translator, examples)
        else:
            _logger.info("The run is at step %d already: nothing is left to do", self.step)
        return self.state["best"]

    def _out_of_patience(self):
        patience = self.config.training.patience
        return patience is not None and self.state["without_gain"] >= patience

    def _train(self, train_cache, valid_cache, translator, examples):
        training = self.config.training
        dataset = pipeline.training_dataset(
            train_cache,
            mode=self.config.data.batching,
            batch_tokens=self.config.data.batch_tokens,
            seed=training.seed,
            start_step=self.step,
            batch_multiple=self.replicas,
            start_id=self.model.seq2seq.start_id,
        )
        batches = iter(self.runner.distribute(dataset))
        start, logged = time.time(), self.step
        # A bar is for terminals; a log file gets a line now and then.
        with tqdm(total=training.train_steps, initial=self.step, unit="step", disable=None) as bar:
            while self.step < training.train_steps:
                self.runner.train(batches)
                self.step += 1
                bar.update()
                last = self.step == training.train_steps
                evaluating = self.step % training.eval_every == 0 or last
                # A window of averages ends where validation takes over the metrics.
                if self.step % training.log_every == 0 or evaluating:
                    logs = self._log(bar, time.time() - start, self.step - logged)
                    start, logged = time.time(), self.step
                    self._check_finite(math.isfinite(logs["loss"]), "loss")
                if evaluating or self.step % training.checkpoint_every == 0:
                    pause = time.time()
                    if evaluating:
                        self._validate(valid_cache, translator, examples)
                    else:
                        self.save()
                    start += time.time() - pause
                    if self._out_of_patience():
                        _write(f"No better score in {training.patience} validations: stopping.")
                        break

    def _check_finite(self, finite, name):
        if not finite:
            saved = ", ".join(map(str, checkpoint.steps(self.model_dir))) or "none"
            raise UserError(
                f"The {name} is not a finite number at step {self.step}. Lower --learning_rate or "
                f"raise --warmup_steps, with another --model_dir. Good checkpoints: {saved}."
            )

    def _log(self, bar, seconds, steps):
        logs = self.runner.read_logs()
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        speed = logs["tokens"] / seconds
        bar.set_postfix(loss=f"{logs['loss']:.3f}", tokens_per_s=f"{speed:.0f}")
        if bar.disable:
            left = (self.config.training.train_steps - self.step) * seconds / steps
            _logger.info(
                "step %d/%d: loss %.4f, %.0f target tokens/s, %s left",
                self.step,
                self.config.training.train_steps,
                logs["loss"],
                speed,
                datetime.timedelta(seconds=round(left)),
            )
        self.writer.write(
            self.step,
            {**logs, "learning_rate": rate, "target_tokens_per_second": speed, **peak_memory()},
        )
        self._record("train", logs)
        return logs

    def _validate(self, valid_cache, translator, examples):
        logs = self.runner.test(
            pipeline.evaluation_dataset(
                valid_cache,
                batch_tokens=self.config.data.batch_tokens,
                batch_multiple=self.replicas,
                start_id=self.model.seq2seq.start_id,
            )
        )
        self._check_finite(math.isfinite(logs["loss"]), "validation loss")
        metrics, _ = evaluate_translator(translator, self.task, *examples)
        values = {**logs, **metrics.values}
        self.writer.write(self.step, {f"validation/{name}": v for name, v in values.items()})
        self._record("validation", values)
        headline = self.task.headline_metric
        score = metrics.values[headline]
        better = self.state["best"] is None or score > self.state["best"]
        if better:
            self.state = {"best": score, "best_step": self.step, "without_gain": 0}
        else:
            self.state = {**self.state, "without_gain": self.state["without_gain"] + 1}
        self.save()
        if better:
            checkpoint.promote_best(self.model_dir, self.step, metrics.values)
            if self.config.training.export_on_best:
                export(self.model_dir, self.model_dir / "export", "best")
        _write(
            f"step {self.step}: validation loss {logs['loss_0']:.4f}, greedy "
            + ", ".join(f"{name} {value:.2f}" for name, value in metrics.values.items())
            + (" (best)" if better else "")
        )

    def _record(self, kind, values):
        line = json.dumps({"kind": kind, "step": self.step, **values})
        with (self.model_dir / _RECORDS).open("a") as file:
            file.write(line + "\n")

    def _forget_records_after(self, step):
        path = self.model_dir / _RECORDS
        if path.exists():
            # A line of a killed process may be torn.
            lines = [line for line in path.read_text().split("\n") if line.endswith("}")]
            kept = [f"{line}\n" for line in lines if json.loads(line)["step"] <= step]
            temporary = self.model_dir / f"{_RECORDS}.tmp"
            temporary.write_text("".join(kept))
            temporary.replace(path)


def _write(line):
    tqdm.write(line, file=sys.stderr)


def _arrays(variables):
    return {name: np.asarray(keras.ops.convert_to_numpy(v)) for name, v in variables.items()}
