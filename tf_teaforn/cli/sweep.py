"""Runs an experiment of the paper: trains and scores its grid, into one results file.

    bin/sweep --experiment=base --output_dir=runs/base --scale=small
    bin/sweep --experiment=big --task=wmt14_enfr --output_dir=runs/big_enfr --data_dir=tfds
    bin/report --results=runs/base/results.json --output_dir=runs/base/report

The same command, given again, goes on where it stopped. A setting given here (--train_steps,
--batch_tokens, ...) holds for every run of the grid.
"""

import contextlib
import functools
import signal
import sys

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.cli.evaluate import whole_numbers
from tf_teaforn.errors import StoppedError, UserError
from tf_teaforn.experiments.catalog import experiment_names, get_experiment

# What the grid itself varies, and what would end its runs at different steps.
_GRID = ("n", "discount", "shared", "stage_input", "top_k", "word_drop", "seed")
_GRID += ("beam_size", "patience")
_TRAIN_FLAGS = ("strategy", "tpu")


def define_flags(values):
    """Flags of bin/sweep."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    lines = ["Which experiment. One of:"]
    lines += [f"{name}: {get_experiment(name).title}" for name in experiment_names()]
    text("experiment", None, "\n".join(lines))
    text("output_dir", None, "Folder for vocabularies, runs, logs and results.json.")
    flags.DEFINE_enum(
        "scale",
        "paper",
        ("paper", "small"),
        "paper: the paper's data, model and steps. small: the same shape with a tiny model and "
        "1,000 steps, on the demo's sentences or on --train_files, --valid_files, --test_files.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "task",
        [],
        "Which of the experiment's tasks, e.g. wmt14_enfr. Default: all.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "seeds", None, "Seeds, e.g. 1,2,3. Default: the experiment's.", flag_values=values
    )
    flags.DEFINE_list(
        "arms",
        [],
        "Which of the experiment's methods, e.g. n1,n2-discount0.5; the others may follow later. "
        "Default: all.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "parallel",
        None,
        "How many runs at a time. Default: one a GPU, else one.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_boolean("dry_run", False, "Only print the commands.", flag_values=values)
    text("vocab", None, "SentencePiece .model file for all runs. Default: train one a task.")
    text("strategy", None, "Of bin/train.")
    text("tpu", None, "Of bin/train.")
    app.define_task_flags(values)
    app.define_settings(values, but=_GRID)


def sweep(values):
    """Runs the command."""
    experiment = get_experiment(app.required(values, "experiment"))
    output_dir = app.absolute(app.local(values, "output_dir"))

    from tf_teaforn.experiments.plan import Options
    from tf_teaforn.experiments.sweep import Sweep

    options = Options(
        scale=values.scale,
        tasks=values.task,
        seeds=whole_numbers(values, "seeds"),
        arms=values.arms,
        task_options=app.task_options(values),
        settings=app.given_settings(values, but=_GRID),
        train_flags=[
            f"--{name}={values[name].value}" for name in _TRAIN_FLAGS if values[name].value
        ],
        common_flags=_given(values, ("data_dir", "module_import")),
        vocabulary=app.absolute(app.local(values, "vocab")) if values.vocab else None,
        parallel=values.parallel,
        command=sys.argv,
    )

    @functools.cache
    def load(name):
        files = options.task_options if name == "text" else {}
        return app.load_task(name, files, None, values.module_import)

    grid = Sweep(experiment, output_dir, options, load)
    if values.dry_run:
        print("\n".join(grid.commands()))
        return
    with _terminable():
        failed = grid.run()
    path = grid.records.path
    report_dir = path.with_name("report")
    print(f"Wrote {path}. Next: bin/report --results={path} --output_dir={report_dir}")
    if failed:
        raise UserError(
            f"{len(failed)} of {len(grid.runs)} runs failed: {', '.join(failed)}. The reasons are "
            f"in {path}; the same command tries them again."
        )


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends what Ctrl-C ends."""


@contextlib.contextmanager
def _terminable():
    def end(number, frame):
        raise _Terminated

    earlier = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        raise StoppedError(
            "Stopped by SIGTERM. The same command goes on from there.", 128 + signal.SIGTERM
        ) from None
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _given(values, names):
    """Those of the flags that are given, for another command line."""
    given = {name: values[name].value for name in names if values[name].value}
    if "data_dir" in given:
        given["data_dir"] = app.data_dir(values)
    return [f"--{name}={value}" for name, value in given.items()]


def main():
    """Entry point."""
    app.run(define_flags, sweep, __doc__)
