"""A small grid from end to end, and what is skipped, adopted and refused."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import sacrebleu

from tasks.text import text_task
from tf_teaforn import checkpoint, metrics
from tf_teaforn.cli.sweep import _terminable
from tf_teaforn.config import RunConfig
from tf_teaforn.errors import StoppedError, UserError
from tf_teaforn.experiments import sweep
from tf_teaforn.experiments.catalog import ALL, Arm, Experiment, get_experiment
from tf_teaforn.experiments.command_line import file_digests, portable
from tf_teaforn.experiments.plan import Options, plan, scaled
from tf_teaforn.experiments.processes import CommandError
from tf_teaforn.experiments.progress import Progress
from tf_teaforn.experiments.results import read, read_curves, thinned
from tf_teaforn.experiments.same_run import differences
from tf_teaforn.experiments.tables import Grid
from tf_teaforn.models import catalog
from tf_teaforn.task import get_task
from tf_teaforn.texts import read_lines

EXPERIMENT = Experiment(
    name="tiny",
    title="Tiny",
    description="",
    tasks=("text",),
    model="transformer_tiny",
    arms=(Arm(), Arm(2, 0.5)),
    seeds=2,
    steps={"text": 6},
    settings={
        "vocab_size": 310,
        "max_source_length": 24,
        "max_target_length": 24,
        "batch_tokens": 512,
        "eval_every": 6,
        "checkpoint_every": 2,
        "log_every": 2,
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "decode_length": 6,
    },
    beam_sizes=(1, 2),
    checkpoints=("average:2",),
    sets={"test": "--split=test"},
)


OTHER = {"vocabulary_sha256": {"text": "c0ffee"}}


class Launcher:
    """Runs commands in this process; what it is told to fails."""

    def __init__(self, call_command):
        self.call_command = call_command
        self.calls = []
        self.broken = ""

    def __call__(self, name, flags, log, environment, usage):
        (model_dir,) = [f for f in flags if f.startswith(("--model_dir=", "--output="))]
        self.calls.append((name, model_dir.rpartition("/")[2]))
        if self.broken and self.broken in model_dir:
            raise CommandError(f"{name} ended with 2: no memory")
        usage["peak_host_bytes"] = 5e8
        assert self.call_command(name, *flags) == 0


@pytest.fixture(scope="module")
def options(corpus):
    files = {f"{split}_files": f"{corpus}/{split}.tsv" for split in ("train", "valid", "test")}
    return Options(task_options=files, command=("bin/sweep", "--experiment=tiny"))


@pytest.fixture(scope="module")
def task(options):
    return lambda name: text_task(**options.task_options)


@pytest.fixture(scope="module")
def finished(call_command, eagerly, options, task, tmp_path_factory):
    """(folder, launcher) after a run of the grid in which two of four runs were made to fail."""
    folder = tmp_path_factory.mktemp("sweep")
    launcher = Launcher(call_command)
    with pytest.MonkeyPatch.context() as patch, eagerly():
        sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "num_heads": 1}
        *parts, _ = catalog._MODELS["transformer_tiny"]
        patch.setitem(catalog._MODELS, "transformer_tiny", (*parts, {**sizes, "dropout": 0.1}))
        launcher.broken = "discount0.5-seed1"
        grid = sweep.Sweep(EXPERIMENT, folder, options, task, launcher)
        assert grid.run() == ["text-transformer_tiny-n2-discount0.5-seed1"]
        results = read(folder / "results.json")
        failed = results["runs"]["text-transformer_tiny-n2-discount0.5-seed1"]
        assert (failed["status"], failed["error"]) == ("failed", "train ended with 2: no memory")
        done = [name for name, run in results["runs"].items() if run["status"] == "done"]
        assert len(done) == 3
        launcher.broken, launcher.calls = "", []
        assert sweep.Sweep(EXPERIMENT, folder, options, task, launcher).run() == []
        # What was done is skipped.
        name = "text-transformer_tiny-n2-discount0.5-seed1"
        assert launcher.calls == [("train", name), ("evaluate", name)]
    return folder


def test_results(finished, corpus):
    results = read(finished / "results.json")
    assert set(results["runs"]) == {
        f"text-transformer_tiny-{arm}-seed{seed}"
        for arm in ("n1", "n2-discount0.5")
        for seed in (1, 2)
    }
    references = (corpus / "test.tsv").read_text().splitlines()
    references = [line.split("\t")[1] for line in references]
    for name, run in results["runs"].items():
        assert run["status"] == "done" and run["error"] is None and run["version"]
        assert run["seconds"] > 0 and run["speed"]["steps_per_second"] > 0
        assert f"--seed={run['seed']}" in run["command"] and run["train_steps"] == 6
        stages = {"loss_0"} if run["arm"] == "n1" else {"loss_0", "loss_1"}
        assert stages <= set(run["curves"]["train"])
        assert [step for step, _ in run["curves"]["train"]["loss_0"]] == [2, 4, 6]
        assert [e["beam_size"] for e in run["evaluations"]] == [1, 2]
        for evaluation in run["evaluations"]:
            assert evaluation["steps"] == [4, 6] and evaluation["role"] == "test"
            stem = f"test-average-2-6-beam{evaluation['beam_size']}-alpha0.6"
            hypotheses = read_lines(finished / "runs" / name / "eval" / f"{stem}.txt")
            bleu = sacrebleu.corpus_bleu(hypotheses, [references]).score
            assert evaluation["metrics"]["bleu"] == pytest.approx(bleu)
            assert evaluation["command"].startswith("bin/evaluate --model_dir=")
    vocabularies = {
        (finished / "runs" / name / "vocab.model").read_bytes() for name in results["runs"]
    }
    assert len(vocabularies) == 1


def test_comparisons_are_with_the_same_seed_of_the_first_arm(finished):
    results = read(finished / "results.json")
    folder = finished / "runs"
    references = read_lines(
        folder / "text-transformer_tiny-n1-seed1" / "eval" / "test.references.txt"
    )
    for seed in (1, 2):
        names = [f"text-transformer_tiny-{arm}-seed{seed}" for arm in ("n1", "n2-discount0.5")]
        assert not results["runs"][names[0]].get("comparisons")
        for found in results["runs"][names[1]]["comparisons"]:
            file = f"eval/test-average-2-6-beam{found['beam_size']}-alpha0.6.txt"
            texts = [read_lines(folder / name / file) for name in names]
            expected = metrics.compare("bleu", *texts, references)
            assert found["with"] == names[0] and found["metric"] == "bleu"
            assert {k: found[k] for k in dataclasses.asdict(expected)} == dataclasses.asdict(
                expected
            )


def test_runs_trained_elsewhere_are_adopted(finished, options, task, tmp_path):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    config = tmp_path / "runs" / "text-transformer_tiny-n1-seed1" / "config.json"
    found = RunConfig.from_json(config.read_text())
    elsewhere = {name: f"/elsewhere/{split}.tsv" for name, split in (("train_files", "train"),)}
    found = dataclasses.replace(found, task_options={**found.task_options, **elsewhere})
    config.write_text(found.replace({"eval_every": 99, "discount": 0.9}).to_json())

    def launch(name, *_):
        pytest.fail(f"{name} was run")

    shutil.rmtree(config.parent / "tensorboard")
    assert sweep.Sweep(EXPERIMENT, tmp_path, options, task, launch).run() == []
    results = read(tmp_path / "results.json")
    before = read(finished / "results.json")
    for name, run in results["runs"].items():
        assert run["evaluations"] == before["runs"][name]["evaluations"]
        assert run["comparisons"] == before["runs"][name]["comparisons"] if "n2" in name else True
        seconds = run["seconds"]
        assert seconds is None if name == config.parent.name else seconds >= 0
        assert run["version"] == "trained elsewhere"
        assert run["command"].startswith("bin/train --task=text --train_files=")

    # Other settings are another run.
    config.write_text(found.replace({"learning_rate": 0.5}).to_json())
    grid = sweep.Sweep(EXPERIMENT, tmp_path, options, task, launch)
    assert grid.run() == ["text-transformer_tiny-n1-seed1"]
    error = read(tmp_path / "results.json")["runs"]["text-transformer_tiny-n1-seed1"]["error"]
    assert "--learning_rate: 0.5 there, 0.01 here" in error and "train_files" not in error


@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: "[]"])
def test_what_is_out_of_date_is_made_again(finished, options, task, tmp_path, damage):
    folder = shutil.copytree(finished, tmp_path / "copy")
    name = "text-transformer_tiny-n2-discount0.5-seed1"
    before = read(folder / "results.json")
    # A score of an earlier checkpoint, a damaged one, and a test of other scores.
    paths = [
        folder / "runs" / name / "eval" / f"test-average-2-6-beam{k}-alpha0.6.json" for k in (1, 2)
    ]
    whole = [path.read_text() for path in paths]
    paths[0].write_text(json.dumps({**json.loads(whole[0]), "steps": [2, 4]}))
    paths[1].write_text(damage(whole[1]))
    changed = read(folder / "results.json")
    changed["runs"][name]["comparisons"][0]["system"] = 99.0
    (folder / "results.json").write_text(json.dumps(changed))
    launched = []

    def launch(command, flags, *_):
        launched.append((command, flags))
        for path, text in zip(paths, whole, strict=True):
            path.write_text(text)

    part = dataclasses.replace(options, seeds=(1,), command=("bin/sweep", "--seeds=1"))
    assert sweep.Sweep(EXPERIMENT, folder, part, task, launch).run() == []
    ((command, flags),) = launched
    assert command == "evaluate" and {"--beam_size=1,2", "--beam_alpha=0.6"} <= {*flags}
    after = read(folder / "results.json")
    assert after["runs"] == before["runs"]
    # Seeds that were there stay in the report, and commands.
    assert after["experiments"]["tiny"]["seeds"] == [1, 2]
    assert after["experiments"]["tiny"]["commands"] == [
        "bin/sweep --experiment=tiny",
        "bin/sweep --seeds=1",
    ]


@pytest.mark.parametrize("there", ["folders", "records"])
def test_a_run_that_is_refused_keeps_what_it_was(finished, options, task, tmp_path, there):
    folder = shutil.copytree(finished, tmp_path / "copy")
    before = read(folder / "results.json")["runs"]
    if there == "records":
        shutil.rmtree(folder / "runs")
    longer = dataclasses.replace(options, settings={"train_steps": 12})
    for _ in range(2):
        grid = sweep.Sweep(EXPERIMENT, folder, longer, task, lambda *_: pytest.fail("launched"))
        assert len(grid.run()) == 4
    for name, run in read(folder / "results.json")["runs"].items():
        assert "--train_steps: 6 there, 12 here" in run["error"]
        assert "--eval_every" not in run["error"]
        assert {**run, "error": None} == before[name]
    grid = sweep.Sweep(EXPERIMENT, folder, options, task, lambda *_: pytest.fail("launched"))
    assert grid.run() == []
    assert read(folder / "results.json")["runs"] == before


def alone(finished, folder, change=lambda results: None):
    """Puts results.json and the vocabulary in a folder, the former changed; returns its runs."""
    if folder != finished:
        shutil.copy(finished / "vocab-text.model", folder)
    results = read(finished / "results.json")
    change(results)
    (folder / "results.json").write_text(json.dumps(results))
    return results["runs"]


class Absent:
    """Notes what is launched, and fails it."""

    def __init__(self):
        self.calls = []

    def __call__(self, name, flags, *_):
        (model_dir,) = [f for f in flags if f.startswith("--model_dir=")]
        self.calls.append((name, model_dir.rpartition("/")[2]))
        raise CommandError("no device")


def test_a_sweep_goes_on_from_its_results_alone(finished, options, task, tmp_path):
    before = alone(finished, tmp_path)
    # Paths of another machine.
    moved = {name: f"/elsewhere{value}" for name, value in options.task_options.items()}
    seeds = dataclasses.replace(options, seeds=(1, 2, 3), task_options=moved)
    launch = Absent()
    grown = dataclasses.replace(EXPERIMENT, arms=(*EXPERIMENT.arms, Arm(3, 0.5)))
    failed = sweep.Sweep(grown, tmp_path, seeds, task, launch).run()
    prefix = "text-transformer_tiny"
    new = ["n3-discount0.5-seed1", "n3-discount0.5-seed2"]
    new += ["n1-seed3", "n2-discount0.5-seed3", "n3-discount0.5-seed3"]
    assert launch.calls == [("train", f"{prefix}-{name}") for name in new]
    assert failed == [name for _, name in launch.calls]
    after = read(tmp_path / "results.json")
    for name, record in before.items():
        assert json.dumps(after["runs"][name]) == json.dumps(record)
    assert after["experiments"]["tiny"]["seeds"] == [1, 2, 3]


def test_a_new_arm_is_not_tested_against_a_baseline_whose_texts_are_gone(
    finished, options, task, tmp_path
):
    name = "text-transformer_tiny-n2-discount0.5-seed1"
    before = alone(finished, tmp_path, lambda results: results["runs"].pop(name))
    shutil.copytree(finished / "runs" / name, tmp_path / "runs" / name)
    grid = sweep.Sweep(EXPERIMENT, tmp_path, options, task, Absent())
    assert grid.run() == []
    after = read(tmp_path / "results.json")["runs"]
    run = after.pop(name)
    assert run["status"] == "done" and len(run["evaluations"]) == 2
    assert not run.get("comparisons") and after == before


def test_a_new_arm_is_tested_against_texts_whose_checkpoints_are_gone(
    finished, options, task, tmp_path
):
    folder = shutil.copytree(finished, tmp_path / "copy")
    baseline, name = (f"text-transformer_tiny-{a}-seed1" for a in ("n1", "n2-discount0.5"))
    shutil.rmtree(folder / "runs" / baseline / "checkpoints")
    # Other texts than those that were scored.
    texts = folder / "runs" / baseline / "eval"
    shutil.copy(texts / "test.references.txt", texts / "test-average-2-6-beam2-alpha0.6.txt")
    alone(finished, folder, lambda results: results["runs"].pop(name))
    assert sweep.Sweep(EXPERIMENT, folder, options, task, Absent()).run() == []
    whole, after = (read(path / "results.json")["runs"][name] for path in (finished, folder))
    assert len(whole["comparisons"]) == 2
    assert after["comparisons"] == whole["comparisons"][:1]


def test_arms_are_compared_without_those_that_are_not_asked_for(finished, options, task, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    name = "text-transformer_tiny-n2-discount0.5-seed1"
    alone(finished, folder, lambda results: results["runs"][name].pop("comparisons"))
    settings = {k: v for k, v in EXPERIMENT.settings.items() if k != "vocab_size"}
    # Whose k nobody knows.
    arms = (*EXPERIMENT.arms, Arm(2, 0.5, top_k=ALL))
    wide = dataclasses.replace(EXPERIMENT, arms=arms, settings=settings)
    some = dataclasses.replace(
        options, arms=("n1", "n2-discount0.5"), settings={"init_from": "bart-base"}
    )
    grid = sweep.Sweep(wide, folder, some, task, Absent())
    grid._compare(grid.runs[0])
    whole, after = (read(path / "results.json")["runs"][name] for path in (finished, folder))
    assert after["comparisons"] == whole["comparisons"] != []


@pytest.mark.parametrize("order", [("n1", "n2-discount0.5"), ("n2-discount0.5", "n1")])
def test_arms_one_after_the_other_are_tested_against_each_other(
    finished, options, task, tmp_path, order
):
    before = alone(finished, tmp_path, lambda results: results["runs"].clear())
    assert before == {}
    for arm in order:
        for seed in (1, 2):
            name = f"text-transformer_tiny-{arm}-seed{seed}"
            shutil.copytree(finished / "runs" / name, tmp_path / "runs" / name)
        some = dataclasses.replace(options, arms=(arm,))
        assert sweep.Sweep(EXPERIMENT, tmp_path, some, task, Absent()).run() == []
    whole, after = (read(folder / "results.json")["runs"] for folder in (finished, tmp_path))
    for seed in (1, 2):
        name = f"text-transformer_tiny-n2-discount0.5-seed{seed}"
        assert after[name]["comparisons"] == whole[name]["comparisons"] != []


def test_comparisons_hold_for_the_scores_that_are_recorded(finished, options, task, tmp_path):
    baseline, other = (f"text-transformer_tiny-{a}-seed1" for a in ("n1", "n2-discount0.5"))

    def change(results):
        results["runs"][baseline]["evaluations"][1]["metrics"]["bleu"] += 1

    before = alone(finished, tmp_path, change)
    grid = sweep.Sweep(EXPERIMENT, tmp_path, options, task, Absent())
    grid._compare(grid.runs[0])
    assert grid.runs[0].name == baseline
    after = read(tmp_path / "results.json")["runs"]
    assert after[other]["comparisons"] == before[other]["comparisons"][:1]
    # Another experiment in the folder may have scored less.
    shutil.copytree(finished / "runs", tmp_path / "runs")
    results = read(tmp_path / "results.json")
    del results["runs"][baseline]["evaluations"][1]
    results["runs"][other]["comparisons"] = []
    (tmp_path / "results.json").write_text(json.dumps(results))
    grid.records.reload()
    grid._compare(grid.runs[1])
    after = read(tmp_path / "results.json")["runs"]
    assert after[other]["comparisons"] == before[other]["comparisons"][:1]


@pytest.mark.parametrize("missing", ["beam", "metric", "alpha"])
def test_a_record_that_lacks_a_score_is_not_trained_again(
    finished, options, task, tmp_path, missing
):
    name = "text-transformer_tiny-n2-discount0.5-seed2"

    def change(results):
        evaluations = results["runs"][name]["evaluations"]
        if missing == "beam":
            del evaluations[0]
        if missing == "metric":
            del evaluations[0]["metrics"]["chrf"]
        if missing == "alpha":
            evaluations[0]["beam_alpha"] = 1.0

    before = alone(finished, tmp_path, change)
    launch = Absent()
    wanted = dataclasses.replace(EXPERIMENT, metrics=("bleu", "chrf"))
    assert sweep.Sweep(wanted, tmp_path, options, task, launch).run() == [name]
    assert launch.calls == []
    after = read(tmp_path / "results.json")["runs"][name]
    assert "--beam_size=1 and --beam_alpha=0.6, and its checkpoints are gone" in after["error"]
    assert after == {**before[name], "error": after["error"]}


def test_a_run_that_failed_is_trained_again(finished, options, task, tmp_path):
    name = "text-transformer_tiny-n2-discount0.5-seed2"
    failed = {"status": "failed"}
    before = alone(finished, tmp_path, lambda results: results["runs"][name].update(failed))
    launch = Absent()
    assert sweep.Sweep(EXPERIMENT, tmp_path, options, task, launch).run() == [name]
    assert launch.calls == [("train", name)]
    # What it had stays until the new one is trained.
    after = read(tmp_path / "results.json")["runs"][name]
    assert after.pop("launched")["seconds"] >= 0
    assert after == {**before[name], "error": "no device"}


def test_a_try_without_results_leaves_no_seeds_and_no_steps(finished, options, task, tmp_path):
    shutil.copy(finished / "vocab-text.model", tmp_path)
    tried = dataclasses.replace(options, seeds=(1, 2, 3), settings={"train_steps": 99})
    assert len(sweep.Sweep(EXPERIMENT, tmp_path, tried, task, Absent()).run()) == 6
    about = read(tmp_path / "results.json")["experiments"]["tiny"]
    assert about["seeds"] == [1, 2, 3] and about["train_steps"]["text/n1"] == 99
    shutil.copytree(finished / "runs", tmp_path / "runs", dirs_exist_ok=True)
    grid = sweep.Sweep(EXPERIMENT, tmp_path, options, task, lambda *_: pytest.fail("launched"))
    assert grid.run() == []
    results = read(tmp_path / "results.json")
    about = results["experiments"]["tiny"]
    assert about["seeds"] == [1, 2] and set(about["train_steps"].values()) == {6}
    assert len(Grid(EXPERIMENT, results).runs) == 4


def test_experiments_that_share_a_folder_keep_their_seeds_and_steps(
    finished, options, task, tmp_path
):
    alone(finished, tmp_path)
    other = dataclasses.replace(EXPERIMENT, name="other")
    wrong = dataclasses.replace(options, settings={"train_steps": 99})
    assert len(sweep.Sweep(other, tmp_path, wrong, task, Absent()).run()) == 4
    for seeds, there in (((1,), [1]), ((1,), [1]), ((2,), [1, 2])):
        part = dataclasses.replace(options, seeds=seeds)
        grid = sweep.Sweep(other, tmp_path, part, task, lambda *_: pytest.fail("launched"))
        assert grid.run() == []
        results = read(tmp_path / "results.json")
        about = results["experiments"]["other"]
        assert about["seeds"] == there and set(about["train_steps"].values()) == {6}
        assert len(Grid(other, results).runs) == 2 * len(there)


def test_tasks_have_steps_of_their_own(finished, options, task, tmp_path):
    vocabulary = str(finished / "vocab-text.model")
    given = dataclasses.replace(options, task_options={}, vocabulary=vocabulary)
    both = dataclasses.replace(EXPERIMENT, tasks=("one", "two"), steps={"one": 6, "two": 12})
    assert len(sweep.Sweep(both, tmp_path, given, task, Absent()).run()) == 8
    expected = {"one/n1": 6, "one/n2-discount0.5": 6, "two/n1": 12, "two/n2-discount0.5": 12}
    results = read(tmp_path / "results.json")
    assert results["experiments"]["tiny"]["train_steps"] == expected
    assert len(Grid(both, results).runs) == 8
    for run in results["runs"].values():
        run["status"] = "done"
    (tmp_path / "results.json").write_text(json.dumps(results))
    # A part of the grid leaves the other as it is.
    for name in ("one", "two"):
        part = dataclasses.replace(given, tasks=[name])
        sweep.Sweep(both, tmp_path, part, task, Absent()).run()
        results = read(tmp_path / "results.json")
        assert results["experiments"]["tiny"]["train_steps"] == expected
        assert len(Grid(both, results).runs) == 8


def test_metrics_of_another_experiment_are_kept(finished, options, task, tmp_path):
    """Both read the same files: each would find the other's scores incomplete."""
    folder = shutil.copytree(finished, tmp_path / "copy")

    def asked(experiment):
        grid = sweep.Sweep(experiment, folder, options, task, Absent())
        flags = grid._evaluate_flags(grid.runs[0], "test", "average:2", (1,))
        return [part.partition("=")[2] for part in flags if part.startswith("--metrics=")]

    results = read(folder / "results.json")
    assert asked(EXPERIMENT) == []
    other = dataclasses.replace(EXPERIMENT, metrics=("bleu", "rouge"))
    assert asked(other) == ["bleu,rouge,chrf,ter"]
    for run in results["runs"].values():
        for evaluation in run["evaluations"]:
            for name in ("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu_lc"):
                evaluation["metrics"][name] = 1.0
    (folder / "results.json").write_text(json.dumps(results))
    assert asked(EXPERIMENT) == ["bleu,chrf,ter,rouge,bleu_lc"]


