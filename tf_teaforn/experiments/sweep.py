"""Runs the grid of an experiment: trains, scores, compares, and keeps one results file.

    <output_dir>/results.json            all numbers, replaced as a whole after every step
    <output_dir>/vocab-<task>.model      one vocabulary for all runs of a task
    <output_dir>/runs/<run>/             model directories
    <output_dir>/logs/<run>.log          what the commands printed

What is done already is skipped: a model directory with the run's settings that is at its last step,
wherever it was trained, and an evaluation whose JSON is there. Where a run's folder is gone, its
record in results.json says what was done: that file and the vocabularies are enough to go on from.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import queue
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path

import sentencepiece

from tf_teaforn import checkpoint
from tf_teaforn.config import RunConfig
from tf_teaforn.data.test_sets import language_pair_of, read_test_set
from tf_teaforn.errors import UserError
from tf_teaforn.experiments.command_line import (
    FILES,
    file_digests,
    file_names,
    flag,
    from_here,
    portable,
    task_options_in,
)
from tf_teaforn.experiments.plan import Run, chosen_tasks, plan, run_name, scaled
from tf_teaforn.experiments.processes import (
    CommandError,
    EndedError,
    Processes,
    share,
    visible_gpus,
)
from tf_teaforn.experiments.progress import Progress
from tf_teaforn.experiments.records import Records, place
from tf_teaforn.experiments.results import cell, has_result, read_curves, runs_of
from tf_teaforn.experiments.same_run import OtherRunError, alphas_of, differences
from tf_teaforn.experiments.speed import read_speed
from tf_teaforn.lock import locked
from tf_teaforn.metrics import compare, default_metrics
from tf_teaforn.paths import write_whole
from tf_teaforn.task import VALUES
from tf_teaforn.texts import read_lines


class Sweep:
    """An experiment in a folder.

    Args:
        experiment: `Experiment`, at the paper's scale.
        output_dir: local folder for everything.
        options: `Options`.
        get_task: task's name -> `Task`, on the user's files where it is "text".
        launch: runs a command as `Processes.run` does; None: that.

    Raises:
        UserError: an impossible combination of options.
    """

    def __init__(self, experiment, output_dir, options, get_task, launch=None):
        self.experiment = scaled(experiment, options.scale)
        self.output_dir = Path(output_dir)
        self.options = options
        self.get_task = get_task
        self._processes = Processes()
        self.launch = launch or self._processes.run
        self.tasks = chosen_tasks(self.experiment, options)
        self.imported = "init_from" in options.settings
        if self.experiment.pretrained and not self.imported:
            raise UserError(
                f"--init_from is missing: the experiment {experiment.name} starts from a "
                f"pretrained {experiment.model}. Name its folder, or add --scale=small."
            )
        self.runs = self.plan()
        self._check_averages()
        self.records = Records(self.output_dir / "results.json")

    def plan(self) -> list[Run]:
        """The runs, as far as the sizes of vocabularies are known."""
        found = {task: self._vocabulary(task) for task in self.tasks.values()}
        sizes = {task: _vocabulary_size(path) for task, path in found.items() if path.exists()}
        return plan(self.experiment, self.options, self.get_task, sizes)

    def _check_averages(self):
        """Raises `UserError` where a run would have too few checkpoints for an average."""
        for run in self.runs:
            training = self._settled(run).training
            for spec in self.experiment.checkpoints:
                count = int(spec.partition("average:")[2] or 1)
                if training.keep < count:
                    raise UserError(f"--keep={training.keep}: {spec} needs --keep={count} or more.")
                # Validations save one too, and so does the last step.
                every = {training.checkpoint_every, training.eval_every}
                saved = sorted({step * i for step in every for i in range(1, count)})
                least = saved[count - 2] + 1 if count > 1 else 1
                if training.train_steps < least:
                    raise UserError(
                        f"--train_steps={training.train_steps}: with a checkpoint every "
                        f"{min(every)} steps, {spec} needs --train_steps={least} or more."
                    )

    def commands(self) -> list[str]:
        """The command lines of the whole grid."""
        lines = [
            shlex.join(["bin/build_vocab", *self._vocabulary_flags(task)])
            for task in self.tasks.values()
            if not self.imported and not self._vocabulary(task).exists()
        ]
        for run in self.runs:
            lines.append(self._command(run))
            for role, spec in self._scored():
                flags = self._evaluate_flags(run, role, spec, self.experiment.beam_sizes)
                lines.append(shlex.join(["bin/evaluate", *flags]))
        return lines

    def run(self) -> list[str]:
        """Does what is left to do; returns the names of the runs that failed.

        Raises:
            UserError: another sweep runs in the folder, or one with another vocabulary did.
        """
        with locked(self.output_dir, "sweep", "output_dir"):
            return self._run()

    def _run(self):
        # What another sweep wrote before this one had the folder.
        self.records.reload()
        for folder in ("runs", "logs"):
            (self.output_dir / folder).mkdir(parents=True, exist_ok=True)
        for task in self.tasks.values():
            self._check_sets(task)
            if not self.imported:
                self._prepare_vocabulary(task)
                self._check_size(task)
        self.runs = self.plan()
        model = self.runs[0].settings["model"]
        vocabularies = self._checked_vocabularies(model)
        entry = {
            "scale": self.options.scale,
            "tasks": self.tasks,
            "files": file_names(self.options.task_options),
            "files_sha256": self._checked_files(),
            "model": model,
            "vocabulary_sha256": vocabularies,
            "train_steps": {
                cell(run.task, run.arm.name): run.settings["train_steps"] for run in self.runs
            },
            "seeds": sorted({run.seed for run in self.runs}),
            "beam_sizes": list(self.experiment.beam_sizes),
            "checkpoints": list(self.experiment.checkpoints),
            "commands": [portable(shlex.join(self.options.command))],
        }
        known = self.records.experiments.get(self.experiment.name, {})
        measured = self._measured(known)
        if all(known.get(name) == entry[name] for name in ("scale", "files", "model")):
            # A part of the grid, after another. Of a part without results nothing is left.
            seeds = {run["seed"] for run in measured} & {*known["seeds"]}
            entry["seeds"] = sorted({*entry["seeds"], *seeds})
            entry["tasks"] = {**known["tasks"], **entry["tasks"]}
            entry["commands"] = list(dict.fromkeys([*known["commands"], *entry["commands"]]))
            entry["vocabulary_sha256"] = {**known.get("vocabulary_sha256", {}), **vocabularies}
            # Of an arm that was run: with other steps it is refused.
            entry["train_steps"] |= {
                cell(run["task"], run["arm"]): run["train_steps"] for run in measured
            }
        elif measured:
            different = next(n for n in ("scale", "files", "model") if known.get(n) != entry[n])
            raise UserError(
                f"{self.records.path} has {self.experiment.name} with {different} "
                f"{known.get(different)}, not {entry[different]}. Take another --output_dir."
            )
        self.records.set_experiment(self.experiment.name, entry)
        gpus = visible_gpus()
        count = self.options.parallel or max(1, len(gpus))
        free: queue.SimpleQueue = queue.SimpleQueue()
        for index in range(count):
            free.put(share(gpus, index, count))
        progress = Progress(self.runs, count, *self._done_before())
        reporting = threading.Lock()
        failed = []

        def do(run):
            environment = free.get()
            start = time.time()
            try:
                done = self._do(run, environment)
                outcome = "done" if done else "was done already"
            except EndedError:
                # Nothing is wrong with the run: the same sweep goes on with it.
                return
            except (CommandError, UserError, OSError, ValueError) as error:
                message = from_here(" ".join(str(error).split()))
                # What was done stays so, for whoever gives its settings again.
                done_before = self.records.run(run.name).get("status") == "done"
                kept = isinstance(error, OtherRunError) or done_before
                status = {} if kept else {"status": "failed"}
                self._record(run, error=message, **status)
                failed.append(run.name)
                done, outcome = {"failed"}, f"failed: {error}"
            finally:
                free.put(environment)
            seconds = time.time() - start if done else None
            with reporting:
                progress.report(run, outcome, seconds, trained="trained" in done)

        if count == 1:
            for run in self.runs:
                do(run)
        else:
            self._do_side_by_side(do, count)
        return failed

    def _done_before(self):
        """({run: step it goes on from}, {run: seconds it took}), as far as there are any."""
        started, seconds = {}, {}
        for run in self.runs:
            record = self.records.run(run.name)
            if record.get("status") == "done":
                started[run.name] = run.settings["train_steps"]
                seconds |= {run.name: record["seconds"]} if record.get("seconds") else {}
                continue
            # A folder that cannot be read is its run's failure, later.
            with contextlib.suppress(UserError):
                started[run.name] = max(checkpoint.steps(self._model_dir(run)), default=0)
        return started, seconds

    def _do_side_by_side(self, do, count):
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(do, run) for run in self.runs]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                # No others shall begin, and those that run be over before the pool waits for them.
                pool.shutdown(wait=False, cancel_futures=True)
                self._processes.terminate()
                raise

    def _do(self, run, environment):
        """Trains and scores what is missing; returns what it did: "trained", "scored"."""
        if self._is_recorded(run):
            if self.records.run(run.name).get("error"):
                self._record(run, error=None)
            return set()
        log = self.output_dir / "logs" / f"{run.name}.log"
        model_dir = self._model_dir(run)
        done = set()
        trained = self._is_trained(run)
        self._check_other_seeds(run)
        if not trained:
            self._train(run, log, environment)
            done.add("trained")
        elif not {"curves", "seconds"} & {*self.records.run(run.name)}:
            speed = read_speed(model_dir / "tensorboard")
            origin = {"version": "trained elsewhere"}
            if (model_dir / "command.txt").exists():
                command = (model_dir / "command.txt").read_bytes().decode(errors="replace")
                command = command.splitlines()[-1]
                origin["command"] = portable(command)
            self._record(run, ("launched",), seconds=speed.get("seconds"), speed=speed, **origin)
        self._record(run, curves=read_curves(model_dir / "metrics.jsonl"))
        for role, spec in self._scored():
            found = {
                k: self._read_evaluation(run, role, spec, k) for k in self.experiment.beam_sizes
            }
            missing = [k for k, result in found.items() if result is None]
            if missing:
                flags = self._evaluate_flags(run, role, spec, missing)
                self.launch("evaluate", flags, log, environment, {})
                done.add("scored")
                found |= {k: self._read_evaluation(run, role, spec, k) for k in missing}
            self._record_evaluations(run, role, spec, found)
        self._record(run, status="done", error=None)
        self._compare(run)
        return done

    def _train(self, run, log, environment):
        model_dir = self._model_dir(run)
        fresh = not self._has_checkpoints(run)
        before = self._launched(run, fresh, log)
        start, usage = time.time(), {}
        self._record(run, launched={**before, "since": start})
        try:
            with self._evaluations_aside(run) if fresh else contextlib.nullcontext():
                self.launch("train", self._train_flags(run), log, environment, usage)
        finally:
            # A run takes what all its launches take. What is recorded of an earlier one holds until
            # this one is trained.
            peaks = [found.get("peak_host_bytes", 0) for found in (before, usage)]
            memory = {"peak_host_bytes": max(peaks)} if any(peaks) else {}
            seconds = before.get("seconds", 0) + time.time() - start
            self._record(run, launched={"seconds": seconds, **memory})
        if not self._is_trained(run):
            raise CommandError(f"{model_dir} is not at its last step after training")
        # Another model was scored.
        without = ("evaluations", "comparisons", "status", "launched")
        speed = {**read_speed(model_dir / "tensorboard"), **memory}
        about = {"command": self._command(run), "version": _version()}
        self._record(run, without, seconds=seconds, speed=speed, **about)

    def _launched(self, run, fresh, log):
        """Seconds and memory of the launches that the next one goes on from."""
        record = self.records.run(run.name)
        if not (self._model_dir(run) / "config.json").exists():
            return {}
        if "launched" in record or fresh:
            launched = dict(record.get("launched", {}))
            since = launched.pop("since", None)
            if since is not None and log.exists():
                # The sweep was killed in that launch, which lasted until the last line it printed.
                lasted = max(0, log.stat().st_mtime - since)
                launched["seconds"] = launched.get("seconds", 0) + lasted
            return launched
        # It was taken for whole.
        peak = record.get("speed", {}).get("peak_host_bytes", 0)
        return {"seconds": record.get("seconds") or 0, "peak_host_bytes": peak}

    @contextlib.contextmanager
    def _evaluations_aside(self, run):
        """Puts eval/ aside inside, for good if there are checkpoints then: it is of other ones."""
        model_dir = self._model_dir(run)
        folder, aside = model_dir / "eval", model_dir / "eval.old"
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        try:
            yield
        finally:
            if aside.exists() and not folder.exists() and not self._has_checkpoints(run):
                aside.rename(folder)

    def _check_sets(self, task):
        """Raises `UserError` where there is nothing to score runs on."""
        source = self.get_task(task).source
        status = {self.records.run(run.name).get("status") for run in self.runs if run.task == task}
        for given in self.experiment.sets.values():
            kind, _, name = given.partition("=")
            if kind == "--split":
                if name not in source.splits:
                    source.dataset(name)
            elif status != {"done"}:
                read_test_set(name, language_pair_of(source))

    # Vocabularies

    def _vocabulary(self, task):
        if self.options.vocabulary:
            return Path(self.options.vocabulary)
        return self.output_dir / f"vocab-{task}.model"

    def _vocabulary_flags(self, task):
        settings = next(run.settings for run in self.runs if run.task == task)
        size = [flag("vocab_size", settings["vocab_size"])] if "vocab_size" in settings else []
        return [*self._task_flags(task), *size, flag("output", self._vocabulary(task))]

    def _prepare_vocabulary(self, task):
        path = self._vocabulary(task)
        if path.exists():
            return
        if self.options.vocabulary:
            raise UserError(f"--vocab={path}: there is no such file.")
        for run in self.runs:
            adopted = self._model_dir(run) / "vocab.model"
            if run.task == task and adopted.exists():
                write_whole(path, adopted.read_bytes())
                return
        log = self.output_dir / "logs" / f"vocab-{task}.log"
        try:
            self.launch("build_vocab", self._vocabulary_flags(task), log, {}, {})
        except CommandError as error:
            raise UserError(f"The vocabulary of {task} cannot be built: {error}") from error

    def _check_size(self, task):
        """Raises `UserError` for a --vocab_size that the vocabulary does not have."""
        path, wanted = self._vocabulary(task), self.options.settings.get("vocab_size")
        if wanted not in (None, _vocabulary_size(path)):
            other = "" if self.options.vocabulary else ", or take another --output_dir"
            raise UserError(
                f"--vocab_size={wanted}, but {path} has {_vocabulary_size(path)} subwords. Leave "
                f"--vocab_size out{other}."
            )

    def _checked_vocabularies(self, model):
        """{task: SHA-256 of its vocabulary}.

        Raises:
            UserError: runs of the results file had another one.
        """
        if self.imported:
            return {}
        found = {}
        for task in self.tasks.values():
            path = self._vocabulary(task)
            found[task] = hashlib.sha256(path.read_bytes()).hexdigest()
            for name, about in self.records.experiments.items():
                known = about.get("vocabulary_sha256", {}).get(task, found[task])
                if about["model"] == model and known != found[task]:
                    raise UserError(
                        f"{path} (SHA-256 {found[task]}) is not the vocabulary of {task} that the "
                        f"runs of {name} in {self.records.path} had (SHA-256 {known}). Copy that "
                        "one there or name it with --vocab, or take another --output_dir."
                    )
        return found

    def _checked_files(self):
        """{flag: SHA-256 of the files that the user gave}.

        Raises:
            UserError: runs of the results file had other ones under these names.
        """
        names = file_names(self.options.task_options)
        found = file_digests(self.options.task_options)
        for experiment, about in self.records.experiments.items():
            for name, digest in found.items():
                if name in self._not_used_yet(about):
                    continue
                known = about.get("files_sha256", {}).get(name, digest)
                if about.get("files", {}).get(name) == names[name] and known != digest:
                    raise UserError(
                        f"--{name}={self.options.task_options[name]}: {experiment} in "
                        f"{self.records.path} is of other files with these names. Take another "
                        "--output_dir."
                    )
        return found

    def _not_used_yet(self, about):
        """Flags of the files that no run of an experiment has learned from or was scored on."""
        recorded = self.records.runs()
        runs = runs_of(about, {run["arm"] for run in recorded.values()}, recorded)
        if any(map(has_result, runs.values())):
            return ()
        if any(checkpoint.steps(self.output_dir / "runs" / name) for name in runs):
            return ("test_files",)
        # A vocabulary of the sweep's own is of the training files.
        return FILES if self.options.vocabulary else ("valid_files", "test_files")

    def _measured(self, about):
        """Runs of the experiment, as its entry has it, that there are results of."""
        arms = [arm.name for arm in self.experiment.arms]
        runs = runs_of(about, arms, self.records.runs()).values() if about else ()
        return [run for run in runs if has_result(run)]

    # Training

    def _model_dir(self, run):
        return self.output_dir / "runs" / run.name

    def _task_flags(self, task):
        files = [flag(name, value) for name, value in self.options.task_options.items()]
        return [flag("task", task), *(files if task == "text" else []), *self.options.common_flags]

    def _train_flags(self, run):
        vocabulary = [] if self.imported else [flag("vocab", self._vocabulary(run.task))]
        # A model that is imported brings both.
        without = {"vocab_size", "model"} if self.imported else {"vocab_size"}
        settings = {name: value for name, value in run.settings.items() if name not in without}
        return [
            *self._task_flags(run.task),
            *vocabulary,
            flag("model_dir", self._model_dir(run)),
            *(flag(name, value) for name, value in settings.items()),
            *self.options.train_flags,
        ]

    def _command(self, run):
        return portable(shlex.join(["bin/train", *self._train_flags(run)]))

    def _is_trained(self, run):
        """Whether a finished run is there.

        Raises:
            OtherRunError: what is there is another run.
        """
        model_dir = self._model_dir(run)
        path = model_dir / "config.json"
        if not path.exists():
            return False
        expected = self._expected(run)
        found = RunConfig.from_json(path.read_bytes(), origin=str(path))
        different = self._differences(found, expected)
        if not self.imported and (model_dir / "vocab.model").exists():
            if (model_dir / "vocab.model").read_bytes() != self._vocabulary(run.task).read_bytes():
                different.append(f"vocab.model is not {self._vocabulary(run.task)}")
        if different:
            raise OtherRunError(
                f"{model_dir} holds a run with other settings: {'; '.join(different)}. Remove it, "
                "or take another --output_dir."
            )
        state = checkpoint.latest_state(model_dir)
        last = expected.training.train_steps
        if state is None or not last == state["step"] == state.get("validated_step"):
            return False
        # Training may have been killed before it published its best checkpoint.
        best = state.get("best_step")
        return best not in checkpoint.steps(model_dir) or checkpoint.is_best(model_dir, best)

    def _is_recorded(self, run):
        """Whether the results file has all of a run that cannot be scored any more.

        Raises:
            OtherRunError: what it has is another run, or scored otherwise.
        """
        record = self.records.run(run.name)
        if self._can_be_scored(run) or record.get("status") != "done":
            return False
        different = self._differences(self._recorded(run, record), self._expected(run))
        if different:
            raise OtherRunError(
                f"{self.records.path} has {run.name} with other settings: {'; '.join(different)}. "
                "Take them up, or another --output_dir."
            )
        alpha = self._alpha(run)
        there = {
            place(e)
            for e in record.get("evaluations", [])
            if e.get("beam_alpha") == alpha and self._is_complete(run, e)
        }
        for (role, spec), k in itertools.product(self._scored(), self.experiment.beam_sizes):
            if (role, spec, k) not in there:
                raise OtherRunError(
                    f"{self.records.path} has no score, with all metrics, of {run.name}, {spec}, "
                    f"on the {role} set with --beam_size={k} and --beam_alpha={alpha}, and its "
                    f"checkpoints are gone from {self._model_dir(run)}. Copy them there, or take "
                    "another --output_dir to train again."
                )
        return True

    def _check_other_seeds(self, run):
        """Raises `OtherRunError` where the run would share a mean with runs of other settings."""
        planned = {other.name: other for other in self.runs}
        for name, record in self.records.runs().items():
            siblings = name.rpartition("-seed")[0] == run.name.rpartition("-seed")[0]
            if name == run.name or not siblings or not has_result(record):
                continue
            sibling = planned.get(name)
            if sibling and record.get("status") != "done" and not self._has_checkpoints(sibling):
                # It will be trained again too.
                continue
            found = self._recorded(run, record).replace({"seed": run.seed})
            different = self._differences(found, self._expected(run))
            alphas = alphas_of(record)
            # Those of this sweep are scored with its own.
            if not sibling and alphas - {self._alpha(run)}:
                there = ", ".join(map(str, alphas))
                different.append(f"--beam_alpha: {there} there, {self._alpha(run)} here")
            if different:
                raise OtherRunError(
                    f"{self.records.path} has {name} with other settings: {'; '.join(different)}. "
                    "Seeds of different settings have no common mean: take those up, or another "
                    "--output_dir."
                )

    def _has_checkpoints(self, run):
        return bool(checkpoint.steps(self._model_dir(run)))

    def _can_be_scored(self, run):
        """Whether there are all checkpoints that the experiment asks for."""
        if not self._has_checkpoints(run):
            return False
        recorded = self.records.run(run.name).get("evaluations", [])
        try:
            for spec in self.experiment.checkpoints:
                steps = list(checkpoint.resolve(self._model_dir(run), spec).steps)
                scored = [e["steps"] for e in recorded if e["checkpoint_flag"] == spec]
                # Where one in between is gone, the mean is of an older one.
                if any(steps[-1] == old[-1] and steps != old for old in scored):
                    return False
        except UserError:
            return False
        return True

    def _differences(self, found, expected):
        return differences(found, expected, self.experiment.checkpoints)

    def _recorded(self, run, record):
        """`RunConfig` of what the results file has of a run."""
        own = self.options.task_options if run.task == "text" else {}
        return self._config(run, record["settings"], task_options_in(record["command"]) or own)

    def _expected(self, run):
        options = self.options.task_options if run.task == "text" else {}
        return self._config(run, run.settings, options)

    def _config(self, run, settings, options):
        settings = {**self.get_task(run.task).defaults, **settings}
        if not self.imported:
            settings["vocab_size"] = _vocabulary_size(self._vocabulary(run.task))
        return RunConfig(task=run.task, task_options=options).replace(settings)

    # Scores

    def _scored(self):
        return [
            (role, spec) for spec in self.experiment.checkpoints for role in self.experiment.sets
        ]

    def _evaluate_flags(self, run, role, spec, beam_sizes):
        files = [flag(name, value) for name, value in self.options.task_options.items()]
        metrics = self._metrics(run, role, spec)
        return [
            flag("model_dir", self._model_dir(run)),
            flag("checkpoint", spec),
            self.experiment.sets[role],
            flag("beam_size", ",".join(map(str, beam_sizes))),
            flag("beam_alpha", self._alpha(run)),
            *([flag("metrics", ",".join(metrics))] if metrics else []),
            *(files if run.task == "text" else []),
            *self.options.common_flags,
        ]

    def _metrics(self, run, role, spec):
        """Those of the experiment; () for the task's own.

        With what another experiment in the folder asked for: new scores replace the old as a whole.
        """
        own = self.experiment.metrics or default_metrics(self.get_task(run.task).metrics)
        recorded = [
            "rouge" if value in VALUES["rouge"] else value
            for e in self.records.run(run.name).get("evaluations", [])
            if (e["role"], e["checkpoint_flag"]) == (role, spec)
            for value in e["metrics"]
        ]
        together = tuple(dict.fromkeys((*own, *recorded)))
        return together if len(together) > len(own) else self.experiment.metrics

    def _alpha(self, run):
        return self._settled(run).decoding.beam_alpha

    def _settled(self, run):
        """`RunConfig` of all but vocabulary and files."""
        settings = {**self.get_task(run.task).defaults, **run.settings}
        return RunConfig(task=run.task).replace(settings)

    def _set_name(self, role):
        return self.experiment.sets[role].partition("=")[2].replace("/", "_")

    def _evaluation_path(self, name, role, checkpoint_name, beam_size, alpha):
        """The .json of an evaluation of the run of that name."""
        file = f"{self._set_name(role)}-{checkpoint_name}-beam{beam_size}-alpha{alpha}.json"
        return self.output_dir / "runs" / name / "eval" / file

    def _read_evaluation(self, run, role, spec, beam_size):
        chosen = checkpoint.resolve(self._model_dir(run), spec)
        alpha = float(self._alpha(run))
        path = self._evaluation_path(run.name, role, chosen.name, beam_size, alpha)
        if not path.exists():
            return None
        try:
            result = json.loads(path.read_bytes())
        except ValueError:
            return None
        if not isinstance(result, dict):
            return None
        if result.get("steps") != list(chosen.steps):
            # Of what was the best checkpoint then.
            return None
        result["command"] = portable(result.get("command", ""))
        files = file_names(task_options_in(result["command"]))
        if not files.items() <= file_names(self.options.task_options).items():
            # Of other data.
            return None
        return result if self._is_complete(run, result) else None

    def _is_complete(self, run, result):
        metrics = self.experiment.metrics or default_metrics(self.get_task(run.task).metrics)
        wanted = {value for metric in metrics for value in VALUES.get(metric, (metric,))}
        return "references_sha256" in result and wanted <= set(result["metrics"])

    def _record_evaluations(self, run, role, spec, found):
        missing = [k for k, result in found.items() if result is None]
        if missing:
            raise CommandError(f"no result of beam {missing[0]} with the metrics asked for")
        labels = {"role": role, "checkpoint_flag": spec}
        kept = [
            old
            for old in self.records.run(run.name).get("evaluations", [])
            if any(old[name] != value for name, value in labels.items())
            or old["beam_size"] not in found
        ]
        new = [{**result, **labels} for result in found.values()]
        self._record(run, evaluations=kept + new)

    def _compare(self, run):
        """Tests the run, or all that go with it, against the first arm's run of the same seed."""
        # Arms that are not asked for now may have been run before.
        model = run.settings["model"]
        baseline, *others = (
            run_name(run.task, model, arm, run.seed) for arm in self.experiment.arms
        )
        for other in others if run.name == baseline else [run.name]:
            records = [self.records.run(name) for name in (baseline, other)]
            known = records[1].get("comparisons", [])
            found = [old for old in known if self._is_current(other, old)]
            if all(r.get("status") == "done" and not r.get("error") for r in records):
                new = self._new_comparisons(run.task, baseline, other, found)
                # Texts beside a results file of elsewhere may be of other scores.
                found += [one for one in new if self._is_current(other, one)]
            if found != known:
                found.sort(key=place)
                self.records.change_run(
                    other, lambda record, found=found: {**record, "comparisons": found}
                )

    def _new_comparisons(self, task, baseline, other, known):
        """Those that can be made: of texts that are there."""
        metric = self.get_task(task).headline_metric
        for role, beam_size in itertools.product(self.experiment.sets, self.experiment.beam_sizes):
            labels = {
                "role": role,
                "checkpoint_flag": self.experiment.checkpoints[0],
                "beam_size": beam_size,
                "metric": metric,
                "with": baseline,
            }
            scores = [self._score(name, labels) for name in (baseline, other)]
            paths = [self._text_path(name, labels) for name in (baseline, other)]
            compared = any(labels.items() <= old.items() for old in known)
            if not compared and None not in (*scores, *paths):
                references = paths[0].with_name(f"{self._set_name(role)}.references.txt")
                texts = [read_lines(path) for path in (*paths, references)]
                yield {**labels, **dataclasses.asdict(compare(metric, *texts))}

    def _text_path(self, name, labels):
        """The .txt of what a run's `_score` is the score of, or None where it is gone."""
        evaluation = self._evaluation(name, labels)
        # The record says which file that is: the checkpoints may be gone.
        role, _, beam_size = place(labels)
        scored = (evaluation.get("checkpoint"), beam_size, evaluation.get("beam_alpha"))
        path = self._evaluation_path(name, role, *scored).with_suffix(".txt")
        references = path.with_name(f"{self._set_name(role)}.references.txt")
        return path if path.exists() and references.exists() else None

    def _is_current(self, name, comparison):
        """Whether a comparison is of the scores that are recorded now."""
        return all(
            score is not None and math.isclose(comparison[side], score)
            for side, score in (
                ("baseline", self._score(comparison["with"], comparison)),
                ("system", self._score(name, comparison)),
            )
        )

    def _score(self, name, labels):
        """The score of a run that a comparison with these labels is about, or None."""
        return self._evaluation(name, labels).get("metrics", {}).get(labels["metric"])

    def _evaluation(self, name, labels):
        """The recorded evaluation with that score; empty where there is none."""
        recorded = self.records.run(name).get("evaluations", [])
        return next((one for one in recorded if place(one) == place(labels)), {})

    # Results

    def _record(self, run, without=(), **values):
        """Records values of a run, and drops those of the names in `without`."""
        settings = {**self.get_task(run.task).defaults, **run.settings}
        if not self.imported:
            settings["vocab_size"] = _vocabulary_size(self._vocabulary(run.task))
        about = {
            "task": run.task,
            "arm": run.arm.name,
            "seed": run.seed,
            "settings": settings,
            "train_steps": run.settings["train_steps"],
        }
        # What was scored before had the settings that it had then.
        keeps_settings = values.get("error") or "launched" in values

        def change(record):
            after = {**about, **record} if keeps_settings else {**record, **about}
            after |= values
            after.setdefault("command", self._command(run))
            after.setdefault("version", _version())
            return {name: value for name, value in after.items() if name not in without}

        self.records.change_run(run.name, change)


@functools.lru_cache
def _vocabulary_size(path):
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path)).vocab_size()
    except RuntimeError:
        raise UserError(f"{path} is not a SentencePiece model, or a truncated one.") from None


@functools.cache
def _version():
    """The release and, in a checkout, the commit."""
    try:
        version = importlib.metadata.version("tf-teaforn")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        with contextlib.suppress(OSError):
            commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            version += f" ({commit})" if commit else ""
    return version
