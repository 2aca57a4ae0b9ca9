"""Makes the training pairs of a task on documents beforehand, as an Apache Beam pipeline.

    bin/prepare --task=gsg --train_files='news/*.txt.gz' --valid_files=valid.txt --output_dir=pairs
    bin/train --task=gsg --prepared=pairs --model_dir=runs/gsg

DirectRunner works on this machine, with all cores, and holds the documents of a split in memory.
Where they are too many for it, bin/train --task=gsg reads the documents themselves, without holding
them, or many machines share them: any other runner of Beam's takes its own options by
--beam_options, "--project=P --region=R --temp_location=gs://B/tmp" for example. The files do not
depend on runner and workers. The same command, given again after an interruption, keeps the shards
that are complete.
"""

import shlex

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.cores import usable_cores
from tf_teaforn.errors import UserError
from tf_teaforn.lock import locked


def define_flags(values):
    """Flags of bin/prepare."""
    app.define_task_name(values, "A task on documents: gsg.")
    flags.DEFINE_string("output_dir", None, "Folder to write pairs to.", flag_values=values)
    flags.DEFINE_string("runner", "DirectRunner", "Beam's runner.", flag_values=values)
    flags.DEFINE_integer("shards", 64, "Number of files of each split.", flag_values=values)
    flags.DEFINE_string("beam_options", "", "More options of Beam's.", flag_values=values)
    app.define_task_flags(values)


def prepare(values):
    """Runs the command."""
    from tf_teaforn.data.documents import SHARDS, GapSource

    output_dir = app.absolute(app.required(values, "output_dir"))
    name = app.required(values, "task")
    task = app.load_task(name, app.task_options(values), app.data_dir(values), values.module_import)
    if not isinstance(task.source, GapSource):
        raise UserError(
            f"--task={name}: its pairs are read as they are. Write --task=gsg, with documents."
        )
    if values.shards not in SHARDS:
        raise UserError(f"--shards={values.shards}: write a number from 1 to {SHARDS[-1]}.")
    try:
        from tf_teaforn.data.prepare import WITHOUT_PRISM
        from tf_teaforn.data.prepare import prepare as run
    except ModuleNotFoundError as error:
        if not error.name.startswith("apache_beam"):
            raise
        raise UserError(
            "bin/prepare needs Apache Beam: run `pip install '.[beam]'` in the checkout, or "
            "`pip install apache-beam`. Without it, bin/train --task=gsg reads the documents "
            "themselves."
        ) from None
    options = [f"--runner={values.runner}", "--default_sdk_harness_log_level=WARNING"]
    if values.runner == "DirectRunner":
        workers = usable_cores()
        options += [
            WITHOUT_PRISM,
            f"--direct_num_workers={workers}",
            "--direct_running_mode=multi_processing",
        ]
    try:
        options += shlex.split(values.beam_options)
    except ValueError as error:
        raise UserError(
            f"--beam_options={values.beam_options}: {error}. Write it as a shell would have it."
        ) from error
    with locked(output_dir, "prepare", "output_dir"):
        written = run(task.source, output_dir, values.shards, options)
    print(f"Wrote {len(written)} files to {output_dir}. Next: bin/train --prepared={output_dir} …")


def main():
    """Entry point."""
    app.run(define_flags, prepare, __doc__)