def test_settings_are_recorded_with_those_of_the_task(finished, task):
    """Other versions may have other ones."""
    for run in read(finished / "results.json")["runs"].values():
        assert task("text").defaults.keys() <= run["settings"].keys()
        assert run["settings"]["batch_tokens"] == 512


def test_what_changes_the_speed_is_another_measurement(finished, options, task, tmp_path):
    measuring = dataclasses.replace(EXPERIMENT, beam_sizes=(), checkpoints=(), sets={})
    before = alone(finished, tmp_path)
    grid = sweep.Sweep(measuring, tmp_path, options, task, lambda *_: pytest.fail("launched"))
    assert grid.run() == []
    other = dataclasses.replace(options, settings={"remat": "stage"})
    failed = sweep.Sweep(measuring, tmp_path, other, task, Absent()).run()
    after = read(tmp_path / "results.json")["runs"]
    assert failed == list(before)
    for name, run in after.items():
        assert "--remat: none there, stage here" in run["error"]
        assert run == {**before[name], "error": run["error"]}


def test_training_again_replaces_a_record(finished, options, task, tmp_path):
    name = "text-transformer_tiny-n2-discount0.5-seed2"

    def change(results):
        evaluations = results["runs"][name]["evaluations"]
        evaluations.append({**evaluations[0], "checkpoint_flag": "best"})
        del evaluations[0]
        results["runs"][name]["status"] = "failed"

    alone(finished, tmp_path, change)

    def launch(command, flags, *_):
        assert command == "train"
        shutil.copytree(finished / "runs" / name, tmp_path / "runs" / name)

    assert sweep.Sweep(EXPERIMENT, tmp_path, options, task, launch).run() == []
    run = read(tmp_path / "results.json")["runs"][name]
    assert run["evaluations"] == read(finished / "results.json")["runs"][name]["evaluations"]
    # The baseline's texts are gone.
    assert not run.get("comparisons")


