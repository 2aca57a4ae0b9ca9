"""The training run: data, model, updates, validation, checkpoints, resuming."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import logging
import math
import os
import sys
import tempfile
import time

import keras
import numpy as np
from etils import epath
from tqdm import tqdm

from tf_teaforn import checkpoint
from tf_teaforn import model_dir as model_dirs
from tf_teaforn.config import BOOKKEEPING, RunConfig
from tf_teaforn.data import cache, pipeline
from tf_teaforn.data.tokenizer import VOCABULARY_FILE, train_sentencepiece
from tf_teaforn.data.tokenizers import DESCRIPTION, has_tokenizer, load_tokenizer, save_tokenizer
from tf_teaforn.errors import OutOfMemoryError, UserError
from tf_teaforn.evaluation import evaluate_translator, read_examples
from tf_teaforn.export import export
from tf_teaforn.inference import Translator, search_config
from tf_teaforn.interruption import InterruptedWorkError, Interruption
from tf_teaforn.metrics import script_warning
from tf_teaforn.optimizers import build_optimizer
from tf_teaforn.out_of_memory import StepMemory, advice, variable_bytes
from tf_teaforn.paths import is_remote, write_whole
from tf_teaforn.pretrained.importers import open_folder, usable
from tf_teaforn.teaforn import TeaForN
from tf_teaforn.tf_backend.summary import ScalarWriter

if keras.backend.backend() == "jax":
    from tf_teaforn.jax_backend.strategy import StepRunner, Workers, device_memory, peak_memory
else:
    from tf_teaforn.tf_backend.step_runner import StepRunner, Workers
    from tf_teaforn.tf_backend.strategy import device_memory, peak_memory

_RECORDS = "metrics.jsonl"

_logger = logging.getLogger(__name__)

# What may change between a run and its continuation.
_CHANGEABLE = BOOKKEEPING | {"eval_every", "checkpoint_every", "decode_length", "remat"}
_CHANGEABLE |= {"steps_per_execution", "on_nonfinite", "micro_batch_tokens", "test_files"}
# Options of a task that its vocabulary does not depend on.
_OF_NO_VOCABULARY = ("valid_files", "test_files", "metric")


def build_vocabulary(task, vocabulary_size, path):
    """Trains a SentencePiece vocabulary on both sides of the task's training split.

    Raises:
        UserError: see `train_sentencepiece`; the data cannot be read.
    """

    def sentences():
        # Many at a time: a step of the iterator costs more than a sentence.
        for texts in task.source.dataset("train").batch(4096).as_numpy_iterator():
            for pair in zip(*texts, strict=True):
                yield from (text.decode() for text in pair)

    train_sentencepiece(sentences(), vocabulary_size, path, symbols=task.symbols)


def missing_symbols(task, tokenizer):
    """Those of the task's symbols that are not a piece of their own in a vocabulary."""
    lengths = tokenizer.tokenize(list(task.symbols)).row_lengths().numpy() if task.symbols else []
    # The mark of a word's beginning may come before.
    return [symbol for symbol, length in zip(task.symbols, lengths, strict=True) if length > 2]


