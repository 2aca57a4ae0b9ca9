"""A `Seq2Seq`'s architecture as JSON, for models that have no name in the catalog."""

import json

import keras

from tf_teaforn.errors import UserError
from tf_teaforn.models import hub, rnn, transformer  # noqa: F401 (register their layers)
from tf_teaforn.models.seq2seq import Seq2Seq

# Importing a module runs its code, so a file may name these and registered classes alone.
_TRUSTED = ("keras", "keras_hub", "keras_nlp", "tf_teaforn")


def architecture_json(seq2seq):
    """Text from which `build_architecture` makes the same model with random weights."""
    return json.dumps(keras.saving.serialize_keras_object(seq2seq), indent=1) + "\n"


def build_architecture(text, origin, dtype=None, dropout=None):
    """Builds a `Seq2Seq` with random weights.

    Args:
        text: of `architecture_json`.
        origin: names the file in errors.
        dtype: Keras policy such as "mixed_bfloat16", instead of the one in the text.
        dropout: see `with_dropout`.

    Raises:
        UserError: not such a text, or it names code that does not belong to a model.
    """
    try:
        content = json.loads(text)
        _check_trusted(content)
        content = _changed(content, dtype, dropout)
        seq2seq = keras.saving.deserialize_keras_object(content, safe_mode=True)
        if not isinstance(seq2seq, Seq2Seq):
            raise ValueError("it describes another kind of object")
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ImportError,
        RecursionError,
    ) as error:
        raise UserError(f"{origin} does not describe a model of tf_teaforn: {error}") from error
    return seq2seq


def with_dropout(settings, dropout):
    """`settings` of a layer with another dropout rate, None for its own.

    `dropout` replaces the rate of that name and, of the others, those above 0: a model without
    attention dropout does not get it.
    """
    if dropout is None:
        return dict(settings)
    rates = {
        name: dropout
        for name, value in settings.items()
        if name == "dropout" or (name.endswith("_dropout") and value)
    }
    return {**settings, **rates}


def _check_trusted(content):
    if isinstance(content, list):
        for item in content:
            _check_trusted(item)
    if not isinstance(content, dict):
        return
    if "class_name" in content:
        module, registered = content.get("module"), content.get("registered_name")
        known = registered and keras.saving.get_registered_object(registered)
        if not known and (module or "").split(".")[0] not in (*_TRUSTED, "builtins"):
            raise ValueError(f"{content['class_name']!r} of module {module!r} is not trusted")
        if module == "builtins" and content["class_name"] == "function":
            raise ValueError("it holds a function")
    for item in content.values():
        _check_trusted(item)


def _changed(content, dtype, dropout):
    if isinstance(content, list):
        return [_changed(item, dtype, dropout) for item in content]
    if not isinstance(content, dict):
        return content
    content = {
        name: dtype if name == "dtype" and dtype else _changed(value, dtype, dropout)
        for name, value in content.items()
    }
    return with_dropout(content, dropout)
