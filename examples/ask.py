"""Asks an exported model: python examples/ask.py EXPORT_DIR "a sentence" ["another" ...]

Needs tensorflow and tensorflow_text only, as every program that loads an export does.
"""

import os
import sys
from pathlib import Path

# TensorFlow's notes on the machine would bury the answer.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf  # noqa: E402
import tensorflow_text  # noqa: E402, F401  registers the tokenizer's operators


def main(export_dir: str, *sentences: str):
    newest = max((path for path in Path(export_dir).iterdir() if path.name.isdigit()), key=_version)
    answer = tf.saved_model.load(str(newest)).signatures["serving_default"]
    outputs = answer(inputs=tf.constant(sentences))["outputs"].numpy()
    # With --n_best=4 of bin/export there are four for each sentence, else one.
    for sentence, best in zip(sentences, outputs.reshape(len(sentences), -1), strict=True):
        print(sentence)
        for output in best:
            print(f"  -> {output.decode()}")


def _version(path: Path) -> int:
    return int(path.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
