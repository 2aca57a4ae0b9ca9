"""Translates or summarizes lines of text with a trained model.

    bin/decode --model_dir=runs/demo_enfr --input=in.txt --output=out.txt
    echo "Today is Sunday." | bin/decode --model_dir=runs/demo_enfr

Line i of the output belongs to line i of the input; <n> stands for a newline inside a text. On a
terminal, type a sentence and get its translation; Ctrl-D ends.
"""

import gzip
import sys

from absl import flags
from etils import epath

from tf_teaforn.cli import app
from tf_teaforn.data import sources
from tf_teaforn.errors import UserError
from tf_teaforn.paths import is_remote, write_whole
from tf_teaforn.texts import cut_warning


def define_flags(values):
    """Flags of bin/decode."""
    app.define_model_flags(values)

    define_search_flags(values)
    app.define_batch_size(values)

    def define(kind, name, default, help_text):
        kind(name, default, help_text, flag_values=values)

    string, number = flags.DEFINE_string, flags.DEFINE_float
    define(string, "input", "-", "Text file, a sentence a line, .gz or not; - is standard input.")
    define(string, "output", "-", "Where to write, .gz or not; - is standard output.")
    define(
        flags.DEFINE_boolean,
        "scores",
        False,
        "Write `index ||| text ||| score penalised`: the input line's number from 0, the "
        "hypothesis, its natural-log probability, and that divided by the length penalty.",
    )
    define(number, "temperature", 0.0, "Above 0: sample, which needs a beam of 1.")
    define(flags.DEFINE_integer, "sample_top_k", 0, "Sample from the k best tokens; 0: from all.")
    define(number, "sample_top_p", 1.0, "Sample from the best tokens of this total probability.")
    define(flags.DEFINE_integer, "seed", 0, "Seed of sampling.")


# What outputs may be: flags that are fields of `SearchConfig` too.
OUTPUT_FLAGS = ("max_length", "min_length", "no_repeat_ngram")
# Flag -> field of `SearchConfig`.
_SEARCH_FLAGS = {
    "beam_size": "beam_size",
    "beam_alpha": "alpha",
    "n_best": "n_best",
    **dict(zip(OUTPUT_FLAGS, OUTPUT_FLAGS, strict=True)),
}


def _integer(values, name, help_text):
    flags.DEFINE_integer(name, None, help_text, flag_values=values)


def define_search_flags(values):
    """Flags of a search without sampling."""
    _integer(values, "beam_size", "Beam width; 1 is greedy. Default: the run's.")
    flags.DEFINE_float(
        "beam_alpha", None, "Length penalty exponent. Default: the run's.", flag_values=values
    )
    _integer(values, "n_best", "Hypotheses for each input, best first. Default: 1.")
    define_output_flags(values)


def define_output_flags(values):
    """Flags of what the outputs of a search may be."""
    _integer(values, "max_length", "Longest output in subwords. Default: the run's.")
    _integer(values, "min_length", "Shortest output in subwords. Default: 0.")
    _integer(
        values, "no_repeat_ngram", "No n-gram of this length comes twice. Default: 0, all may."
    )


def given_search_flags(values):
    """{field of `SearchConfig`: (flag, value)} of the search flags given."""
    return {
        field: (flag, values[flag].value)
        for flag, field in _SEARCH_FLAGS.items()
        if values[flag].value is not None
    }


def read_lines(path):
    """Lines of a file or, for "-", of standard input, as training data has them."""
    name = "standard input" if path == "-" else path
    lines = sources.lines_of(sys.stdin.buffer) if path == "-" else sources.read_file(path)
    return [
        sources.check_line(line, f"{name}:{number}").decode()
        for number, line in enumerate(lines, start=1)
    ]


def search_flags(values):
    """Fields of `SearchConfig` from the flags given.

    Raises:
        UserError: a seed for a search that draws nothing.
    """
    if values["seed"].present and values.temperature == 0:
        raise UserError(
            f"--seed={values.seed} has no effect at --temperature=0, which draws nothing. Leave it "
            "out, or write --temperature=1 to sample."
        )
    fields = {
        "temperature": values.temperature,
        "sample_top_k": values.sample_top_k,
        "sample_top_p": values.sample_top_p,
        "seed": values.seed,
        **{field: value for field, (_, value) in given_search_flags(values).items()},
    }
    if values.temperature > 0:
        fields.setdefault("beam_size", 1)
    return fields


def decode(values):
    """Runs the command."""
    model_dir = app.required(values, "model_dir")
    to_file = values.output != "-"
    interactive = values.input == "-" and sys.stdin.isatty() and not to_file
    texts = None if interactive else read_lines(values.input)
    if to_file:
        # Object stores have no folders.
        if not (is_remote(values.output) or epath.Path(values.output).parent.is_dir()):
            raise UserError(f"--output={values.output}: there is no such folder. Make it first.")
        app.check_output(values.output)

    from tf_teaforn.inference import load

    translator = load(model_dir, values.checkpoint, **search_flags(values))
    translator.batch_size = values.batch_size
    if interactive:
        _converse(translator, values.scores)
        return
    found = translator.decode(texts, progress=to_file or not sys.stdout.isatty())
    output = "".join(_lines(found, values.scores)).encode()
    if to_file:
        packed = values.output.endswith(".gz")
        write_whole(values.output, gzip.compress(output, mtime=0) if packed else output)
    else:
        sys.stdout.buffer.write(output)
    warn_of_cuts(translator.cut_sources, len(texts), translator.max_source_length)
    if to_file:
        print(f"Wrote {output.count(10)} lines to {values.output}.", file=sys.stderr)


def warn_of_cuts(count, lines, max_length, what="source"):
    """Says on standard error how many lines were too long, if any."""
    if warning := cut_warning(count, lines, max_length, what):
        print(f"Warning: {warning}", file=sys.stderr)


def _lines(found, scores, first=0):
    """Lines of output for n-best lists of the inputs from number `first` on."""
    for index, hypotheses in enumerate(found, start=first):
        for text, score, penalized in hypotheses:
            text = text.replace("\n", "<n>")
            if scores:
                text = f"{index} ||| {text} ||| {score:.6f} {penalized:.6f}"
            yield f"{text}\n"


def _converse(translator, scores):
    """Answers line by line on a terminal until its end of file."""
    number = 0
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            print(file=sys.stderr)
            return
        try:
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            text = sources.check_line(line, f"standard input:{number + 1}").decode()
        except UserError as error:
            print(error, file=sys.stderr)
            continue
        translator.cut_sources = 0
        # UTF-8, whatever the terminal's encoding.
        sys.stdout.buffer.write("".join(_lines(translator.decode([text]), scores, number)).encode())
        sys.stdout.buffer.flush()
        warn_of_cuts(translator.cut_sources, 1, translator.max_source_length)
        number += 1


def main():
    """Entry point."""
    app.run(define_flags, decode, __doc__, backends=("tensorflow", "jax"))