def test_another_vocabulary_is_refused(finished, options, task, tmp_path):
    digest = hashlib.sha256((finished / "vocab-text.model").read_bytes()).hexdigest()
    assert read(finished / "results.json")["experiments"]["tiny"]["vocabulary_sha256"] == {
        "text": digest
    }
    alone(finished, tmp_path, lambda results: results["experiments"]["tiny"].update(OTHER))
    with pytest.raises(
        UserError, match=f"SHA-256 {digest}.* is not the vocabulary of text .*c0ffee"
    ):
        sweep.Sweep(EXPERIMENT, tmp_path, options, task, Absent()).run()
    alone(finished, tmp_path, lambda r: r["experiments"]["tiny"].pop("vocabulary_sha256"))
    assert sweep.Sweep(EXPERIMENT, tmp_path, options, task, Absent()).run() == []
    about = read(tmp_path / "results.json")["experiments"]["tiny"]
    assert about["vocabulary_sha256"] == {"text": digest}


def test_other_files_are_another_run(finished, options, task, tmp_path):
    alone(finished, tmp_path)
    files = {**options.task_options, "train_files": "/elsewhere/other.tsv"}
    other = dataclasses.replace(options, task_options=files)
    before = (tmp_path / "results.json").read_text()
    with pytest.raises(UserError, match=r"has tiny with files {.*'train.tsv'.*}, not {.*other.tsv"):
        sweep.Sweep(EXPERIMENT, tmp_path, other, task, Absent()).run()
    assert (tmp_path / "results.json").read_text() == before
    # Of an experiment that shares the runs.
    alone(finished, tmp_path, lambda results: results["experiments"].clear())
    failed = sweep.Sweep(EXPERIMENT, tmp_path, other, task, Absent()).run()
    assert len(failed) == 4
    error = read(tmp_path / "results.json")["runs"][failed[0]]["error"]
    assert "--train_files: train.tsv there, other.tsv here" in error


