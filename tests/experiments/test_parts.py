"""A grid that was run in parts gives the report of one that was run in one folder."""

import copy
import itertools
import json
import re
from pathlib import Path

import pytest

from tf_teaforn.errors import UserError
from tf_teaforn.experiments import results
from tf_teaforn.experiments.parts import join
from tf_teaforn.experiments.report import sections, write_report
from tf_teaforn.experiments.results import cell

# Three seeds of two arms.
WHOLE = Path(__file__).resolve().parents[2] / "docs/results/multi30k_ende_long/results.json"
NAME = "multi30k_long"


@pytest.fixture
def whole():
    return results.read(WHOLE)


def part(whole, keep, number):
    """What a sweep of the runs of which `keep` (arm, seed) would have left."""
    found = copy.deepcopy(whole)
    found["runs"] = {n: r for n, r in found["runs"].items() if keep(r["arm"], r["seed"])}
    about = found["experiments"][NAME]
    about["seeds"] = sorted({run["seed"] for run in found["runs"].values()})
    steps = about["train_steps"]
    cells = {cell(run["task"], run["arm"]) for run in found["runs"].values()}
    about["train_steps"] = {key: steps[key] for key in cells}
    about["commands"] = [about["commands"][number]]
    return found


def in_parts(whole):
    """One seed of both arms, and two seeds by arm."""
    return [
        part(whole, lambda arm, seed: seed == 3, 0),
        part(whole, lambda arm, seed: seed < 3 and arm == "n1", 1),
        part(whole, lambda arm, seed: seed < 3 and arm != "n1", 2),
    ]


def written(tmp_path, parts):
    """The paths of results files, in a folder each."""
    paths = []
    for number, one in enumerate(parts):
        path = tmp_path / f"part{number}" / "results.json"
        path.parent.mkdir()
        results.write(path, one)
        paths.append(str(path))
    return paths


def test_parts_make_the_report_of_the_whole(tmp_path, whole):
    about = whole["experiments"][NAME]
    about["commands"] = about["commands"][:3]
    paths = written(tmp_path, [*in_parts(whole), whole])
    write_report(paths[:3], str(tmp_path / "joined"))
    write_report(paths[3:], str(tmp_path / "one"))
    for name in ("report.md", "report.html", "numbers.csv"):
        assert (tmp_path / "joined" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_a_run_is_taken_where_it_is_done(whole):
    first, other = in_parts(whole)[:2]
    (name,) = (name for name, run in first["runs"].items() if run["arm"] == "n1")
    done = first["runs"][name]
    started = {key: done[key] for key in ("task", "arm", "seed", "settings", "train_steps")}
    for entry in (started, {**started, "status": "failed", "error": "no memory"}, done):
        other["runs"][name] = entry
        for parts in ([first, other], [other, first]):
            (found,) = join([("a", parts[0]), ("b", parts[1])])
            assert found.paths == ("a", "b")
            assert found.results["runs"][name] == done
            assert found.results["experiments"][NAME]["seeds"] == [1, 2, 3]


def set_in(one, keys, value):
    *way, last = keys
    for key in way:
        one = one[key]
    one[last] = value


RUN = "text-transformer_multi30k-n1-seed1"


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (("experiments", NAME, "scale"), "small", "scale: paper and small"),
        (("experiments", NAME, "files", "test_files"), "other.tsv", "other.tsv"),
        (("experiments", NAME, "files_sha256", "train_files"), "0ff1ce", "0ff1ce"),
        (("experiments", NAME, "vocabulary_sha256", "text"), "0ff1ce", "vocabulary_sha256, text"),
        (("experiments", NAME, "beam_sizes"), [1, 2], "beam_sizes: [1, 2, 4, 8] and [1, 2]"),
        (("runs", RUN, "train_steps"), 9, "--train_steps: 16000 there, 9 here"),
        (("runs", RUN, "settings", "new_one"), 9, "Unknown setting"),
        (("runs", RUN, "settings", "dropout"), 0.5, "--dropout: 0.2 there, 0.5 here"),
        (("runs", RUN, "evaluations", 0, "beam_alpha"), 0.0, "--beam_alpha"),
        (("runs", RUN, "evaluations", 7, "references_sha256"), "0ff1ce", "other references (test)"),
    ],
    ids=str,
)
def test_what_has_no_common_mean_stays_apart(tmp_path, whole, caplog, keys, value, reason):
    one, other, _ = in_parts(whole)
    set_in(other, keys, value)
    paths = written(tmp_path, [one, other])
    caplog.set_level("INFO")
    found = sections(paths)
    assert [section.title.rpartition(" (")[2] for section in found] == ["part0)", "part1)"]
    (line,) = caplog.messages
    assert line.startswith(f"{paths[1]} is not joined to {paths[0]}: ") and reason in line


