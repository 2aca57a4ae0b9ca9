"""Averages the weights of a run's last checkpoints.

    bin/average --model_dir=runs/ende --last=5

Writes <model_dir>/averages/average-<n>-<last step>/, whose name --checkpoint takes as it is. What
--checkpoint=average:<n> means may change as training goes on; this does not.
"""

from absl import flags

from tf_teaforn.cli import app


def define_flags(values):
    """Flags of bin/average."""
    flags.DEFINE_string("model_dir", None, "Folder of a trained model.", flag_values=values)
    flags.DEFINE_integer(
        "last",
        5,
        "Number of checkpoints. The paper: 5 (Transformer base), 20 (big).",
        lower_bound=1,
        flag_values=values,
    )


def average(values):
    """Runs the command."""
    from tf_teaforn.checkpoint import write_average

    model_dir = app.required(values, "model_dir")
    written = write_average(model_dir, values.last)
    print(
        f"Wrote {written.folders[0]}, the mean of steps {', '.join(map(str, written.steps))}. "
        f"Use it by --checkpoint={written.name}"
    )


def main():
    """Entry point."""
    app.run(define_flags, average, __doc__)
