"""Trains a model with TeaForN.

    bin/train --task=demo_enfr --n=2 --model_dir=runs/demo
    bin/train --task=wmt14_enfr --n=2 --model_dir=gs://bucket/run --strategy=tpu
    bin/train --task=text --train_files=train.tsv --valid_files=valid.tsv --model_dir=runs/mine

Only --task and --model_dir are needed: each task has defaults of its own for the rest. The same
command, given again, continues where the run stopped.
"""

import sys

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.config import RunConfig, settings
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/train."""
    flags.DEFINE_string("task", None, "What to train on, by name.", flag_values=values)
    flags.DEFINE_string(
        "model_dir", None, "Folder for everything the run writes.", flag_values=values
    )
    app.define_settings(values)
    flags.DEFINE_string(
        "vocab", None, "SentencePiece .model file to use; default: train one.", flag_values=values
    )
    flags.DEFINE_string(
        "strategy",
        "auto",
        "Devices: auto, one, mirrored (all local GPUs) or tpu.",
        flag_values=values,
    )
    flags.DEFINE_string("tpu", "local", "With --strategy=tpu: local or a name.", flag_values=values)
    app.define_task_flags(values)


def run_config(values, task, options):
    """`RunConfig` from the task's defaults and the flags given."""
    given = {
        field.name: values[field.name].value
        for field in settings()
        if values[field.name].value is not None
    }
    config = RunConfig(task=task.name, task_options=options, data_dir=values.data_dir)
    return config.replace({**task.defaults, **given})


def train(values):
    """Runs the command."""
    name = app.required(values, "task")
    model_dir = app.required(values, "model_dir")
    options = {n: values[n].value for n in app.TASK_OPTIONS if values[n].value is not None}
    task = app.load_task(name, options, values)
    config = run_config(values, task, options)

    from tf_teaforn.tf_backend.strategy import make_strategy
    from tf_teaforn.training import Run

    strategy = make_strategy(values.strategy, values.tpu)
    run = Run(config, task, model_dir, strategy, values.vocab, command=sys.argv)
    best = run.run()
    if best is None:
        raise UserError(f"--train_steps={config.training.train_steps}: nothing was trained.")
    print(
        f"Best {task.headline_metric} on the validation split, greedy: {best:.2f} at step "
        f"{run.state['best_step']}. Next: bin/evaluate --model_dir={model_dir}"
    )


def main():
    """Entry point."""
    app.run(define_flags, train, __doc__)
