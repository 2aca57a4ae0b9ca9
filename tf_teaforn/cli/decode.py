"""Translates or summarizes lines of text with a trained model.

    bin/decode --model_dir=runs/demo_enfr --input=in.txt --output=out.txt
    echo "Today is Sunday." | bin/decode --model_dir=runs/demo_enfr

Line i of the output belongs to line i of the input; <n> stands for a newline inside a text.
"""

import codecs
import sys

from absl import flags
from etils import epath

from tf_teaforn.cli import app
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/decode."""
    app.define_model_flags(values)

    def define(kind, name, default, help_text):
        kind(name, default, help_text, flag_values=values)

    string, integer, number = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    define(string, "input", "-", "Text file, a sentence a line; - is standard input.")
    define(string, "output", "-", "Where to write; - is standard output.")
    define(integer, "beam_size", None, "Beam width. Default: the run's.")
    define(number, "beam_alpha", None, "Length penalty exponent. Default: the run's.")
    define(integer, "n_best", 1, "Hypotheses a line, best first; as many lines of output.")
    define(
        flags.DEFINE_boolean,
        "scores",
        False,
        "Write `index ||| text ||| score penalised`: the input line's number from 0, the "
        "hypothesis, its natural-log probability, and that divided by the length penalty.",
    )
    define(number, "temperature", 0.0, "Above 0: sample, which needs a beam of 1.")
    define(integer, "sample_top_k", 0, "Sample from the k best tokens; 0: from all.")
    define(number, "sample_top_p", 1.0, "Sample from the best tokens of this total probability.")
    define(integer, "seed", 0, "Seed of sampling.")


def read_lines(path, flag="input"):
    r"""Lines of a file or, for "-", of standard input.

    As in training data, b"\n" alone ends a line; a carriage return before it and a byte order mark
    in front are dropped. `flag` is what names the file in errors.
    """
    name = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else epath.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--{flag}={path}: {error.strerror or error}.") from error
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            texts.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: byte {error.start + 1} is not UTF-8. Convert the text, "
                "with iconv for example."
            ) from error
    return texts


def search_flags(values):
    """Fields of `SearchConfig` from the flags given."""
    fields = {
        "beam_size": values.beam_size,
        "alpha": values.beam_alpha,
        "n_best": values.n_best,
        "temperature": values.temperature,
        "sample_top_k": values.sample_top_k,
        "sample_top_p": values.sample_top_p,
        "seed": values.seed,
    }
    if values.temperature > 0 and values.beam_size is None:
        fields["beam_size"] = 1
    return {name: value for name, value in fields.items() if value is not None}


def decode(values):
    """Runs the command."""
    model_dir = app.required(values, "model_dir")
    texts = read_lines(values.input)
    to_file = values.output != "-"
    if to_file and not epath.Path(values.output).parent.is_dir():
        raise UserError(f"--output={values.output}: there is no such folder. Make it first.")

    from tf_teaforn.inference import load

    translator = load(model_dir, values.checkpoint, **search_flags(values))
    lines = []
    for index, hypotheses in enumerate(translator.decode(texts, progress=to_file)):
        for text, score, penalized in hypotheses:
            text = text.replace("\n", "<n>")
            if values.scores:
                text = f"{index} ||| {text} ||| {score:.6f} {penalized:.6f}"
            lines.append(f"{text}\n")
    output = "".join(lines).encode()
    if to_file:
        epath.Path(values.output).write_bytes(output)
    else:
        sys.stdout.buffer.write(output)


def main():
    """Entry point."""
    app.run(define_flags, decode, __doc__, backends=("tensorflow", "jax"))
