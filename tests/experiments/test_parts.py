"""A grid that was run in parts gives the report of one that was run in one folder."""

import copy
import json
from pathlib import Path

import pytest

from tf_teaforn.experiments import results
from tf_teaforn.experiments.parts import join
from tf_teaforn.experiments.report import sections, write_report

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
    about["train_steps"] = {run["arm"]: steps[run["arm"]] for run in found["runs"].values()}
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
        (("experiments", NAME, "train_steps", "n1"), 9, "train_steps, n1: 16000 and 9"),
        (("runs", RUN, "settings", "dropout"), 0.5, "--dropout: 0.2 there, 0.5 here"),
        (("runs", RUN, "evaluations", 0, "beam_alpha"), 0.0, "--beam_alpha"),
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
    assert len(join([("a", whole), ("b", other)])) == 1
    other["runs"][RUN]["evaluations"][0]["metrics"]["bleu"] += 0.1
    assert len(join([("a", whole), ("b", other)])) == 2


def test_settings_that_teach_nothing_may_differ(whole):
    one, other, _ = in_parts(whole)
    other["runs"][RUN]["settings"]["log_every"] = 7
    assert len(join([("a", one), ("b", other)])) == 1
