"""Translates or summarizes lines of text with a trained model.

    bin/decode --model_dir=runs/demo --input=in.txt --output=out.txt
    echo "the sixth of March" | bin/decode --model_dir=runs/demo

Line i of the output belongs to line i of the input. A newline inside an output is written <n>.
"""

import sys

from absl import flags
from etils import epath

from tf_teaforn.cli import app
from tf_teaforn.errors import UserError


def define_flags(values):
    """Flags of bin/decode."""
    app.define_model_flags(values)
    string, integer = flags.DEFINE_string, flags.DEFINE_integer
    string("input", "-", "Text file, a sentence a line; - is standard input.", flag_values=values)
    string("output", "-", "Where to write; - is standard output.", flag_values=values)
    integer("beam_size", None, "Beam width. Default: the run's.", flag_values=values)
    flags.DEFINE_float("beam_alpha", None, "Length penalty exponent.", flag_values=values)
    integer("n_best", 1, "Hypotheses a line.", flag_values=values)
    flags.DEFINE_boolean("scores", False, "Write index ||| text ||| score.", flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "Above 0: sample, beam 1.", flag_values=values)
    integer("sample_top_k", 0, "Sample from the k best tokens; 0: all.", flag_values=values)
    flags.DEFINE_float("sample_top_p", 1.0, "Sample from the top-p nucleus.", flag_values=values)
    integer("seed", 0, "Seed of sampling.", flag_values=values)


def read_lines(path):
    """Lines of a file or, for "-", of standard input; newlines alone separate them."""
    name = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else epath.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--input={path}: {error.strerror or error}.") from error
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            texts.append(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{name}, line {number}: not UTF-8 ({error.reason}).") from error
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
    return {name: value for name, value in fields.items() if value is not None}


def decode(values):
    """Runs the command."""
    texts = read_lines(values.input)

    from tf_teaforn.inference import load

    translator = load(
        app.required(values, "model_dir"), values.checkpoint, **search_flags(values)
    )
    results = translator.decode(texts, progress=values.output != "-")
    lines = []
    for index, hypotheses in enumerate(results):
        for text, score, penalized in hypotheses:
            text = text.replace("\n", "<n>")
            if values.scores:
                text = f"{index} ||| {text} ||| {score:.6f} {penalized:.6f}"
            lines.append(f"{text}\n")
    output = "".join(lines)
    if values.output == "-":
        sys.stdout.write(output)
    else:
        epath.Path(values.output).write_text(output)


def main():
    """Entry point."""
    app.run(define_flags, decode, __doc__)
