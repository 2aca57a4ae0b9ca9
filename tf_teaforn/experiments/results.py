"""The results file of a sweep: everything the report needs, in one JSON.

{"format_version": 1,
 "experiments": {name: {"scale", "tasks": {the paper's: ours}, "files": {flag: file names},
                        "files_sha256": {flag: of their content}, "model",
                        "vocabulary_sha256": {ours: of its file},
                        "train_steps": {task/arm, ours: steps}, "seeds", "beam_sizes",
                        "checkpoints", "commands": [of bin/sweep]}},
 "runs": {name: {"task", "arm", "seed", "status": "done" or "failed", "error",
                 "command", "version", "settings", "train_steps", "seconds",
                 "speed": {"steps_per_second", "target_tokens_per_second",
                           "peak_device_bytes", "peak_host_bytes"},
                 "launched": {"seconds", "peak_host_bytes", "since"} of a training that is not at
                             its end; since: start of a launch whose end is not recorded,
                 "curves": {"train" or "validation": {name: [[step, value], ...]}},
                 "evaluations": [eval JSON of bin/evaluate and "role", "checkpoint_flag"],
                 "comparisons": [{"role", "checkpoint_flag", "beam_size", "metric", "with",
                                  "baseline", "system", "p_value", "signature"}]}}}
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from tf_teaforn.errors import UserError
from tf_teaforn.paths import write_whole

FORMAT_VERSION = 1
# What there is of each experiment.
_ABOUT = {"scale", "tasks", "model", "seeds", "beam_sizes", "checkpoints", "commands"}
# What there is of each run from its start.
_ABOUT_RUN = {"task", "arm", "seed", "settings", "train_steps", "command", "version"}
# What there is of each evaluation.
_SCORED = {"role", "checkpoint_flag", "beam_size", "metrics", "signature", "references_sha256"}
_SCORED |= {"command", "split"}
# A curve is thinned to about so many points.
_POINTS = 200


def read(path: epath.PathLike) -> dict[str, Any]:
    """Contents of a results file; an empty one where there is none.

    Raises:
        UserError: not a results file, or one of another version.
    """
    path = epath.Path(path)
    if not path.exists():
        return {"format_version": FORMAT_VERSION, "experiments": {}, "runs": {}}
    try:
        results = json.loads(path.read_bytes())
        version = results["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format version {version}; this reads {FORMAT_VERSION}.")
        for part, needed in (("experiments", _ABOUT), ("runs", _ABOUT_RUN)):
            for name, entry in results[part].items():
                if missing := sorted(needed - entry.keys()):
                    raise ValueError(f"{part}, {name}, has no {', '.join(missing)}")
                for evaluation in entry.get("evaluations", ()):
                    if missing := sorted(_SCORED - evaluation.keys()):
                        raise ValueError(f"an evaluation of {name} has no {', '.join(missing)}")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        detail = f": {error}" if type(error) is ValueError else ""
        raise UserError(
            f"{path} is not a whole results file of bin/sweep{detail}. Take a copy that is, or "
            "delete it: a sweep records again what it finds in its folder."
        ) from error
    return results


def write(path: epath.PathLike, results: dict[str, Any]):
    """Replaces a results file in one step, so that it is whole whenever it is read."""
    write_whole(path, json.dumps(results, indent=1) + "\n")


def runs_of(
    about: Mapping[str, Any], arms: Iterable[str], runs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Those of {name: run} that belong to an experiment.

    Args:
        about: what the file has of it.
        arms: names of its arms.
        runs: of the file, which may hold several experiments.
    """
    tasks, arms = set(about["tasks"].values()), set(arms)
    steps = about.get("train_steps", {})

    def of_experiment(run):
        # Earlier files have them by arm.
        return steps.get(cell(run["task"], run["arm"]), steps.get(run["arm"], run["train_steps"]))

    return {
        name: run
        for name, run in runs.items()
        if run["task"] in tasks
        and run["arm"] in arms
        and run["settings"]["model"] == about["model"]
        # Another experiment in the folder may have trained for longer.
        and run["train_steps"] == of_experiment(run)
    }


def cell(task: str, arm: str) -> str:
    """Key of the runs of a grid that differ in the seed alone."""
    return f"{task}/{arm}"


def has_result(run: Mapping[str, Any]) -> bool:
    """Whether there is a result of a run: it is scored, or at its end."""
    return bool(run.get("evaluations")) or run.get("status") == "done"


def read_curves(path: epath.PathLike) -> dict[str, dict[str, list[list[float]]]]:
    """{"train" or "validation": {name: [[step, value], ...]}} of a run's metrics.jsonl.

    Raises:
        UserError: a line is damaged, other than one cut short.
    """
    curves: dict[str, dict[str, list[list[float]]]] = {}
    path = epath.Path(path)
    if not path.exists():
        return curves
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        # A line of a killed process may be torn.
        if line.endswith("}"):
            try:
                record = json.loads(line)
                kind, step = record.pop("kind"), record.pop("step")
            except (ValueError, KeyError) as error:
                raise UserError(f"{path}, line {number} is no measurement. Delete it.") from error
            for name, value in record.items():
                curves.setdefault(kind, {}).setdefault(name, []).append([step, value])
    return {
        kind: {name: thinned(points) for name, points in values.items()}
        for kind, values in curves.items()
    }


def thinned(points: Sequence, limit: int = _POINTS) -> list:
    """Every nth of the points and the last."""
    stride = -(-len(points) // limit) or 1
    return [*points[:-1:stride], *points[-1:]]
