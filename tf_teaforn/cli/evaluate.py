"""Scores a trained model on a split of its task, or on a test set of sacreBLEU's.

    bin/evaluate --model_dir=runs/demo_enfr --split=test --beam_size=1,4
    bin/evaluate --model_dir=runs/ende --test_set=wmt14 --checkpoint=average:5 --beam_size=1,4

Writes <model_dir>/eval/<set>-<checkpoint>-beam<k>-alpha<a>.json, the hypotheses beside it as .txt
and the references as <set>.references.txt; --max_length, --min_length and --no_repeat_ngram, where
given, are part of the names: ...-alpha<a>-no_repeat_ngram3.json. What is there of the set with
other references moves to <model_dir>/eval/<set>-<start of their SHA-256>/ first.
"""

import functools
import sys

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.cli.decode import OUTPUT_FLAGS, define_output_flags
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/evaluate."""
    app.define_model_flags(values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    text("split", "test", "Split of the task's data.")
    text(
        "test_set",
        None,
        "Test set in place of a split, by sacreBLEU's name: wmt14 (English-German: the paper's "
        "2,737 lines), wmt14/full, wmt12, ...",
    )
    text("language_pair", None, "Of --test_set, e.g. en-de. Default: the task's, if it says so.")
    flags.DEFINE_list(
        "beam_size", None, "Beam widths, e.g. 1,4. Default: the run's.", flag_values=values
    )
    flags.DEFINE_float(
        "beam_alpha", None, "Length penalty exponent. Default: the run's.", flag_values=values
    )
    define_output_flags(values)
    app.define_batch_size(values)
    flags.DEFINE_list(
        "metrics",
        [],
        "Any of bleu, bleu_lc (lower-cased), chrf, ter, rouge, exact_match. Default: the task's, "
        "and chrf and ter besides bleu.",
        flag_values=values,
    )
    text(
        "compare",
        None,
        "File of another system's outputs on the same set, such as its eval/....txt: adds a paired "
        "bootstrap test of the difference.",
    )
    flags.DEFINE_boolean(
        "intervals", False, "Add 95% bootstrap intervals to all scores.", flag_values=values
    )
    app.define_task_flags(values)


def evaluate(values):
    """Runs the command."""
    if values["split"].present and values.test_set:
        raise UserError(
            f"--split={values.split} and --test_set={values.test_set} name two sets. Leave out one "
            "of them."
        )
    beam_sizes = whole_numbers(values, "beam_size")
    task = app.trained_task(values)

    from tf_teaforn.evaluation import Request, evaluate

    request = Request(
        split=values.split,
        checkpoint=values.checkpoint,
        beam_sizes=beam_sizes,
        alpha=values.beam_alpha,
        outputs={name: values[name].value for name in OUTPUT_FLAGS if values[name].present},
        batch_size=values.batch_size,
        test_set=values.test_set,
        language_pair=values.language_pair,
        metrics=values.metrics,
        compare=values.compare,
        intervals=values.intervals,
        command=sys.argv,
    )
    for result in evaluate(values.model_dir, task, request):
        given = "".join(f"{name} {result[name]} · " for name in request.outputs)
        print(
            f"{result['split']} · checkpoint {result['checkpoint']} · beam {result['beam_size']} · "
            f"alpha {result['beam_alpha']} · {given}{result['examples']} examples · "
            f"{result['seconds']:.1f} s"
        )
        for name, value in result["metrics"].items():
            print(f"  {name} {value:.2f}{_details(result, name)}")
        for name, signature in result["signature"].items():
            print(f"  {name}: {signature}")
        print(f"  references: sha256 {result['references_sha256']}")


def whole_numbers(values, name):
    """The list flag `name` as a list of int, none of them twice."""
    given = values[name].value or []
    if not values[name].present:
        return given
    try:
        if not given:
            raise ValueError
        numbers = [int(number) for number in given]
    except ValueError as error:
        raise UserError(f"--{name}={','.join(given)}: write whole numbers, e.g. 1,4.") from error
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--{name}={','.join(given)}: write each number once.")
    return numbers


def _details(result, name):
    details = ""
    if name in result.get("interval_95", {}):
        low, high = result["interval_95"][name]
        details += f"  95%: {low:.2f} to {high:.2f}"
    if "comparison" in result:
        test = result["comparison"][name]
        details += f"  against {test['baseline']:.2f}: p = {test['p_value']:.4f}, one-sided"
    return details


def main():
    """Entry point."""
    app.run(define_flags, evaluate, __doc__, backends=("tensorflow", "jax"))