def test_other_files_of_the_same_names_are_refused(finished, options, task, tmp_path):
    alone(finished, tmp_path)
    (tmp_path / "copies").mkdir()
    files = {}
    for name, path in options.task_options.items():
        files[name] = str(shutil.copy(path, tmp_path / "copies"))
    copies = dataclasses.replace(options, task_options=files)
    assert sweep.Sweep(EXPERIMENT, tmp_path, copies, task, Absent()).run() == []
    before = (tmp_path / "results.json").read_text()
    with open(files["test_files"], "a") as file:
        file.write("one\tun\n")
    match = "--test_files=.*/copies/test.tsv: tiny in .* is of other files with these names"
    with pytest.raises(UserError, match=match):
        sweep.Sweep(EXPERIMENT, tmp_path, copies, task, Absent()).run()
    assert (tmp_path / "results.json").read_text() == before


def test_files_that_nothing_was_made_of_may_be_mended(finished, options, task, tmp_path):
    files = {name: str(shutil.copy(path, tmp_path)) for name, path in options.task_options.items()}
    mine = dataclasses.replace(options, task_options=files)
    refused = "is of other files with these names"

    def run(changed, options=mine):
        with open(files[changed], "a") as file:
            file.write("one\tun\n")
        assert len(sweep.Sweep(EXPERIMENT, tmp_path, options, task, Absent()).run()) == 4
        digests = read(tmp_path / "results.json")["experiments"]["tiny"]["files_sha256"]
        content = (tmp_path / files[changed]).read_bytes()
        assert digests[changed] == hashlib.sha256(content).hexdigest()

    vocabulary = shutil.copy(finished / "vocab-text.model", tmp_path)
    for name in ("valid_files", "test_files", "valid_files"):
        run(name)
    run("train_files", dataclasses.replace(mine, vocabulary=vocabulary))
    # The sweep's own vocabulary is of them.
    with pytest.raises(UserError, match=f"--train_files=.* {refused}"):
        run("train_files")
    run("train_files", dataclasses.replace(mine, vocabulary=vocabulary))
    # Trained, and not scored.
    name = "text-transformer_tiny-n1-seed1"
    shutil.copytree(
        finished / "runs" / name / "checkpoints", tmp_path / "runs" / name / "checkpoints"
    )
    run("test_files")
    for name in ("valid_files", "train_files"):
        with pytest.raises(UserError, match=f"--{name}=.* {refused}"):
            run(name, dataclasses.replace(mine, vocabulary=vocabulary))
        with open(files[name], "rb+") as file:
            file.truncate(os.path.getsize(files[name]) - len("one\tun\n"))


def test_a_sweep_without_a_test_file_does_not_begin(options, tmp_path):
    files = {name: path for name, path in options.task_options.items() if name != "test_files"}
    without = dataclasses.replace(options, task_options=files)
    grid = sweep.Sweep(EXPERIMENT, tmp_path, without, lambda _: text_task(**files), Absent())
    with pytest.raises(UserError, match="no files for split 'test'. Give --test_files"):
        grid.run()


