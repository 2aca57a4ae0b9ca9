"""Whether two settings are those of one run: they learn the same, and the same is scored."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tf_teaforn.config import BOOKKEEPING, RunConfig
from tf_teaforn.errors import UserError
from tf_teaforn.experiments.command_line import FILES, task_options_in

# Settings that do not change what is learned, but how fast and in how much memory.
_OF_SPEED = {"steps_per_execution", "remat", "micro_batch_tokens"}
# What an arm sets, or a seed. Of the subwords the vocabulary itself counts, not the number.
_OF_ARMS = {"n", "discount", "stage_input", "top_k", "word_drop", "seed", "vocab_size"}
# Without effect where there is one decoder.
_OF_STAGES = {"discount", "shared", "clone_init", "stage_input", "top_k"}
# A task's own settings where they are not given.
_DEFAULTS = {"metric": "bleu"}
# Paths, which differ from machine to machine.
_PATHS = (*FILES, "init_from")


class OtherRunError(UserError):
    """What is there of a run has other settings."""


def differences(found: RunConfig, expected: RunConfig, checkpoints: Sequence[str]) -> list[str]:
    """Lines for settings that make two runs differ in what they learn, or in what is measured.

    Args:
        found, expected: paths count by file name.
        checkpoints: which are scored, as --checkpoint has them; none: speed and memory are measured
            instead.
    """
    mine, theirs = found.flat(), expected.flat()
    ignored = {*BOOKKEEPING, "on_nonfinite"}
    ignored |= _OF_STAGES if expected.teaforn.n == 1 else set()
    ignored |= {"clone_init"} if found.teaforn.shared and expected.teaforn.shared else set()
    ignored |= _OF_SPEED if checkpoints else set()
    ignored |= {"model", "vocab_size"} if expected.model.init_from else set()
    # No weight depends on it, and an evaluation's command has what was scored.
    ignored |= set() if mine.get("test_files") and theirs.get("test_files") else {"test_files"}
    if all(_steps(found, spec) == _steps(expected, spec) for spec in checkpoints):
        ignored.add("eval_every")

    def value(flat, name):
        if name in _PATHS and flat.get(name):
            return ",".join(os.path.basename(part) for part in flat[name].split(","))
        return flat.get(name, _DEFAULTS.get(name))

    return [
        f"--{name}: {value(mine, name)} there, {value(theirs, name)} here"
        for name in sorted({*mine, *theirs} - ignored)
        if value(mine, name) != value(theirs, name)
    ]


def _steps(config: RunConfig, spec: str) -> list[int]:
    """Of the checkpoints that "best" is chosen from, or that "average:<n>" is of."""
    training = config.training
    last = training.train_steps
    validated = {*range(training.eval_every, last + 1, training.eval_every), last}
    if spec == "best":
        return sorted(validated)
    saved = {*range(training.checkpoint_every, last + 1, training.checkpoint_every), *validated}
    return sorted(saved)[-int(spec.partition("average:")[2] or 1) :]


def beside_the_method(run: Mapping[str, Any], times: float = 1.0) -> RunConfig:
    """Settings of a recorded run that all arms and seeds of its task should have in common.

    And of the method whether decoders share their weights, without which `clone_init` says nothing.

    Args:
        run: of a results file.
        times: how many times the experiment's number of updates its arm takes.

    Raises:
        UserError: a setting of a version that is not this one.
    """
    settings = {k: v for k, v in run["settings"].items() if k not in _OF_ARMS}
    settings["train_steps"] = round(run["train_steps"] / times)
    options = task_options_in(run["command"])
    return RunConfig(task=run["task"], task_options=options).replace(settings)


def alphas_of(run: Mapping[str, Any]) -> set[float]:
    """Values of --beam_alpha that a recorded run was scored with."""
    return {e["beam_alpha"] for e in run.get("evaluations", ()) if "beam_alpha" in e}


def other_alphas(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line as of `differences` where two recorded runs were scored with different ones."""
    mine, theirs = sorted(alphas_of(there)), sorted(alphas_of(here))
    different = mine and theirs and mine != theirs
    return [f"--beam_alpha: {mine} there, {theirs} here"] if different else []