class Run:
    """One training run in one model directory, whose lock the caller holds.

    Of several workers, each of which makes the same `Run`, the chief alone writes.

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
        self.workers = Workers(strategy)
        self._check_settings()
        pretrained = self._pretrained()
        if self.workers.chief:
            if pretrained is None:
                self._prepare_vocabulary(vocabulary)
            else:
                self.model_dir.mkdir(parents=True, exist_ok=True)
                save_tokenizer(pretrained.tokenizer, self.model_dir)
        self.workers.wait()
        self.tokenizer = load_tokenizer(model_dir)
        for symbol in missing_symbols(task, self.tokenizer):
            _logger.warning("The vocabulary has no piece for %s, which this task uses.", symbol)
        keras.utils.set_random_seed(config.training.seed)
        with strategy.scope():
            self.model = TeaForN(
                self._build_seq2seq(pretrained), **dataclasses.asdict(config.teaforn)
            )
            if config.training.freeze:
                self.model.freeze(config.training.freeze.split(","))
                _report_frozen(config.training.freeze, self.model)
            self.model.compile(optimizer=build_optimizer(config.training))
        skip = config.training.on_nonfinite == "skip"
        self.runner = StepRunner(strategy, self.model, skip_nonfinite=skip)
        self.replicas = strategy.num_replicas_in_sync
        self._command = list(command)
        # One that goes on may yet be refused, and stays as it was then.
        self._begins = not checkpoint.steps(model_dir)
        self._write_settings(self._begins)
        self.writer = None
        self.state = {
            "best": None,
            "best_step": None,
            "best_metrics": {},
            "best_loss": None,
            "without_gain": 0,
            "validated_step": 0,
            "skipped_steps": 0,
            "replicas": self.replicas,
            "vocabulary": self.tokenizer.fingerprint,
        }
        self.step = self._saved_step = 0
        self._obsolete = []
        self._unwritten = []
        self._plan = None

    def _write_settings(self, now):
        """Writes them, if it is time to, and refuses workers that were started with others."""
        if self.workers.chief and now:
            model_dirs.write_config(self.model_dir, self.config, self._command)
        self.workers.wait()
        self._check_settings(of_all_workers=now and not self.workers.chief)

    def _check_settings(self, of_all_workers=False):
        if not (self.model_dir / model_dirs.CONFIG).exists():
            return
        # What a task takes anyway may be given or not.
        earlier, mine = (
            dataclasses.replace(config, task_options=self.task.with_defaults(config.task_options))
            for config in (model_dirs.read_config(self.model_dir), self.config)
        )
        if of_all_workers:
            fixed = {*earlier.flat(), *mine.flat()} - {"data_dir", "cache_dir"}
        elif checkpoint.steps(self.model_dir):
            changeable = set(_CHANGEABLE)
            if self.config.training.schedule != "linear":
                changeable.add("train_steps")
            # A task's option that is given no more is a difference too.
            fixed = {*earlier.flat(), *mine.flat()} - changeable
        else:
            # There is nothing yet but the vocabulary.
            fixed = {"task", "vocab_size", *self.task.options} - {*_OF_NO_VOCABULARY}
        differences = [
            line
            for line in earlier.differences(mine)
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
        if folder is None and (self.model_dir / DESCRIPTION).exists():
            raise UserError(
                f"--model_dir={self.model_dir} is that of a run with --init_from: give it again, "
                "or take another --model_dir."
            )
        if folder is None or checkpoint.steps(self.model_dir):
            return None
        pretrained = open_folder(folder)
        if has_tokenizer(self.model_dir):
            kept = load_tokenizer(self.model_dir)
            if kept.fingerprint != pretrained.tokenizer.fingerprint:
                raise UserError(
                    f"--model_dir={self.model_dir} holds another vocabulary than "
                    f"--init_from={folder}: take another --model_dir."
                )
        return pretrained

    def _build_seq2seq(self, pretrained):
        model = self.config.model
        if pretrained is None:
            seq2seq = model_dirs.build_seq2seq(
                self.config, self.tokenizer.vocabulary_size, self.model_dir
            )
            self._check_abilities(seq2seq)
            return seq2seq
        _logger.info("Starting from %s", model.init_from)
        for note in pretrained.notes:
            _logger.info(note)
        with usable(model.init_from):
            seq2seq = pretrained.build(dtype=model.precision, dropout=model.dropout)
        self._check_abilities(seq2seq)
        if self.workers.chief:
            model_dirs.write_architecture(self.model_dir, seq2seq)
        return seq2seq

    def _check_abilities(self, seq2seq):
        """Lengths and batches of this run against what a model can compute."""
        data, n = self.config.data, self.config.teaforn.n
        source, target = data.max_source_length, data.max_target_length
        for limit, needed, flags in zip(
            seq2seq.max_positions,
            (source, target + n - 1),
            (
                f"--max_source_length={source} needs",
                f"--max_target_length={target} and --n={n} need",
            ),
            strict=True,
        ):
            if limit is not None and needed > limit:
                raise UserError(f"{flags} {needed} positions; the model has {limit}.")
        if data.batching == "pack" and not seq2seq.decoder.supports_packing:
            raise UserError(
                "--batching=pack: with this model sentences of one row would see each other. Write "
                "--batching=bucket."
            )

    def _prepare_vocabulary(self, vocabulary):
        path = self.model_dir / VOCABULARY_FILE
        if has_tokenizer(self.model_dir):
            if not model_dirs.has_other_vocabulary(self.model_dir, self.config, self.task):
                return
            _logger.info("%s is of other data, or of another size: making another", path)
        elif checkpoint.steps(self.model_dir):
            raise UserError(
                f"{path} is missing, but there are checkpoints that were trained with it: restore "
                "it, or take another --model_dir."
            )
        self.model_dir.mkdir(parents=True, exist_ok=True)
        if vocabulary:
            write_whole(path, epath.Path(vocabulary).read_bytes())
        else:
            _logger.info("Training a vocabulary of %d subwords", self.config.model.vocab_size)
            build_vocabulary(self.task, self.config.model.vocab_size, path)
            model_dirs.write_vocabulary_data(self.model_dir, self.config, self.task)

    def _cache(self, split, drop_long):
        # Token caches are memory-mapped, so they stay on the local disk.
        aside = epath.Path(tempfile.gettempdir()) / f"tf_teaforn-{os.getuid()}"
        folder = aside if is_remote(self.model_dir) else self.model_dir
        return cache.build_or_load(
            self.config.data.cache_dir or folder / "cache",
            self.task.source,
            split,
            self.tokenizer,
            self.config.data.max_source_length,
            self.config.data.max_target_length,
            drop_long=drop_long,
        )

    def restore(self):
        """Goes on from the newest good checkpoint, if there is one.

        Raises:
            UserError: it was trained with another vocabulary or on other data.
        """
        found = checkpoint.load_training(self.model_dir)
        if found is None:
            return
        weights, optimizer, state = found
        trained_with = state.get("vocabulary", self.tokenizer.fingerprint)
        if trained_with != self.tokenizer.fingerprint:
            raise UserError(
                f"{self.model_dir / VOCABULARY_FILE} is not the vocabulary that the "
                f"checkpoints were trained with: its SHA-256 is {self.tokenizer.fingerprint}, "
                f"theirs {trained_with}. Restore it, or take another --model_dir."
            )
        self._check_data(state.get("data", {}))
        checkpoint.assign(model_dirs.named_weights(self.model), weights)
        checkpoint.assign(self._training_variables(), optimizer)
        self.step = self._saved_step = state.pop("step")
        state.pop("interrupted", None)
        self._obsolete = checkpoint.interrupted(self.model_dir)
        if state.get("replicas", self.replicas) != self.replicas:
            _logger.warning(
                "So far the run had %d replicas, now it has %d: other examples share a batch.",
                state["replicas"],
                self.replicas,
            )
        self.state.update({**state, "replicas": self.replicas})
        self.runner.guard.restore(self.state["skipped_steps"])
        if self.workers.chief:
            _logger.info("Continuing from step %d", self.step)

    def _check_data(self, trained_on):
        changed = [
            split
            for split, digest in self.state["data"].items()
            if trained_on.get(split, digest) != digest
        ]
        if changed:
            raise UserError(
                f"--model_dir={self.model_dir}: the examples of split {' and '.join(changed)} are "
                "not those of its checkpoints: the files, the task's code or a package that "
                "prepares them, such as sentencex, has changed since. Restore it, or start another "
                f"run with --init_from={self.model_dir}@latest, without --model, and another "
                "--model_dir."
            )

    def _check_workers(self):
        """Raises UserError where workers would go on from other steps, or with other data."""
        # As many digits as sums of squares are exact for.
        facts = {f"split {name}": int(d[:5], 16) for name, d in self.state["data"].items()}
        for what, fact in {"checkpoint": self.step, **facts}.items():
            powers = [round(self.workers.sum(fact**power)) for power in range(3)]
            # Of equal numbers alone the mean of the squares is the square of the mean.
            if powers[0] * powers[2] != powers[1] ** 2:
                raise UserError(
                    f"--model_dir={self.model_dir}: another worker has another {what}. All have to "
                    "read the same folder, whole, and the same data."
                )

    def _training_variables(self):
        """Optimizer, random generators and running means, by name."""
        optimizer = self.model.optimizer.variables
        metrics = self.model.metrics_variables
        known = {id(variable) for variable in [*self.model.weights, *optimizer, *metrics]}
        others = [variable for variable in self.model.variables if id(variable) not in known]
        # Numbered, because Keras gives Adafactor's moments of different weights the same path.
        return {
            f"{kind}/{i}/{variable.name}": variable
            for kind, variables in (("optimizer", optimizer), ("state", others), ("mean", metrics))
            for i, variable in enumerate(variables)
        }

    def save(self, interrupted=False):
        """Writes a checkpoint of the current step.

        Args:
            interrupted: whether it has no turn of its own: caused by a signal, or not validated
                yet. It is deleted after the next one, or that one's validation, unless a validation
                makes it one that counts, so that what `average:<n>` finds does not depend on
                signals.

        Raises:
            UserError: a weight is not finite; nothing is written.
        """
        # What is saved before it is validated may yet be found bad: nothing goes before that.
        due = self._validation_is_due()
        waiting, unwanted = (self._obsolete, []) if due else ([], self._obsolete)
        weights = _arrays(model_dirs.named_weights(self.model))
        training = _arrays(self._training_variables())
        for name, value in weights.items():
            self._check_finite(np.isfinite(value).all(), f"weight {name}")
        if self.workers.chief:
            self._sync_records()
            checkpoint.save(
                self.model_dir,
                self.step,
                weights,
                training,
                self._checkpoint_state(interrupted),
                keep=self.config.training.keep + (interrupted or due) + len(waiting),
                delete=unwanted,
            )
            self._obsolete = [*waiting, *([self.step] if interrupted else [])]
        self._saved_step = self.step

    def _checkpoint_state(self, interrupted):
        return {**self.state, "settings": self._settings(), "interrupted": interrupted}

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
        """Trains to the last step or until patience runs out; returns the best score.

        Raises:
            StoppedError: SIGTERM, SIGHUP or SIGINT, after the step in progress was saved, or
                another worker is gone.
            UserError: see `save` and the flags that the message names.
        """
        if not self.workers.chief:
            # Until it has written what all of them read.
            self.workers.wait()
        train_cache = self._cache("train", drop_long=not self.task.truncate)
        valid_cache = self._cache("validation", drop_long=False)
        if self.workers.chief:
            self.workers.wait()
        self.state["data"] = {"train": train_cache.digest, "validation": valid_cache.digest}
        self.restore()
        self._check_workers()
        self._write_settings(not self._begins)
        if self.workers.chief:
            self._forget_later_records()
        count = self.config.training.eval_examples or None
        examples = read_examples(self.task.source, "validation", count)
        valid_cache = valid_cache.first(count)
        if self.workers.chief:
            model_dirs.write_examples(self.model_dir, *examples)
            if warning := script_warning(self.task.metrics, examples[1]):
                _logger.warning("Warning: %s", warning)
            self._publish_best()
        translator = Translator(
            self.model.seq2seq,
            self.tokenizer,
            search_config(self.config.decoding, beam_size=1),
            self.config.data.max_source_length,
            self.config.data.max_target_length,
        )
        # A search keeps a few numbers a position, where training keeps dozens unless it computes
        # them again.
        more = 4 if self.config.teaforn.remat == "none" else 1
        tokens = more * self._tokens_at_a_time() // self.replicas
        rows = tokens // self.config.data.max_source_length
        translator.batch_size = max(min(rows, translator.batch_size), 1)
        if self.workers.chief:
            self.writer = ScalarWriter(self.model_dir / "tensorboard", self.step)
        self.workers.wait()
        if self._unfinished():
            try:
                with Interruption() as interruption:
                    self._train(train_cache, valid_cache, translator, examples, interruption)
            finally:
                # What a run that went wrong has recorded since its last checkpoint tells why.
                if self.workers.chief:
                    with contextlib.suppress(Exception):
                        self._sync_records()
        else:
            if self.workers.chief:
                checkpoint.discard(self.model_dir, {*self._obsolete} - {self.step})
            _logger.info("The run is at step %d already: nothing is left to do", self.step)
        return self.state["best"]

    def _out_of_patience(self):
        patience = self.config.training.patience
        return patience is not None and self.state["without_gain"] >= patience

    def _train(self, train_cache, valid_cache, translator, examples, interruption):
        training = self.config.training
        batches = self.runner.iterator(
            lambda shard: pipeline.training_dataset(
                train_cache,
                **self._batch_settings(),
                start_step=self.step,
                shard=shard,
                start_id=self.model.seq2seq.start_id,
            )
        )
        # The first step is compiled, which is no measure of speed.
        compiling, window = True, _Window(self.step, self._tokens_seen())
        # A bar is for terminals, and the chief's; a log file gets a line now and then.
        disable = None if self.workers.chief else True
        with tqdm(
            total=training.train_steps, initial=self.step, unit="step", disable=disable
        ) as bar:
            while self._unfinished():
                if not self._validation_is_due():
                    self._advance(batches)
                    bar.update(self.step - bar.n)
                    if compiling:
                        compiling = False
                        # Waits for what is under way, of which it may be told here only.
                        self._check_steps(train_cache)
                        window = _Window(self.step, self._tokens_seen())
                    # A window of averages ends where validation takes over the metrics.
                    if self.step % training.log_every == 0 or self._validation_is_due():
                        self._check_steps(train_cache)
                        self._log(bar, window)
                        window = _Window(self.step)
                if self.step % training.checkpoint_every == 0:
                    # Waits for the steps that are under way, whose time counts.
                    self._check_steps(train_cache)
                with window.paused():
                    stopping = self.workers.sum(interruption.requested) > 0
                    has_turn = self.step % training.checkpoint_every == 0
                    due = self._validation_is_due()
                    if (stopping or has_turn or due) and self.step != self._saved_step:
                        self._check_steps(train_cache)
                        # Before validation: whatever happens there, no step is lost.
                        self.save(interrupted=not has_turn)
                    if due and not stopping:
                        stopping = not self._validate(
                            valid_cache, translator, examples, interruption
                        )
                    if stopping:
                        self.workers.wait()
                        raise interruption.stopped(self.step)
        if self._out_of_patience() and self.workers.chief:
            _write(f"No better score in {training.patience} validations: stopping.")
        # For what the chief still writes.
        self.workers.wait()

    def _unfinished(self):
        more = self.step < self.config.training.train_steps and not self._out_of_patience()
        return more or self._validation_is_due()

    def _validation_is_due(self):
        training = self.config.training
        last = self.step == training.train_steps
        return self.state["validated_step"] != self.step and (
            last or self.step % training.eval_every == 0
        )

    def _advance(self, batches):
        """One execution: as many steps as were asked for, or up to the next report."""
        training = self.config.training
        ends = [training.train_steps]
        for every in (training.log_every, training.eval_every, training.checkpoint_every):
            ends.append((self.step // every + 1) * every)
        steps = min(training.steps_per_execution, min(ends) - self.step)
        with self._advice(self.step + 1):
            self.runner.train(batches, self.step + 1, steps)
        self.step += steps

    @contextlib.contextmanager
    def _advice(self, step):
        """Raises `UserError`, which says what to lower, where a step does not fit into memory."""
        try:
            yield
        except OutOfMemoryError as error:
            line = advice(self.config, step, str(error), self._memory(), self.replicas)
            raise UserError(line) from error

    def _memory(self):
        """`StepMemory` of a step on sentences of the maximum lengths."""
        data, model = self.config.data, self.model
        lengths = data.max_source_length, data.max_target_length
        rows = max(data.batch_tokens // max(lengths) // self.replicas, 1)
        gradients = variable_bytes(model.trainable_variables)
        activations = limit = None
        # An estimate that fails, for lack of memory too, must not hide what happened.
        with contextlib.suppress(Exception):
            limit = device_memory()
            activations = max(self.runner.temporary_bytes(rows, *lengths) - gradients, 0)
        optimizer = variable_bytes(model.optimizer.variables)
        return StepMemory(variable_bytes(model.variables), optimizer, gradients, activations, limit)

    def _tokens_at_a_time(self):
        """Of all devices together: what fits into memory in training fits in validation."""
        tokens = self.config.data.batch_tokens
        return min(self.config.teaforn.micro_batch_tokens or tokens, tokens)

    def _batch_settings(self):
        """What the batches depend on besides the data."""
        return {
            "mode": self.config.data.batching,
            "batch_tokens": self.config.data.batch_tokens,
            "seed": self.config.training.seed,
            "batch_multiple": self.replicas,
        }

    def _check_steps(self, train_cache):
        """Reports steps that were not finite since the last call.

        Raises:
            UserError: there was one, and the run is to stop; or one that did not fit into memory,
                as some devices say only when they are asked for results.
        """
        with self._advice(self.step):
            found = self.runner.nonfinite_steps()
        if found.first is None:
            return
        batch = self._describe_batch(train_cache, found.first)
        if self.config.training.on_nonfinite == "stop":
            self._check_finite(False, found.what, found.first, batch)
        _logger.warning(
            "%d steps skipped so far. Not a finite number at step %d: %s. %s",
            found.count,
            found.first,
            found.what,
            batch,
        )
        self.state["skipped_steps"] = found.count

    def _describe_batch(self, train_cache, step):
        if self._plan is None:
            self._plan = pipeline.training_plan(train_cache, **self._batch_settings())
        batch = next(self._plan.batches(step - 1))
        first = int(batch.indices[0])
        source = self.tokenizer.detokenize([train_cache.source(first)])[0].numpy().decode()
        indices = ", ".join(map(str, batch.indices[:8]))
        more = f" and {len(batch.indices) - 8} more" if len(batch.indices) > 8 else ""
        return (
            f"Its batch has the training examples {indices}{more} (from 0, dropped ones not "
            f"counted); {first} begins: {source[:80]!r}."
        )

    def _check_finite(self, finite, name, step=None, batch=""):
        if not finite:
            saved = checkpoint.listing(self.model_dir)
            raise UserError(
                f"Not a finite number at step {step or self.step}: {name}. {batch} Lower "
                "--learning_rate or raise --warmup_steps, with another --model_dir; "
                f"--on_nonfinite=skip leaves out single bad steps. Good checkpoints: {saved}."
            )

    def _tokens_seen(self):
        """Target tokens in the running means."""
        trackers = {metric.name: metric for metric in self.model.metrics}
        return float(trackers["tokens"].result())

    def _log(self, bar, window):
        logs = self.runner.read_logs()
        if not self.workers.chief:
            return
        steps = self.config.training.train_steps
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        if logs["tokens"]:
            stages = [f"{logs[f'loss_{stage}']:.3f}" for stage in range(self.model.n)]
            shown = {"loss": f"{logs['loss']:.3f}", "stages": "/".join(stages)}
            losses = f"loss {logs['loss']:.4f} (stages {', '.join(stages)})"
        else:
            # The means are of nothing.
            logs, shown, losses = {"tokens": 0.0}, {"loss": "-"}, "all steps were skipped"
        shown["lr"] = f"{rate:.2e}"
        line = f"step {self.step}/{steps}: {losses}, learning rate {rate:.2e}"
        points = {"learning_rate": rate, **peak_memory()}
        if self.step > window.step:
            seconds = window.seconds()
            speed = (logs["tokens"] - window.tokens) / seconds
            seconds_left = (steps - self.step) * seconds / (self.step - window.step)
            left = datetime.timedelta(seconds=round(seconds_left))
            shown["tokens_per_s"] = f"{speed:.0f}"
            line += f", {speed:.0f} target tokens/s, {left} left"
            points |= {"target_tokens_per_second": speed, "seconds_left": seconds_left}
        bar.set_postfix(shown)
        if bar.disable:
            _logger.info(line)
        if self.config.training.on_nonfinite == "skip":
            logs["skipped_steps"] = self.state["skipped_steps"]
        self.writer.write(self.step, {**logs, **points})
        self._record("train", logs)

    def _validate(self, valid_cache, translator, examples, interruption):
        """Scores the saved model and publishes the best; whether nothing interrupted it."""
        try:
            with self._advice(self.step), interruption.immediate(not self.workers.several):
                logs = self.runner.test(
                    pipeline.evaluation_dataset(
                        valid_cache,
                        batch_tokens=self._tokens_at_a_time(),
                        batch_multiple=self.replicas,
                        start_id=self.model.seq2seq.start_id,
                        # Each is compiled, for minutes, on a TPU.
                        one_shape=self.runner.on_tpu and self.config.data.batching != "bucket",
                    )
                )
                if not math.isfinite(logs["loss"]):
                    if self.workers.chief:
                        checkpoint.discard(self.model_dir, [self.step])
                    self._check_finite(False, "the validation loss")
                metrics = {}
                if self.workers.chief:
                    metrics = evaluate_translator(translator, self.task, *examples).values
        except InterruptedWorkError:
            self.model.reset_metrics()
            return False
        # The chief's decision is everybody's.
        score = self.workers.sum(metrics.get(self.task.headline_metric, 0.0))
        loss = self.workers.sum(logs["loss_0"] if self.workers.chief else 0.0)
        gain = self.state["best"] is None or score > self.state["best"]
        # Scores may be equal for long: of models that know little, all are 0.
        known = self.state["best_loss"] is not None
        equal = known and score == self.state["best"] and loss < self.state["best_loss"]
        better = gain or equal
        self.state["validated_step"] = self.step
        self.state["without_gain"] = 0 if gain else self.state["without_gain"] + 1
        if better:
            self.state.update(best=score, best_step=self.step, best_metrics=dict(metrics))
            self.state["best_loss"] = loss
        if self.workers.chief:
            values = {**logs, **metrics}
            self.writer.write(self.step, {f"validation/{name}": v for name, v in values.items()})
            self._record("validation", values)
            self._sync_records()
            checkpoint.update_state(
                self.model_dir,
                self.step,
                self._checkpoint_state(interrupted=False),
                keep=self.config.training.keep,
                delete=self._obsolete,
            )
            self._obsolete = []
            self._publish_best()
            _write(
                f"step {self.step}: validation loss {logs['loss_0']:.4f}, greedy "
                + ", ".join(f"{name} {value:.2f}" for name, value in metrics.items())
                + (" (best)" if better else "")
            )
        return True

    def _publish_best(self):
        """Brings `best/` up to date, also after a run that was killed before it could."""
        step = self.state["best_step"]
        if step not in checkpoint.steps(self.model_dir) or checkpoint.is_best(self.model_dir, step):
            return
        if self.config.training.export_on_best:
            export(self.model_dir, self.model_dir / "export", str(step))
        checkpoint.promote_best(self.model_dir, step, self.state["best_metrics"])

    def _record(self, kind, values):
        self._unwritten.append(json.dumps({"kind": kind, "step": self.step, **values}) + "\n")
        # An object store takes the whole file again for every line; at checkpoints that will do.
        if not is_remote(self.model_dir):
            self._write_records()

    def _write_records(self):
        if self._unwritten:
            with (self.model_dir / _RECORDS).open("a") as file:
                file.write("".join(self._unwritten))
            self._unwritten = []

    def _sync_records(self):
        """Records up to a checkpoint outlive a power cut as the checkpoint does."""
        self._write_records()
        self.writer.flush()
        path = self.model_dir / _RECORDS
        if path.exists() and not is_remote(path):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _forget_later_records(self):
        """Drops what will be written again."""
        path = self.model_dir / _RECORDS
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes().decode(errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except ValueError:
                # Torn, by a kill, a full disk or a power cut.
                continue
            again = record["step"] == self.step and self._validation_is_due()
            if record["step"] <= self.step and not (again and record["kind"] == "validation"):
                kept.append(f"{line}\n")
        write_whole(path, "".join(kept))


class _Window:
    """Since when the running means are taken, for the speed.

    Args:
        step: the last step before it.
        tokens: target tokens that were in the means already.
    """

    def __init__(self, step, tokens=0.0):
        self.step = step
        self.tokens = tokens
        self._start = time.monotonic()

    def seconds(self):
        """Time that has passed, pauses left out."""
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def paused(self):
        """Inside, time does not count."""
        begin = time.monotonic()
        yield
        self._start += time.monotonic() - begin


def _report_frozen(parts, model):
    kinds = model.non_trainable_weights, model.trainable_weights
    frozen, trained = (sum(math.prod(weight.shape) for weight in kind) for kind in kinds)
    _logger.info(
        "Frozen (--freeze=%s): %d weights of %s numbers; trained: %d of %s",
        parts,
        len(kinds[0]),
        f"{frozen:,}",
        len(kinds[1]),
        f"{trained:,}",
    )


def _write(line):
    tqdm.write(line, file=sys.stderr)


def _arrays(variables):
    return {name: np.asarray(keras.ops.convert_to_numpy(v)) for name, v in variables.items()}