def test_a_sweep_whose_test_sets_cannot_be_read_does_not_begin(
    finished, options, task, tmp_path, monkeypatch
):
    alone(finished, tmp_path)
    asked = []

    def read_test_set(*given):
        asked.append(given)
        raise UserError("--test_set=wmt14/full is not in sacrebleu's cache")

    monkeypatch.setattr(sweep, "read_test_set", read_test_set)
    monkeypatch.setattr(sweep, "language_pair_of", lambda source: "en-fr")
    named = dataclasses.replace(EXPERIMENT, sets={"test": "--test_set=wmt14/full"})
    launch = Absent()
    third = dataclasses.replace(options, seeds=(3,))
    grid = sweep.Sweep(named, tmp_path, third, task, launch)
    assert grid.commands() and asked == []
    with pytest.raises(UserError, match="^--test_set=wmt14/full is not in"):
        grid.run()
    assert asked == [("wmt14/full", "en-fr")] and launch.calls == []
    # Of runs that were scored no set is needed.
    assert sweep.Sweep(named, tmp_path, options, task, launch).run() == []
    assert len(asked) == 1


def test_a_run_that_was_trained_without_a_test_file(options):
    expected = RunConfig(task="text", task_options=options.task_options)
    files = {name: path for name, path in options.task_options.items() if name != "test_files"}
    found = dataclasses.replace(expected, task_options=files)
    assert differences(found, expected, ("best",)) == []
    assert differences(expected, found, ("best",)) == []
    other = dataclasses.replace(expected, task_options={**files, "test_files": "other.tsv"})
    (line,) = differences(other, expected, ("best",))
    assert line.startswith("--test_files: other.tsv there, test.tsv here")


def test_a_size_that_the_vocabulary_does_not_have(finished, options, task, tmp_path):
    alone(finished, tmp_path)
    other = dataclasses.replace(options, settings={"vocab_size": 400})
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(UserError, match="^--vocab_size=400, but .*vocab-text.model has 310"):
        sweep.Sweep(EXPERIMENT, tmp_path, other, task, Absent()).run()
    assert (tmp_path / "results.json").read_bytes() == before
    same = dataclasses.replace(options, settings={"vocab_size": 310})
    assert sweep.Sweep(EXPERIMENT, tmp_path, same, task, Absent()).run() == []


def test_a_damaged_gzip_file_is_named(tmp_path):
    whole = gzip.compress(b"one\ttwo\n" * 99)
    for content in (whole[:-9], b"one\n", whole[:30] + b"x" + whole[31:]):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(UserError, match=f"^{tmp_path}/a.gz: not a whole gzip file"):
            file_digests({"train_files": f"{tmp_path}/a.gz"})


def test_digests_are_of_the_content(tmp_path):
    (tmp_path / "a").write_text("one\n")
    (tmp_path / "b").write_text("two\n")
    for name in "ab":
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    flags = {"train_files": f"{tmp_path}/a,{tmp_path}/b", "test_files": "absent", "metric": "bleu"}
    expected = {"train_files": hashlib.sha256(b"one\ntwo\n").hexdigest()}
    assert file_digests(flags) == expected
    assert file_digests({"train_files": f"{tmp_path}/a.gz,{tmp_path}/b.gz"}) == expected
    # What is not on this machine is not read.
    assert file_digests({"train_files": f"{tmp_path}/a.gz,gs://bucket/b.gz"}) == {}


def test_another_model_or_scale_has_a_folder_of_its_own(finished, options, task, tmp_path):
    alone(finished, tmp_path)
    before = (tmp_path / "results.json").read_text()
    for changes, match in (
        ({"settings": {"model": "transformer_small"}}, "has tiny with model transformer_tiny, not"),
        ({"scale": "small"}, "has tiny with scale paper, not small"),
    ):
        other = dataclasses.replace(options, **changes)
        with pytest.raises(UserError, match=match):
            sweep.Sweep(EXPERIMENT, tmp_path, other, task, Absent()).run()
        assert (tmp_path / "results.json").read_text() == before


def test_runs_of_another_experiment_with_other_steps_are_not_its_own(finished):
    results = read(finished / "results.json")
    steps = results["experiments"]["tiny"]["train_steps"]
    assert steps == {"text/n1": 6, "text/n2-discount0.5": 6}
    steps["text/n1"] = 12
    names = {f"text-transformer_tiny-n2-discount0.5-seed{seed}" for seed in (1, 2)}
    assert {*Grid(EXPERIMENT, results).runs} == names


def test_a_run_without_its_best_checkpoint_is_not_at_its_end(finished, options, task, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    name = "text-transformer_tiny-n1-seed2"
    model_dir = folder / "runs" / name
    assert checkpoint.is_best(model_dir, checkpoint.latest_state(model_dir)["best_step"])
    shutil.rmtree(model_dir / "best")
    launch = Absent()
    assert sweep.Sweep(EXPERIMENT, folder, options, task, launch).run() == [name]
    assert launch.calls == [("train", name)]


def test_what_is_recorded_during_a_comparison_stays(finished, options, task, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "copy")
    name = "text-transformer_tiny-n2-discount0.5-seed1"
    alone(folder, folder, lambda results: results["runs"][name].pop("comparisons"))
    grid = sweep.Sweep(EXPERIMENT, folder, options, task, Absent())

    def compare(*arguments):
        grid.records.change_run(name, lambda record: {**record, "error": "meanwhile"})
        return metrics.compare(*arguments)

    monkeypatch.setattr(sweep, "compare", compare)
    assert grid.runs[0].name == "text-transformer_tiny-n1-seed1"
    grid._compare(grid.runs[0])
    after = read(folder / "results.json")["runs"][name]
    assert after["error"] == "meanwhile" and len(after["comparisons"]) == 2


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"learning_rate": 0.5}, "--learning_rate: 0.01 there, 0.5 here"),
        ({"beam_alpha": 1.0}, "--beam_alpha: 0.6 there, 1.0 here"),
        ({"decode_length": 9}, "--decode_length: 6 there, 9 here"),
        # The last two checkpoints would be those of 5 and 6 steps.
        ({"eval_every": 5}, "--eval_every: 6 there, 5 here"),
        ({"eval_every": 4, "remat": "stage", "micro_batch_tokens": 256}, None),
    ],
)
def test_seeds_of_other_settings_have_no_common_mean(
    finished, options, task, tmp_path, setting, line
):
    before = alone(finished, tmp_path)
    other = dataclasses.replace(options, seeds=(3,), settings=setting)
    launch = Absent()
    failed = sweep.Sweep(EXPERIMENT, tmp_path, other, task, launch).run()
    assert len(failed) == 2 and len(launch.calls) == (0 if line else 2)
    after = read(tmp_path / "results.json")["runs"]
    assert before.items() <= after.items()
    error = after["text-transformer_tiny-n1-seed3"]["error"]
    assert error == "no device" if line is None else f"other settings: {line}. " in error


def test_runs_for_another_metric_are_other_runs(finished, options, tmp_path):
    """It decides about long examples and about the best checkpoint."""
    alone(finished, tmp_path)
    files = {**options.task_options, "metric": "rouge"}
    other = dataclasses.replace(options, task_options=files)
    launch = Absent()
    failed = sweep.Sweep(EXPERIMENT, tmp_path, other, lambda _: text_task(**files), launch).run()
    assert len(failed) == 4 and launch.calls == []
    error = read(tmp_path / "results.json")["runs"][failed[0]]["error"]
    assert "--metric: bleu there, rouge here" in error


def test_the_folder_decides_the_model_not_its_dropout():
    config = RunConfig(task="text").replace({"init_from": "/here/bart"})
    elsewhere = config.replace({"init_from": "/there/bart", "model": "bart", "vocab_size": 9})
    assert differences(config, elsewhere, ["best"]) == []
    other = config.replace({"dropout": 0.3})
    assert differences(config, other, ["best"]) == ["--dropout: None there, 0.3 here"]


