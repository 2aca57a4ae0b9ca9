"""TeaForN: Teacher-Forcing with N-grams (Goodman, Ding and Soricut, EMNLP 2020) for Keras."""

import importlib

# Names and where they live; imported when first asked for, so that a command's --help needs no
# TensorFlow, and the core none at all.
_EXPORTS = {
    "Decoder": "tf_teaforn.models.decoder",
    "Seq2Seq": "tf_teaforn.models.seq2seq",
    "TeaForN": "tf_teaforn.teaforn",
    "build_model": "tf_teaforn.models.catalog",
    "load": "tf_teaforn.inference",
    "model_names": "tf_teaforn.models.catalog",
}

__all__ = [*_EXPORTS]


def __getattr__(name):
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