def test_one_run_with_two_scores_is_not_joined(whole):
    other = json.loads(json.dumps(whole))
    other["runs"][RUN]["seconds"] = 1.0
    assert len(join([("a", whole), ("b", other)])) == 1
    other["runs"][RUN]["evaluations"][0]["metrics"]["bleu"] += 0.1
    assert len(join([("a", whole), ("b", other)])) == 2
    other["runs"][RUN]["status"] = "failed"
    for parts in ([whole, other], [other, whole]):
        (found,) = join([("a", parts[0]), ("b", parts[1])])
        assert found.results["runs"][RUN] == whole["runs"][RUN]


def test_a_copy_that_was_taken_during_scoring_adds_nothing(whole):
    early = copy.deepcopy(whole)
    run = early["runs"][RUN]
    run["evaluations"] = run["evaluations"][:4]
    run.pop("status")
    none = copy.deepcopy(early)
    none["runs"][RUN] |= {"status": "failed", "evaluations": []}
    for parts, best in (([early, whole], whole), ([none, early], early)):
        for ordered in (parts, parts[::-1]):
            (found,) = join([("a", ordered[0]), ("b", ordered[1])])
            assert found.results["runs"][RUN] == best["runs"][RUN]


def test_significance_is_taken_from_whoever_tested_it(whole):
    name = "text-transformer_multi30k-n2-discount0.5-seed2"
    untested = copy.deepcopy(whole)
    assert untested["runs"][name].pop("comparisons")
    for parts in ([untested, whole], [whole, untested]):
        (found,) = join([("a", parts[0]), ("b", parts[1])])
        assert found.results["runs"] == whole["runs"]


def test_steps_that_were_only_tried_count_for_nothing(whole):
    one, other, _ = in_parts(whole)
    tried = copy.deepcopy(one)
    tried["runs"] = {n: r for n, r in one["runs"].items() if r["arm"] != "n1"}
    tried["experiments"][NAME]["train_steps"]["text/n1"] = 99000
    for parts in ([tried, other], [other, tried]):
        (found,) = join([("a", parts[0]), ("b", parts[1])])
        assert set(found.results["experiments"][NAME]["train_steps"].values()) == {16000}


def test_tasks_have_steps_of_their_own(whole):
    other = copy.deepcopy(whole)
    about = other["experiments"][NAME]
    about["tasks"] = {"long": "long"}
    about["train_steps"] = {key.replace("text/", "long/"): 99 for key in about["train_steps"]}
    other["runs"] = {
        name.replace("text-", "long-"): {**run, "task": "long", "train_steps": 99}
        for name, run in other["runs"].items()
    }
    (found,) = join([("a", whole), ("b", other)])
    about, arms = found.results["experiments"][NAME], ["n1", "n2-discount0.5"]
    assert set(about["train_steps"].values()) == {16000, 99}
    assert len(results.runs_of(about, arms, found.results["runs"])) == 2 * len(whole["runs"])


