"""Exports a trained model for TF Serving: Decoder-0 only, strings in, strings out.

    bin/export --model_dir=runs/demo_enfr --export_dir=exported

Writes <export_dir>/<version>/, a SavedModel that needs tensorflow and tensorflow_text alone.
"""

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.cli.decode import define_search_flags, given_search_flags
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/export."""
    app.define_model_flags(values)
    values["checkpoint"].help += " all: each of training's checkpoints, a version each."
    options = {"flag_values": values}
    flags.DEFINE_string("export_dir", None, "Folder of all versions.", **options)
    define_search_flags(values)
    flags.DEFINE_string("mode", "predict", "predict or score.", **options)
    flags.DEFINE_enum(
        "format",
        "saved_model",
        ["saved_model", "transformers"],
        "transformers: a folder that Hugging Face transformers loads, in --export_dir itself.",
        **options,
    )
    flags.DEFINE_integer(
        "static_batch",
        None,
        "With --static_length: adds the signatures static and static_token_ids, for so many inputs "
        "at a time, compiled by XLA for accelerators.",
        **options,
    )
    flags.DEFINE_integer(
        "static_length", None, "Their length in subwords, end of sentence included.", **options
    )
    flags.DEFINE_string(
        "weights_dtype", "float32", "How weights are stored: float32 or bfloat16.", **options
    )


def export(values):
    """Runs the command."""
    model_dir = app.required(values, "model_dir")
    export_dir = app.required(values, "export_dir")
    given = given_search_flags(values)
    if values.mode == "score" and given:
        flag, _ = next(iter(given.values()))
        raise UserError(f"--mode=score does not search: leave out --{flag}.")

    from tf_teaforn import export as exports

    settings = ("mode", "static_batch", "static_length", "weights_dtype")
    if values.format == "transformers":
        others = [name for name in settings if values[name].present]
        others += [flag for flag, _ in given.values()]
        if others or values.checkpoint == "all":
            flag = others[0] if others else "checkpoint=all"
            raise UserError(f"--format=transformers: leave out --{flag}.")
        folder = exports.export_transformers(model_dir, export_dir, values.checkpoint)
        print(f"Exported to {folder}")
        return
    fields = {name: values[name].value for name in settings}
    fields |= {field: value for field, (_, value) in given.items()}
    if values.checkpoint == "all":
        for step, folder in exports.export_all(model_dir, export_dir, **fields):
            print(f"Exported step {step} to {folder}")
        return
    folder = exports.export(model_dir, export_dir, values.checkpoint, **fields)
    print(f"Exported to {folder}")


def main():
    """Entry point."""
    app.run(define_flags, export, __doc__)
