"""Exports a trained model for TF Serving: Decoder-0 only, strings in, strings out.

    bin/export --model_dir=runs/demo_enfr --export_dir=exported

Writes <export_dir>/<version>/, a SavedModel that needs tensorflow and tensorflow_text alone.
"""

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/export."""
    app.define_model_flags(values)
    flags.DEFINE_string("export_dir", None, "Folder of all versions.", flag_values=values)
    flags.DEFINE_integer("beam_size", None, "Beam width. Default: the run's.", flag_values=values)
    flags.DEFINE_float("beam_alpha", None, "Length penalty exponent.", flag_values=values)
    flags.DEFINE_integer(
        "n_best", None, "Hypotheses for each input. Default: 1.", flag_values=values
    )
    flags.DEFINE_string("mode", "predict", "predict or score.", flag_values=values)


def export(values):
    """Runs the command."""
    model_dir = app.required(values, "model_dir")
    export_dir = app.required(values, "export_dir")
    flag_of = {"beam_size": "beam_size", "alpha": "beam_alpha", "n_best": "n_best"}
    fields = {
        field: values[flag].value
        for field, flag in flag_of.items()
        if values[flag].value is not None
    }
    if values.mode == "score" and fields:
        flag = flag_of[next(iter(fields))]
        raise UserError(f"--mode=score does not search: leave out --{flag}.")

    from tf_teaforn.export import export

    folder = export(model_dir, export_dir, values.checkpoint, values.mode, **fields)
    print(f"Exported to {folder}")


def main():
    """Entry point."""
    app.run(define_flags, export, __doc__)
