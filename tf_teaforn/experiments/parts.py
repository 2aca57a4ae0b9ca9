"""One grid that was run in several folders, or on several machines, from its results files."""

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tf_teaforn.config import RunConfig
from tf_teaforn.experiments.same_run import differences

# What all parts of an experiment have in common, and what they have for common tasks and arms.
_SAME = ("scale", "model", "files", "files_sha256", "beam_sizes", "checkpoints")
_SAME_ENTRIES = ("tasks", "vocabulary_sha256", "train_steps")
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

    Parts have other seeds, arms or tasks. A run that several have is taken where it is done. What
    cannot be joined to an earlier file of the same experiment stays apart, and is told of.

    Args:
        files: (path, contents).
    """
    found: list[Joined] = []
    for path, results in files:
        reasons = []
        for index, earlier in enumerate(found):
            if not results["experiments"].keys() & earlier.results["experiments"].keys():
                continue
            reason = _difference(earlier.results, results)
            if not reason:
                found[index] = Joined((*earlier.paths, path), _union(earlier.results, results))
                break
            reasons.append(f"{path} is not joined to {earlier.paths[0]}: {reason}")
        else:
            found.append(Joined((path,), results))
            for reason in reasons:
                _logger.info("%s", reason)
    return found


def _difference(one, other):
    """What keeps two files from being parts of one grid, or None."""
    for name in one["experiments"].keys() & other["experiments"].keys():
        abouts = [part["experiments"][name] for part in (one, other)]
        for key, values in _shared_values(*abouts):
            if values[0] != values[1]:
                return f"{key}: {values[0]} and {values[1]}"
        scored = [
            [(name, run) for name, run in part["runs"].items() if run.get("evaluations")]
            for part in (one, other)
        ]
        for mine, theirs in itertools.product(*scored):
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
    """What keeps two (name, run) from a common mean, or None; they may be of different arms."""
    names, runs = zip(mine, theirs, strict=True)
    arms = {name.rpartition("-seed")[0] for name in names}
    if len(arms) > 1:
        return None
    if names[0] == names[1] and runs[0]["evaluations"] != runs[1]["evaluations"]:
        return f"both have scores of {names[0]}, which are not the same"
    lines = differences(*map(_settings, runs), checkpoints)
    alphas = [sorted({e.get("beam_alpha") for e in run["evaluations"]}) for run in runs]
    if alphas[0] != alphas[1]:
        lines.append(f"--beam_alpha: {alphas[0]} there, {alphas[1]} here")
    return f"{names[0]} there, {names[1]} here: {'; '.join(lines)}" if lines else None


def _settings(run):
    return RunConfig(task=run["task"]).replace({**run["settings"], "seed": 0})


def _union(one, other):
    experiments = {**one["experiments"], **other["experiments"]}
    for name in one["experiments"].keys() & other["experiments"].keys():
        abouts = [part["experiments"][name] for part in (one, other)]
        experiments[name] = {
            **abouts[0],
            **abouts[1],
            **{key: {**abouts[0].get(key, {}), **abouts[1].get(key, {})} for key in _SAME_ENTRIES},
            "seeds": sorted({*abouts[0]["seeds"], *abouts[1]["seeds"]}),
            "commands": list(dict.fromkeys([*abouts[0]["commands"], *abouts[1]["commands"]])),
        }
    runs = {**one["runs"], **other["runs"]}
    for name in one["runs"].keys() & other["runs"].keys():
        if runs[name].get("status") != "done":
            runs[name] = one["runs"][name]
    return {"format_version": one["format_version"], "experiments": experiments, "runs": runs}
