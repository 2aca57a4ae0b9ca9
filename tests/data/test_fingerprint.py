"""Fingerprints of functions: another for every change, the same in every process."""

import dataclasses
import functools
import hashlib
import inspect
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tf_teaforn.data.fingerprint import function_fingerprint


def _upper(source, target):
    return tf.strings.upper(source), target


def _cut(source, target, length=3, *, side="source"):
    return source, target


def _cutter(length):
    def cut(source, target):
        return tf.strings.substr(source, 0, length), target

    return cut


def _prefixed(prefix):
    return functools.partial(_cut, side=prefix)


def test_fingerprint_of_what_a_function_brings_along():
    with_defaults = [_cut, _clone(_cut, defaults=(4,)), _clone(_cut, keywords={"side": "target"})]
    makers = [(_cutter, 2), (_cutter, 3), (_prefixed, "a"), (_prefixed, "b")]
    found = [
        *map(function_fingerprint, with_defaults),
        *(function_fingerprint(make(arg)) for make, arg in makers),
    ]
    assert len({*found}) == 7
    # The same in another process, where it is another object.
    assert found[3:] == [function_fingerprint(make(arg)) for make, arg in makers]
    code = inspect.getsource(_upper).encode()
    assert function_fingerprint(_upper) == hashlib.sha256(code).hexdigest()[:16]
    assert function_fingerprint(None) == ""


def _clone(function, defaults=None, keywords=None):
    clone = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    clone.__defaults__ = defaults or function.__defaults__
    clone.__kwdefaults__ = keywords or function.__kwdefaults__
    return clone


def test_fingerprint_of_a_function_without_code_at_hand():
    def swap(code):
        namespace = {}
        exec(f"def swap(source, target):\n    return {code}", namespace)
        return function_fingerprint(namespace["swap"])

    codes = ["target, source", "source, source", "target, 'a'", "target, len(source)"]
    assert len({*map(swap, codes)}) == 4
    assert [*map(swap, codes)] == [*map(swap, codes)]


def _closed_over(value):
    return function_fingerprint(lambda source, target: (source, value))


@dataclasses.dataclass
class _Settings:
    table: np.ndarray


@pytest.mark.parametrize(
    "wrapped",
    [
        np.asarray,
        tf.constant,
        tf.Variable,
        lambda numbers: tf.constant(list(map(str, numbers))),
        lambda numbers: tf.RaggedTensor.from_row_splits(numbers, [0, 1_500, 3_000]),
        lambda numbers: np.array([*map(str, numbers), None], dtype=object),
        lambda numbers: [{"table": (np.asarray(numbers),)}],
        lambda numbers: types.MappingProxyType({"table": _Settings(np.asarray(numbers))}),
        lambda numbers: functools.partial(_cut, length=np.asarray(numbers)),
        lambda numbers: _cutter(np.asarray(numbers)),
        lambda numbers: tf.function(_cutter(np.asarray(numbers))),
        lambda numbers: dict(enumerate(numbers)).get,
        lambda numbers: re.compile("|".join(map(str, numbers))),
    ],
)
def test_fingerprint_of_what_its_repr_leaves_out(wrapped, caplog):
    numbers = np.arange(3_000)
    changed = np.where(numbers == 1_500, 0, numbers)
    first = _closed_over(wrapped(numbers))
    assert _closed_over(wrapped(changed)) != first
    assert _closed_over(wrapped(numbers.copy())) == first
    assert not caplog.records


def test_fingerprint_of_operations_and_of_a_variable_without_a_value(caplog):
    operations = [tf.strings.lower, tf.strings.upper, tf.strings.regex_replace, len, str.lower]
    found = [*map(_closed_over, operations)]
    assert len({*found}) == 5

    @tf.autograph.experimental.do_not_convert
    def preprocess(source, target):
        return unset, target

    found += [function_fingerprint(preprocess)]
    unset = 1
    found += [function_fingerprint(preprocess)]
    unset = 2
    found += [function_fingerprint(preprocess)]
    assert len({*found}) == 8
    assert not caplog.records


def test_fingerprint_of_arrays_of_the_same_bytes():
    zeros = [np.zeros(4, "int32"), np.zeros(4, "float32"), np.zeros((2, 2), "int32")]
    assert len({*map(_closed_over, [*zeros, bytes(16), [0] * 4, (0,) * 4, [[0, 0], [0, 0]]])}) == 7


_PREPROCESS = """
import functools

from tf_teaforn.data.fingerprint import function_fingerprint


class Table:
    rows = 3


def make():
    words, inner, table = {"a", "b", "c", "d", frozenset("efgh")}, functools.partial(len), Table()

    def lower(text):
        return upper(text) if text in words else inner(text)

    def upper(text):
        return lower(text)

    def preprocess(source, target):
        return lower(source), table

    return preprocess


print(function_fingerprint(make()), function_fingerprint(make()))
"""


def test_fingerprint_is_the_same_in_every_process(tmp_path):
    def run(seed, text=_PREPROCESS):
        (tmp_path / "preprocess.py").write_text(text)
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, tmp_path / "preprocess.py"]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        # Said once.
        assert done.stderr.count("\n") == 1
        assert done.stderr.endswith(
            "A __main__.Table that the task's preprocess brings along cannot be looked into: after "
            "a change inside it, delete the tokenised data: the folder cache in --model_dir, or "
            "--cache_dir.\n"
        )
        first, second = done.stdout.split()
        assert first == second
        return first

    first = run(1)
    assert run(2) == first
    changes = [("return lower(text)", "return text"), ("rows = 3", "rows = 4"), ('"d"', '"e"')]
    assert len({first, *(run(1, _PREPROCESS.replace(*change)) for change in changes)}) == 4