def test_what_was_scored_counts_for_a_common_mean(finished, options, task, tmp_path):
    def change(results):
        for run in results["runs"].values():
            run["settings"]["beam_alpha"] = 1.0
            # No files in it.
            run["command"] = "bin/train --flagfile=common.flags"

    alone(finished, tmp_path, change)
    third = dataclasses.replace(options, seeds=(3,))
    launch = Absent()
    assert len(sweep.Sweep(EXPERIMENT, tmp_path, third, task, launch).run()) == 2
    assert len(launch.calls) == 2


def test_failed_runs_do_not_keep_each_other_from_other_settings(finished, options, task, tmp_path):
    def change(results):
        for run in results["runs"].values():
            run["status"] = "failed"

    alone(finished, tmp_path, change)
    other = dataclasses.replace(options, settings={"learning_rate": 0.5})
    launch = Absent()
    assert len(sweep.Sweep(EXPERIMENT, tmp_path, other, task, launch).run()) == 4
    assert len(launch.calls) == 4


def test_the_results_can_be_read_while_runs_are_under_way(finished, options, task, tmp_path):
    shutil.copy(finished / "vocab-text.model", tmp_path)
    path = tmp_path / "results.json"
    both = threading.Barrier(2, timeout=60)

    def launch(*_):
        if both.wait() == 0:
            raise CommandError("no device")
        give_up = time.monotonic() + 60
        while "no device" not in path.read_text():
            assert time.monotonic() < give_up, path.read_text()
            time.sleep(0.01)
        seen.extend(read(path)["runs"].values())
        raise CommandError("no device")

    seen = []
    part = dataclasses.replace(options, seeds=(1,), parallel=2)
    assert len(sweep.Sweep(EXPERIMENT, tmp_path, part, task, launch).run()) == 2
    assert seen and all(run["seed"] == 1 for run in seen)


def test_one_sweep_at_a_time_in_a_folder(finished, options, task, tmp_path):
    alone(finished, tmp_path)
    refused = []

    def launch(*_):
        with pytest.raises(UserError, match="--output_dir=.* in use by another bin/sweep") as error:
            sweep.Sweep(EXPERIMENT, tmp_path, options, task, Absent()).run()
        refused.append(error)
        raise CommandError("no device")

    third = dataclasses.replace(options, seeds=(3,))
    grid = sweep.Sweep(EXPERIMENT, tmp_path, third, task, launch)
    # Written by another since.
    alone(finished, tmp_path, lambda results: results["runs"].popitem())
    assert len(grid.run()) == len(refused) == 2
    assert len(read(tmp_path / "results.json")["runs"]) == 3 + 2


@pytest.mark.parametrize("changed", ["files", "metrics"])
def test_evaluations_of_other_data_and_metrics_are_made_again(
    finished, options, task, tmp_path, changed
):
    folder = shutil.copytree(finished, tmp_path / "copy")
    before = read(folder / "results.json")
    name = "text-transformer_tiny-n2-discount0.5-seed1"
    path = folder / "runs" / name / "eval" / "test-average-2-6-beam2-alpha0.6.json"
    whole = json.loads(path.read_text())
    other = {**whole, "command": f"{whole['command']} --test_files=other.tsv"}
    if changed == "metrics":
        other = {**whole, "metrics": {"chrf": whole["metrics"]["chrf"]}}
    path.write_text(json.dumps(other))
    launched = []

    def launch(command, flags, *_):
        launched.append(command)
        assert "--beam_size=2" in flags
        path.write_text(json.dumps(whole))

    # A record that is not there is read from the folder.
    changed = read(folder / "results.json")
    del changed["runs"][name]["evaluations"][1]
    (folder / "results.json").write_text(json.dumps(changed))
    assert sweep.Sweep(EXPERIMENT, folder, options, task, launch).run() == []
    assert launched == ["evaluate"]
    assert read(folder / "results.json")["runs"] == before["runs"]


def test_a_run_whose_last_validation_was_interrupted_is_finished(finished, options, task, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    name = "text-transformer_tiny-n1-seed2"
    model_dir = folder / "runs" / name
    weights, optimizer, state = checkpoint.load_training(model_dir)
    assert state["validated_step"] == state["step"] == 6
    state["validated_step"] = 0
    checkpoint.save(model_dir, 6, weights, optimizer, state, keep=10)
    launch = Absent()
    assert sweep.Sweep(EXPERIMENT, folder, options, task, launch).run() == [name]
    assert launch.calls == [("train", name)]
    run = read(folder / "results.json")["runs"][name]
    assert run["launched"]["seconds"] >= run["seconds"] > 0
    assert run["launched"]["peak_host_bytes"] == run["speed"]["peak_host_bytes"]


def test_runs_whose_checkpoints_are_gone(finished, options, task, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    before = read(folder / "results.json")["runs"]
    for run in (folder / "runs").iterdir():
        shutil.rmtree(run / "checkpoints")
    grid = sweep.Sweep(EXPERIMENT, folder, options, task, lambda *_: pytest.fail("launched"))
    assert grid.run() == []
    assert read(folder / "results.json")["runs"] == before
    # What a training from the start would leave is not scored by what there was.
    name = "text-transformer_tiny-n1-seed1"
    alone(folder, folder, lambda results: results["runs"].pop(name))
    launch = Absent()
    assert sweep.Sweep(EXPERIMENT, folder, options, task, launch).run() == [name]
    assert launch.calls == [("train", name)]
    model_dir = folder / "runs" / name
    assert (model_dir / "eval").exists() and not (model_dir / "eval.old").exists()

    def launch(command, *_):
        launched.append(command)
        if command == "train":
            assert not (model_dir / "eval").exists()
            shutil.copytree(finished / "runs" / name / "checkpoints", model_dir / "checkpoints")
        raise CommandError("no device") if command == "evaluate" else KeyboardInterrupt

    launched = []
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            sweep.Sweep(EXPERIMENT, folder, options, task, launch).run()
    assert launched == ["train", "evaluate"] and (model_dir / "eval.old").exists()


def test_every_kind_of_checkpoint_is_scored(finished, options, task, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    before = read(folder / "results.json")["runs"]

    def launch(command, flags, *_):
        (model_dir,) = (Path(f.partition("=")[2]) for f in flags if f.startswith("--model_dir="))
        assert command == "evaluate"
        assert {"--checkpoint=best", "--split=test", "--beam_size=1,2"} < {*flags}
        best = {"checkpoint": "best", "steps": checkpoint.resolve(model_dir, "best").steps}
        for k, evaluation in enumerate(before[model_dir.name]["evaluations"], start=1):
            path = model_dir / "eval" / f"test-best-beam{k}-alpha0.6.json"
            path.write_text(json.dumps({**evaluation, **best, "metrics": {"bleu": 40 + k}}))

    both = dataclasses.replace(EXPERIMENT, checkpoints=("average:2", "best"), metrics=("bleu",))
    assert sweep.Sweep(both, folder, options, task, launch).run() == []
    for name, run in read(folder / "results.json")["runs"].items():
        of_average, of_best = run["evaluations"][:2], run["evaluations"][2:]
        assert of_average == before[name]["evaluations"]
        for k, evaluation in enumerate(of_best, start=1):
            assert (evaluation["checkpoint_flag"], evaluation["role"]) == ("best", "test")
            assert (evaluation["beam_size"], evaluation["metrics"]) == (k, {"bleu": 40 + k})
        assert len(of_best) == 2
        # Tables show the first kind.
        assert run.get("comparisons") == before[name].get("comparisons")


@pytest.mark.parametrize("gone", [(2, 4), (4,)])
def test_runs_whose_checkpoints_are_too_few(finished, options, task, tmp_path, gone):
    folder = shutil.copytree(finished, tmp_path / "copy")
    before = read(folder / "results.json")["runs"]
    for run in (folder / "runs").iterdir():
        for step in gone:
            shutil.rmtree(run / "checkpoints" / str(step))
    grid = sweep.Sweep(EXPERIMENT, folder, options, task, lambda *_: pytest.fail("launched"))
    assert grid.run() == []
    assert read(folder / "results.json")["runs"] == before
    name = "text-transformer_tiny-n1-seed1"
    alone(finished, folder, lambda results: results["runs"][name]["evaluations"].pop())
    assert grid.run() == [name]
    error = read(folder / "results.json")["runs"][name]["error"]
    assert f"no score, with all metrics, of {name}, average:2, on the test set with" in error


def test_after_an_interruption_no_other_run_begins(finished, options, task, tmp_path):
    shutil.copy(finished / "vocab-text.model", tmp_path)
    launched = []

    def launch(*arguments):
        launched.append(arguments)
        if len(launched) == 1:
            raise KeyboardInterrupt
        assert ended.wait(60)
        raise CommandError("interrupted")

    ended = threading.Event()
    grid = sweep.Sweep(EXPERIMENT, tmp_path, dataclasses.replace(options, parallel=2), task, launch)
    grid._processes.terminate = ended.set
    with pytest.raises(KeyboardInterrupt):
        grid.run()
    # The interrupted one's thread may have begun another before.
    assert len(launched) < 4


def test_sigterm_ends_all_that_runs(finished, options, task, tmp_path, monkeypatch):
    shutil.copy(finished / "vocab-text.model", tmp_path)
    endless = (
        "import os, pathlib, time; pathlib.Path(f'{os.getpid()}.pid').touch(); time.sleep(600)"
    )
    (tmp_path / "train").write_text(endless)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "sweep")])
    monkeypatch.chdir(tmp_path)

    def end():
        limit = time.time() + 30
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert time.time() < limit
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    grid = sweep.Sweep(EXPERIMENT, tmp_path, dataclasses.replace(options, parallel=2), task)
    with pytest.raises(StoppedError) as error, _terminable():
        grid.run()
    assert error.value.exit_code == 143
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    # Their seconds are kept; nothing failed.
    runs = list(read(tmp_path / "results.json")["runs"].values())
    assert len(runs) == 2 and all(run["launched"]["seconds"] > 0 for run in runs)
    assert all(run.get("status") != "failed" and not run.get("error") for run in runs)