def test_what_is_not_known_of_files_keeps_nothing_apart(whole):
    one, other, _ = in_parts(whole)
    for digests in ({}, {"train_files": one["experiments"][NAME]["files_sha256"]["train_files"]}):
        other["experiments"][NAME]["files_sha256"] = digests
        (found,) = join([("a", one), ("b", other)])
        about = found.results["experiments"][NAME]
        assert about["files_sha256"] == one["experiments"][NAME]["files_sha256"]


def test_a_file_of_two_experiments_joins_those_of_one_each(whole):
    one, other, last = in_parts(whole)
    other["experiments"] = {"multi30k": other["experiments"][NAME]}
    last["experiments"]["multi30k"] = copy.deepcopy(last["experiments"][NAME])
    files = [("a", one), ("b", other), ("c", last)]
    for ordered in itertools.permutations(files):
        (found,) = join(ordered)
        assert found.results["runs"].keys() == whole["runs"].keys()
    assert [part.paths for part in join(files[:2])] == [("a",), ("b",)]


def test_the_order_of_sections_is_that_of_the_files(whole):
    one, other, _ = in_parts(whole)
    elsewhere = copy.deepcopy(one)
    elsewhere["experiments"][NAME]["files"]["test_files"] = "others"
    found = join([("a", one), ("b", elsewhere), ("c", other)])
    assert [part.paths for part in found] == [("a", "c"), ("b",)]


def test_arms_that_differ_in_more_than_the_method_are_told_of(tmp_path, whole):
    one, other, last = in_parts(whole)
    for run in [*one["runs"].values(), *last["runs"].values()]:
        if run["arm"] != "n1":
            run["settings"]["batch_tokens"] = 4096
            for evaluation in run["evaluations"]:
                evaluation["beam_alpha"] = 0.0
    write_report(written(tmp_path, [one, other, last]), str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    (line,) = re.findall("TeaFor2 .* differs from Teacher forcing in more than the method.*", text)
    assert line.endswith(
        ": --batch_tokens: 1024 there, 4096 here; --beam_alpha: [0.6] there, [0.0] here."
    )
    write_report([str(WHOLE)], str(tmp_path / "whole"))
    assert "differs from" not in (tmp_path / "whole" / "report.md").read_text()


def test_other_references_in_one_file_are_told_of(tmp_path, whole):
    for evaluation in whole["runs"][RUN]["evaluations"]:
        evaluation["references_sha256"] = "0ff1ce"
    write_report(written(tmp_path, [whole]), str(tmp_path / "report"))
    text = (tmp_path / "report" / "report.md").read_text()
    assert (
        "test set: scored on references of SHA-256 0ff1ce: text-transformer_multi30k-n1, " in text
    )


def test_speed_is_of_the_same_settings(whole):
    """Where nothing is scored, what changes no weight counts too."""
    one, other, _ = in_parts(whole)
    for part in (one, other):
        part["experiments"][NAME] |= {"checkpoints": [], "beam_sizes": []}
        for run in part["runs"].values():
            del run["evaluations"]
    assert len(join([("a", one), ("b", other)])) == 1
    other["runs"][RUN]["settings"]["remat"] = "stage"
    assert len(join([("a", one), ("b", other)])) == 2


def test_settings_that_teach_nothing_may_differ(whole):
    one, other, _ = in_parts(whole)
    other["runs"][RUN]["settings"] |= {"log_every": 7, "remat": "stage"}
    assert len(join([("a", one), ("b", other)])) == 1


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("experiments", "of_tomorrow"), None, "this version has no experiment of_tomorrow"),
        (
            ("runs", RUN, "evaluations", 0),
            {"metrics": {}},
            f"an evaluation of {RUN} has no beam_size",
        ),
    ],
    ids=["experiment", "evaluation"],
)
def test_files_that_are_not_understood(tmp_path, whole, keys, value, message):
    set_in(whole, keys, value or whole["experiments"][NAME])
    (path,) = written(tmp_path, [whole])
    with pytest.raises(UserError, match=message) as raised:
        sections([path])
    assert path in str(raised.value)
