"""One grid that was run in several folders, or on several machines, from its results files."""

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tf_teaforn.errors import UserError
from tf_teaforn.experiments.records import place
from tf_teaforn.experiments.results import cell, has_result
from tf_teaforn.experiments.same_run import beside_the_method, differences, other_alphas

# What all parts of an experiment have in common, and what they have for common tasks and flags.
_SAME = ("scale", "model", "beam_sizes", "checkpoints")
_SAME_ENTRIES = ("tasks", "files", "files_sha256", "vocabulary_sha256")
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Joined:
    """Results files as one.

    Attributes:
        paths: of the files.
        results: contents, as one file would have them.
    """

    paths: tuple[str, ...]
    results: Mapping[str, Any]


def join(files: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Joined]:
    """Puts together what can share its means: the same experiment on the same data.

    Parts have other seeds, arms or tasks. A run that several have is taken where there is most of
    it. What cannot be joined to an earlier file of the same experiment stays apart, and is told of.

    Args:
        files: (path, contents).
    """
    found: list[Joined] = []
    for path, results in files:
        new, apart, place_of_new = Joined((path,), results), [], None
        for earlier in found:
            common = earlier.results["experiments"].keys() & new.results["experiments"].keys()
            reason = _difference(earlier.results, new.results, common)
            if common and not reason:
                # Of several experiments, it may join what had none in common before.
                new = Joined(earlier.paths + new.paths, _union(earlier.results, new.results))
                place_of_new = len(apart) if place_of_new is None else place_of_new
                continue
            apart.append(earlier)
            if reason:
                _logger.info("%s is not joined to %s: %s", path, earlier.paths[0], reason)
        apart.insert(len(apart) if place_of_new is None else place_of_new, new)
        found = apart
    return found


def _difference(one, other, experiments):
    """What keeps two files from being parts of one grid, or None."""
    for name in sorted(experiments):
        abouts = [part["experiments"][name] for part in (one, other)]
        for key, values in _shared_values(*abouts):
            if values[0] != values[1]:
                return f"{key}: {values[0]} and {values[1]}"
        done = [
            [(name, run) for name, run in part["runs"].items() if has_result(run)]
            for part in (one, other)
        ]
        for mine, theirs in itertools.product(*done):
            if reason := _run_difference(mine, theirs, abouts[0]["checkpoints"]):
                return reason
    return None


def _shared_values(one, other):
    """(what, its two values) of all that both know of an experiment."""
    for key in _SAME:
        if key in one and key in other:
            yield key, (one[key], other[key])
    for key in _SAME_ENTRIES:
        entries = one.get(key, {}), other.get(key, {})
        for entry in entries[0].keys() & entries[1].keys():
            yield f"{key}, {entry}", (entries[0][entry], entries[1][entry])


def _run_difference(mine, theirs, checkpoints):
    """What keeps two (name, run) out of one table, or None."""
    names, runs = zip(mine, theirs, strict=True)
    scores = [{place(e): e for e in run.get("evaluations", [])} for run in runs]
    if runs[0]["task"] == runs[1]["task"]:
        references = [{e["role"]: e["references_sha256"] for e in by.values()} for by in scores]
        for role in references[0].keys() & references[1].keys():
            if references[0][role] != references[1][role]:
                return f"{names[0]} and {names[1]} are scored on other references ({role})"
    if names[0].rpartition("-seed")[0] != names[1].rpartition("-seed")[0]:
        return None
    if names[0] == names[1] and all(run.get("status") == "done" for run in runs):
        both = scores[0].keys() & scores[1].keys()
        if any(scores[0][key]["metrics"] != scores[1][key]["metrics"] for key in both):
            return f"both have {names[0]}, with other scores"
    try:
        lines = differences(*map(beside_the_method, runs), checkpoints)
    except UserError as error:
        return f"{names[0]}, {names[1]}: {error}"
    lines += other_alphas(*runs)
    return f"{names[0]} there, {names[1]} here: {'; '.join(lines)}" if lines else None


def _union(one, other):
    runs = {**one["runs"], **other["runs"]}
    for name in one["runs"].keys() & other["runs"].keys():
        both = one["runs"][name], other["runs"][name]
        runs[name] = max(both, key=_how_much)
        # Those of one that is not at its end may be of other scores.
        if all(run.get("status") == "done" for run in both):
            runs[name] = {**runs[name], **_most("comparisons", both)}
    experiments = {**one["experiments"], **other["experiments"]}
    for name in one["experiments"].keys() & other["experiments"].keys():
        abouts = [part["experiments"][name] for part in (one, other)]
        entries = {key: abouts[0].get(key, {}) | abouts[1].get(key, {}) for key in _SAME_ENTRIES}
        experiments[name] = {
            **abouts[0],
            **entries,
            "train_steps": _train_steps(abouts, [one["runs"], other["runs"]]),
            "seeds": sorted({*abouts[0]["seeds"], *abouts[1]["seeds"]}),
            "commands": list(dict.fromkeys([*abouts[0]["commands"], *abouts[1]["commands"]])),
        }
    return {"format_version": one["format_version"], "experiments": experiments, "runs": runs}


def _train_steps(abouts, parts):
    """{task/arm: steps}; of what was only tried in one part, those of the other."""
    found = {}
    for about, runs in zip(abouts, parts, strict=True):
        results = {
            (cell(run["task"], run["arm"]), run["train_steps"])
            for run in runs.values()
            if has_result(run)
        }
        for key, steps in about.get("train_steps", {}).items():
            if key not in found or (key, steps) in results:
                found[key] = steps
    return found


def _how_much(run):
    return run.get("status") == "done", len(run.get("evaluations", ()))


def _most(key, runs):
    value = max((run.get(key, []) for run in runs), key=len)
    return {key: value} if value else {}
