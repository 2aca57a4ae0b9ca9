"""Scores a trained model on a split of its task: BLEU or ROUGE, with signatures.

    bin/evaluate --model_dir=runs/demo_enfr --split=test --beam_size=1,4

Writes <model_dir>/eval/<split>-<checkpoint>-beam<k>-alpha<a>.json and the hypotheses beside it.
"""

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/evaluate."""
    app.define_model_flags(values)
    flags.DEFINE_string("split", "test", "Split of the task's data.", flag_values=values)
    flags.DEFINE_list(
        "beam_size", None, "Beam widths, e.g. 1,4. Default: the run's.", flag_values=values
    )
    flags.DEFINE_float(
        "beam_alpha", None, "Length penalty exponent. Default: the run's.", flag_values=values
    )
    app.define_task_flags(values)


def evaluate(values):
    """Runs the command."""
    try:
        beam_sizes = [int(size) for size in values.beam_size or []]
    except ValueError as error:
        raise UserError(
            f"--beam_size={','.join(values.beam_size)}: write whole numbers, e.g. 1,4."
        ) from error
    task = app.trained_task(values)

    from tf_teaforn.evaluation import evaluate

    results = evaluate(
        values.model_dir, task, values.split, values.checkpoint, beam_sizes, values.beam_alpha
    )
    for result in results:
        print(
            f"{result['split']} · checkpoint {result['checkpoint']} · beam {result['beam_size']} · "
            f"alpha {result['beam_alpha']} · {result['examples']} examples · "
            f"{result['seconds']:.1f} s"
        )
        for name, value in result["metrics"].items():
            print(f"  {name} {value:.2f}")
        for name, signature in result["signature"].items():
            print(f"  {name}: {signature}")


def main():
    """Entry point."""
    app.run(define_flags, evaluate, __doc__)
