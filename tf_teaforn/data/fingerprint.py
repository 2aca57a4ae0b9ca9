"""What tells one function of a user's from another, for the names of caches."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import re
import types
from collections.abc import Callable, Iterable, Mapping

_logger = logging.getLogger(__name__)


def function_fingerprint(function: Callable | None) -> str:
    """The start of a SHA-256 of a function's source and of all that it brings along; "" for None.

    It is the same in every process. What cannot be looked into counts by its type, with a warning.
    """
    if function is None:
        return ""
    return hashlib.sha256(_text(function).encode()).hexdigest()[:16]


def _text(value, within: tuple[int, ...] = ()) -> str:
    """A function with the values that it brings along, in the same words in every process.

    Args:
        value: the function, or such a value.
        within: identities of what the value is a part of.
    """
    if id(value) in within:
        # A function that calls itself, for one.
        return f"<{within.index(id(value))}>"
    parts = _parts(value)
    if parts is None:
        return _text_of_one(value)
    texts = [_text(part, (*within, id(value))) for part in parts]
    if isinstance(value, types.FunctionType):
        return "\n".join(texts)
    if isinstance(value, (set, frozenset)):
        # Their order is another in every process.
        texts.sort()
    return f"{_name(value)}({', '.join(texts)})"


def _parts(value) -> Iterable | None:
    """The values that say all of `value`; None where it has to speak for itself."""
    import numpy as np

    kind = type(value)
    if isinstance(value, types.FunctionType):
        module = value.__globals__.get("__name__", "")
        if hasattr(value, "__wrapped__") and module.startswith("tensorflow."):
            # TensorFlow's decorators bring along state of its own.
            return [value.__wrapped__]
        cells, defaults = value.__closure__ or (), value.__defaults__ or ()
        return [value.__code__, *cells, *defaults, *sorted((value.__kwdefaults__ or {}).items())]
    if isinstance(value, types.CellType):
        try:
            return [value.cell_contents]
        except ValueError:
            # Of a variable that has no value yet.
            return []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *sorted(value.keywords.items())]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.BuiltinMethodType):
        return [value.__name__, value.__self__]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(kind):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, re.Pattern):
        return [value.pattern, value.flags]
    if isinstance(value, np.ndarray):
        return [value.shape, value.tolist()] if value.dtype.hasobject else None
    # Tensors and variables, NumPy's scalars, arrays of other libraries.
    if hasattr(kind, "numpy"):
        return [value.numpy()]
    if hasattr(kind, "__array__"):
        return [np.asarray(value)]
    if hasattr(value, "__wrapped__") and callable(value):
        # What tf.function makes, for one.
        return [value.__wrapped__]
    return None


def _text_of_one(value) -> str:
    import numpy as np

    if isinstance(value, np.ndarray):
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return f"{value.dtype!r} {value.shape} {content}"
    if isinstance(value, (type, types.ModuleType, types.CodeType)):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            if isinstance(value, types.CodeType):
                return _text((value.co_code, value.co_names, value.co_consts))
    text = repr(value)
    if isinstance(value, (str, bytes)) or not re.search(" at 0x[0-9a-f]+", text):
        return text
    # An address, which is another in every process.
    _warn_of_unseen(_name(value))
    return f"{_name(value)} {_text(type(value))}"


def _name(value) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@functools.cache
def _warn_of_unseen(name: str):
    _logger.warning(
        "A %s that the task's preprocess brings along cannot be looked into: after a change inside "
        "it, delete the tokenised data: the folder cache in --model_dir, or --cache_dir.",
        name,
    )
