"""Exports a trained model for TF Serving: Decoder-0 only, strings in, strings out.

    bin/export --model_dir=runs/demo --export_dir=exported

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
    flags.DEFINE_integer("n_best", 1, "Hypotheses for each input.", flag_values=values)
    flags.DEFINE_string("mode", "predict", "predict or score.", flag_values=values)


def export(values):
    """Runs the command."""
    if values.mode not in ("predict", "score"):
        raise UserError(f"--mode={values.mode}: write predict or score.")
    fields = {
        "beam_size": values.beam_size,
        "alpha": values.beam_alpha,
        "n_best": values.n_best,
    }

    from tf_teaforn.export import export

    folder = export(
        app.required(values, "model_dir"),
        app.required(values, "export_dir"),
        values.checkpoint,
        values.mode,
        **{name: value for name, value in fields.items() if value is not None},
    )
    print(f"Exported to {folder}")


def main():
    """Entry point."""
    app.run(define_flags, export, __doc__)
