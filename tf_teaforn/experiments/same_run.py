"""Whether two settings are those of one run: they learn the same, and the same is scored."""

import os
from collections.abc import Sequence

from tf_teaforn.config import BOOKKEEPING, RunConfig
from tf_teaforn.errors import UserError
from tf_teaforn.experiments.command_line import FILES

# Settings that do not change what is learned.
_IGNORED = BOOKKEEPING | {"steps_per_execution", "on_nonfinite", "remat", "micro_batch_tokens"}
# Without effect where there is one decoder.
_OF_STAGES = {"discount", "shared", "clone_init", "stage_input", "top_k"}
# A task's own settings where they are not given.
_DEFAULTS = {"metric": "bleu"}
# Paths, which differ from machine to machine.
_PATHS = (*FILES, "init_from")


class OtherRunError(UserError):
    """What is there of a run has other settings."""


def differences(
    found: RunConfig, expected: RunConfig, checkpoints: Sequence[str] = ()
) -> list[str]:
    """Lines for settings that make two runs differ in what they learn, or in what is scored.

    Args:
        found, expected: paths count by file name.
        checkpoints: which are scored, as --checkpoint has them.
    """
    mine, theirs = found.flat(), expected.flat()
    ignored = {*_IGNORED, *(_OF_STAGES if expected.teaforn.n == 1 else ())}
    ignored |= {"model", "vocab_size"} if expected.model.init_from else set()
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