def test_seconds_and_memory_are_those_of_all_launches(finished, options, task, tmp_path):
    """Four launches: interrupted, killed together with the sweep, failed, and whole."""
    shutil.copy(finished / "vocab-text.model", tmp_path)
    name = "text-transformer_tiny-n1-seed1"
    clock = [0.0]
    launches = [
        (100, 7e8, KeyboardInterrupt),
        (10, 7e8, KeyboardInterrupt),
        (20, 9e8, CommandError("no device")),
        (3, 8e8, None),
    ]
    left_by_a_kill = []

    def launch(command, flags, log, environment, usage):
        seconds, usage["peak_host_bytes"], error = launches.pop(0)
        clock[0] += seconds
        log.touch()
        os.utime(log, (clock[0], clock[0]))
        left_by_a_kill.append((tmp_path / "results.json").read_text())
        if not launches:
            shutil.rmtree(tmp_path / "runs" / name)
            shutil.copytree(finished / "runs" / name, tmp_path / "runs" / name)
        else:
            (tmp_path / "runs" / name).mkdir(exist_ok=True)
            config = finished / "runs" / name / "config.json"
            shutil.copy(config, tmp_path / "runs" / name)
        if error:
            raise error

    part = dataclasses.replace(options, seeds=(1,))
    alone = dataclasses.replace(EXPERIMENT, arms=(Arm(),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep.time, "time", lambda: clock[0])
        with pytest.raises(KeyboardInterrupt):
            sweep.Sweep(alone, tmp_path, part, task, launch).run()
        run = read(tmp_path / "results.json")["runs"][name]
        assert run["launched"] == {"seconds": 100, "peak_host_bytes": 7e8}
        assert not {"status", "seconds", "speed"} & {*run}
        with pytest.raises(KeyboardInterrupt):
            sweep.Sweep(alone, tmp_path, part, task, launch).run()
        (tmp_path / "results.json").write_text(left_by_a_kill[-1])
        clock[0] += 1000
        assert sweep.Sweep(alone, tmp_path, part, task, launch).run() == [name]
        assert sweep.Sweep(alone, tmp_path, part, task, launch).run() == []
    run = read(tmp_path / "results.json")["runs"][name]
    assert (run["seconds"], run["speed"]["peak_host_bytes"]) == (133, 9e8)
    assert "launched" not in run
    assert run["status"] == "done" and run["speed"]["steps_per_second"] > 0


def test_averages_that_no_run_would_have_are_refused_at_once(options, task, tmp_path):
    def refuse(match, **settings):
        given = dataclasses.replace(options, settings=settings)
        many = dataclasses.replace(EXPERIMENT, checkpoints=("best", "average:20"))
        with pytest.raises(UserError, match=match):
            sweep.Sweep(many, tmp_path, given, task)
        return given, many

    refuse(r"^--keep=10: average:20 needs --keep=20 or more\.$", keep=10, train_steps=40)
    # Checkpoints at 2, 4, 6 to 38, and at the last step.
    given, many = refuse(
        r"^--train_steps=38: with a checkpoint every 2 steps, average:20 needs --train_steps=39 ",
        train_steps=38,
    )
    enough = dataclasses.replace(given, settings={"train_steps": 39})
    assert len(sweep.Sweep(many, tmp_path, enough, task).runs) == 4
    # Validations at 3, 6, 9 save too: 2, 3, 4, 6, 8, 9 and so on, of which the 19th is 28.
    refuse("--train_steps=29 or more", train_steps=28, eval_every=3)


def test_time_left_is_that_of_runs_that_were_trained(options, task, tmp_path, caplog):
    runs = sweep.Sweep(EXPERIMENT, tmp_path, options, task).runs
    progress = Progress(runs, 2)
    with caplog.at_level(logging.INFO):
        progress.report(runs[0], "was done already", None, trained=False)
        progress.report(runs[1], "done", 5.0, trained=False)
        progress.report(runs[2], "done", 100.0, trained=True)
    prefix = "text-transformer_tiny"
    # N = 2 takes 3 / 2 of 100 s, on one of two devices: there is no other run for the second.
    assert caplog.messages == [
        f"[1/4] {prefix}-n1-seed1 was done already",
        f"[2/4] {prefix}-n2-discount0.5-seed1 done in 0:00:05",
        f"[3/4] {prefix}-n1-seed2 done in 0:01:40; about 0:02:30 left",
    ]


def test_time_left_of_a_sweep_that_goes_on(options, task, tmp_path, caplog):
    runs = sweep.Sweep(EXPERIMENT, tmp_path, options, task).runs
    steps = runs[0].settings["train_steps"]
    started = {runs[0].name: steps, runs[1].name: steps // 2}
    progress = Progress(runs, 1, started, {runs[0].name: 40.0})
    with caplog.at_level(logging.INFO):
        # N = 1 took 40 s, so that half of N = 2 will take 30 s, another N = 1 40 s and N = 2 60 s.
        progress.report(runs[0], "was done already", None, trained=False)
        # What is measured here counts: half an N = 2 takes as long as three quarters of an N = 1.
        progress.report(runs[1], "done", 60.0, trained=True)
        progress.report(runs[2], "done", 100.0, trained=True)
        progress.report(runs[3], "done", 100.0, trained=True)
    assert [line.rpartition("seed")[2] for line in caplog.messages] == [
        "1 was done already; about 0:02:10 left",
        "1 done in 0:01:00; about 0:03:20 left",
        "2 done in 0:01:40; about 0:02:17 left",
        "2 done in 0:01:40",
    ]


def test_a_sweep_that_goes_on_knows_where_its_runs_are(finished, options, task, tmp_path, caplog):
    folder = shutil.copytree(finished, tmp_path / "copy")
    results = read(folder / "results.json")
    for number, (name, run) in enumerate(results["runs"].items()):
        run["seconds"] = 100.0
        if number >= 2:
            del run["status"]
            shutil.rmtree(folder / "runs" / name / "checkpoints" / "6")
    shutil.rmtree(folder / "runs" / name / "checkpoints")
    (folder / "results.json").write_text(json.dumps(results))
    with caplog.at_level(logging.INFO):
        assert len(sweep.Sweep(EXPERIMENT, folder, options, task, Absent()).run()) == 2
    # N = 1 and N = 2 took 200 s for 6 steps each. The last two steps of another N = 1 are left, and
    # a whole N = 2: (2 / 6 · 2 + 3) / (2 + 3) of that.
    (line,) = (line for line in caplog.messages if line.startswith("[1/4]"))
    assert line.endswith("-n1-seed1 was done already; about 0:02:27 left")


def test_commands_are_kept_as_others_can_give_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"/opt/tf_teaforn/bin/train --train_files={tmp_path}/a.en,{tmp_path}/a.de '--x=b c'"
    assert portable(command) == "bin/train --train_files=a.en,a.de '--x=b c'"
    assert portable("teaforn-train --n=2") == "teaforn-train --n=2"
    elsewhere = f"bin/train --train_files=/mnt{tmp_path}/a.en"
    assert portable(elsewhere) == elsewhere
    monkeypatch.chdir("/")
    assert portable("bin/train --train_files=gs://a/b") == "bin/train --train_files=gs://a/b"


def test_plan_of_the_paper():
    runs = plan(get_experiment("base"), Options(), get_task, {})
    assert len(runs) == 2 * 3 * 5 and len({run.name for run in runs}) == 30
    assert runs[0].name == "wmt14_ende-transformer_base-n1-seed1"
    assert {run.settings["train_steps"] for run in runs} == {1_000_000}
    big = plan(get_experiment("big"), Options(tasks=["wmt14_ende"]), get_task, {})
    assert len(big) == 11 * 3 and {run.settings["train_steps"] for run in big} == {500_000}
    some = Options(tasks=["wmt14_ende"], arms=["n3-discount0.4", "n1"])
    part = [run for run in big if run.arm.name in some.arms]
    assert len(part) == 6 and plan(get_experiment("big"), some, get_task, {}) == part
    longer = plan(get_experiment("equal_compute"), Options(), get_task, {})
    assert {run.settings["train_steps"] for run in longer if run.task == "wmt14_enfr"} == {
        1_000_000,
        1_500_000,
    }
    # What the others have no use for.
    own = plan(get_experiment("base"), Options(settings={"clone_init": "copy"}), get_task, {})
    assert {run.arm.name for run in own if "clone_init" in run.settings} == {
        "n2-discount0.5-unshared"
    }


def test_how_decoders_start_counts_where_there_are_several():
    copied = RunConfig(task="text").replace({"n": 2, "clone_init": "copy"})
    drawn = copied.replace({"clone_init": "independent"})
    assert differences(drawn, copied, ["best"]) == []
    own = [config.replace({"shared": False}) for config in (drawn, copied)]
    assert differences(*own, ["best"]) == ["--clone_init: independent there, copy here"]


def test_small_scale_keeps_the_shape():
    experiment = get_experiment("top_k")
    options = Options(scale="small", settings={"train_steps": 200})
    small = scaled(experiment, "small")
    runs = plan(small, options, get_task, {"demo_ende": 1500})
    assert [run.arm for run in runs[:4]] == list(experiment.arms)
    assert len(runs) == len(plan(experiment, Options(), get_task, {}))
    assert runs[0].task == "demo_ende"
    assert runs[0].settings["checkpoint_every"] == 10
    # All of the vocabulary that there is.
    assert runs[3].settings["top_k"] == 1500 and runs[7].settings["top_k"] == 2000
    assert small.beam_sizes == experiment.beam_sizes and small.seeds == experiment.seeds
    # A pretrained model brings a vocabulary of its own.
    pretrained = dataclasses.replace(options, settings={"init_from": "bart-base"})
    with pytest.raises(UserError, match="top_kV needs the number .* of --init_from=bart-base. Add"):
        plan(small, pretrained, get_task, {})
    sized = dataclasses.replace(options, settings={"init_from": "bart-base", "vocab_size": 50265})
    assert plan(small, sized, get_task, {})[3].settings["top_k"] == 50265
    files = dataclasses.replace(options, task_options={"train_files": "a"}, tasks=["wmt14_enfr"])
    run = plan(small, files, get_task, {})[0]
    assert run.task == "text"


def test_refusals(tmp_path):
    def refuse(experiment, match, **options):
        with pytest.raises(UserError, match=match):
            sweep.Sweep(get_experiment(experiment), tmp_path, Options(**options), get_task)

    refuse("base", "--task=gigaword: .* has wmt14_ende, wmt14_enfr", tasks=["gigaword"])
    files = {"train_files": "a"}
    refuse("base", "--train_files: at --scale=paper .* data of its own", task_options=files)
    match = "--train_files: these files can stand for one task. Add --task=wmt14_ende, or"
    refuse("base", match, task_options=files, scale="small")
    vocabulary = tmp_path / "no.model"
    vocabulary.write_text("no")
    refuse("base", "no.model is not a SentencePiece model", vocabulary=str(vocabulary))
    refuse("base", "--arms=n3: .* has n1, n2-discount0.5-unshared, n2-discount0.5", arms=["n3"])
    refuse("summarization", "--init_from is missing: .* pretrained pegasus_large")
    refuse("base", "--train_steps=0: write 1", scale="small", settings={"train_steps": 0})
    for text, match in (
        ("{}", "results.json is not a whole results file of bin/sweep. Take a copy that is"),
        ('{"format_version": 1, "experiments": {}, "runs": []}', "is not a whole results file"),
        ('{"format_version": 2}', "results.json has format version 2; this reads 1"),
        (
            '{"format_version": 1, "experiments": {}, "runs": {"a": {"task": "b", "seed": 1}}}',
            "sweep: runs, a, has no arm, command, settings, train_steps, version. Take",
        ),
    ):
        (tmp_path / "results.json").write_text(text)
        refuse("base", match)
    with pytest.raises(UserError, match="Did you mean word_drop"):
        get_experiment("word_dorp")


def test_curves(tmp_path):
    assert read_curves(tmp_path / "none") == {}
    records = [
        {"kind": "train", "step": 1, "loss": 2.5},
        {"kind": "validation", "step": 1, "bleu": 3},
    ]
    text = "\n".join(map(json.dumps, records)) + '\n{"kind": "tr'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_curves(tmp_path / "metrics.jsonl") == {
        "train": {"loss": [[1, 2.5]]},
        "validation": {"bleu": [[1, 3]]},
    }
    (tmp_path / "metrics.jsonl").write_text(text.split("\n")[0] + '\n{"kind"}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2 is no measurement. Delete it."):
        read_curves(tmp_path / "metrics.jsonl")
    assert thinned(list(range(10)), 3) == [0, 4, 8, 9]
    assert thinned([1]) == [1] and thinned([]) == []
