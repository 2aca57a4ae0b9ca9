"""Trains a SentencePiece vocabulary on the training split of a task, both sides.

    bin/build_vocab --task=wmt14_enfr --vocab_size=32000 --output=vocab.model

bin/train does this by itself; a vocabulary made once can be given to many runs by --vocab.
"""

from absl import flags

from tf_teaforn.cli import app


def define_flags(values):
    """Flags of bin/build_vocab."""
    flags.DEFINE_string("task", None, "Whose training split to read.", flag_values=values)
    flags.DEFINE_integer(
        "vocab_size", None, "Number of subwords. Default: the task's.", flag_values=values
    )
    flags.DEFINE_string("output", None, "The .model file to write.", flag_values=values)
    app.define_task_flags(values)


def build_vocab(values):
    """Runs the command."""
    output = app.required(values, "output")
    options = {n: values[n].value for n in app.TASK_OPTIONS if values[n].value is not None}
    task = app.load_task(app.required(values, "task"), options, values)

    from tf_teaforn.training import build_vocabulary

    build_vocabulary(task.source, values.vocab_size or task.defaults["vocab_size"], output)
    print(f"Wrote {output}")


def main():
    """Entry point."""
    app.run(define_flags, build_vocab, __doc__)
