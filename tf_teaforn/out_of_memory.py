"""What to lower, and to which value, when a step does not fit into a device's memory."""

import math
import re
from typing import NamedTuple

import keras
import numpy as np

from tf_teaforn.config import RunConfig

# Of a device's memory, what an estimate may fill.
_SAFE = 0.9
# What XLA's compiler for a TPU says of a whole program, and of its temporaries alone.
_SHORTAGES = (
    (True, re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm")),
    (False, re.compile(r"temporaries \(([\d.]+)([KMG])\) exceeds .*? HBM \(([\d.]+)([KMG])\)")),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class StepMemory(NamedTuple):
    """Bytes of a train step on each device.

    Attributes:
        weights: weights, and whatever else the model keeps.
        optimizer: its state.
        gradients: as many as trainable weights.
        activations: an estimate of all else that lives during the step; grows with the batch.
            None: not known.
        limit: what the device has. None: not known.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int | None
    limit: int | None


class Shortage(NamedTuple):
    """What the compiler for a TPU found of a program that does not fit.

    Attributes:
        needed: bytes.
        limit: bytes that there are.
        with_arguments: whether weights, optimizer and batch are counted, or temporaries alone.
    """

    needed: int
    limit: int
    with_arguments: bool

    def __str__(self):
        return f"{_size(self.needed)} of {_size(self.limit)}"


def shortage(reason: str) -> Shortage | None:
    """What the compiler's words say, or None where they are about something else."""
    for with_arguments, words in _SHORTAGES:
        if found := words.search(reason):
            needed, limit = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
            return Shortage(needed, limit, with_arguments)
    return None


def variable_bytes(variables):
    """Bytes of Keras variables."""
    return sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in variables)


def advice(config: RunConfig, step: int, reason: str, memory: StepMemory, replicas: int) -> str:
    """One line: what does not fit, what takes how much, what to write instead.

    Args:
        config: the run's.
        step: number of the step, from 1.
        reason: the runtime's own words. Where the compiler tells the need, that is believed.
        memory: at the config's batch, sentences of the maximum lengths.
        replicas: that share a batch.
    """
    names = keras.distribution.list_devices()
    # Beside the cores of a TPU there is its system.
    accelerators = [name for name in names if name.startswith(("gpu:", "tpu:"))]
    devices = len(accelerators or names)
    *_, activations, limit = memory
    fixed = memory.weights + memory.optimizer + memory.gradients
    if found := shortage(reason):
        # Gradients are temporaries.
        others = fixed if found.with_arguments else memory.gradients
        activations, limit = max(found.needed - others, 0), found.limit
    batch_tokens = config.data.batch_tokens
    tokens = min(config.teaforn.micro_batch_tokens or batch_tokens, batch_tokens)
    share = (_SAFE * limit - fixed) / activations if limit and activations else 0.5
    if share >= 1:
        # It did not fit, whatever the estimate says.
        share = 0.5
    line = (
        f"Step {step} does not fit into the device's memory ({reason}). Weights, optimizer and "
        f"gradients take {_size(fixed)}"
    )
    if activations:
        line += f", the activations of {tokens} tokens about {_size(activations)}"
    line += f", of {_size(limit)}. " if limit else ". "
    adafactor = (
        f"--optimizer=adafactor, which saves {_size(memory.optimizer)}"
        if config.training.optimizer == "adam"
        else ""
    )
    if share <= 0:
        smaller = "" if config.model.init_from else "a smaller --model"
        others = [adafactor, smaller, _mesh(devices, replicas)]
        if any(others):
            return f"{line}No batch fits beside them: write {_any_of(others)}."
        return f"{line}No batch fits beside them: take a device with more memory."
    remat = ""
    if config.teaforn.remat == "none":
        remat = "--remat=stage, which computes activations twice"
    lengths = {
        name: getattr(config.data, name) for name in ("max_source_length", "max_target_length")
    }
    row = max(lengths.values()) * replicas
    # A part has a row of each replica at least, however few tokens it may have.
    rows = max(tokens // row, 1)
    if rows * share >= 1:
        lower = max(_rounded(int(rows * row * share)), row)
        now = f"--micro_batch_tokens={lower}, the same update in parts"
        now += f", or {remat}" if remat else ""
        later = [f"--batch_tokens={lower}", adafactor]
    else:
        line += f"One row of {row // replicas} tokens on each device does not fit. "
        length = max(_rounded(int(row // replicas * rows * share)), 2)
        flags = [f"--{name}={length}" for name, value in lengths.items() if value > length]
        now = remat
        later = [" ".join([*flags, f"--micro_batch_tokens={length * replicas}"]), adafactor]
    restart = "with another --model_dir or before the first checkpoint"
    if not now:
        return f"{line}Write, {restart}, {_any_of(later)}."
    return f"{line}Write {now}; {restart} also {_any_of(later)}."


def _mesh(devices, replicas):
    """Splits the model into twice as many parts; "" where there are no devices for them."""
    parts = max(2 * devices // replicas, 2)
    if devices % parts:
        return ""
    batch = f"batch:{devices // parts}," if devices > parts else ""
    return f"KERAS_BACKEND=jax and --mesh={batch}model:{parts}"


def _any_of(words):
    *rest, last = [word for word in words if word]
    return f"{', '.join(rest)} or {last}" if rest else last


def _rounded(number):
    """Two digits and zeros."""
    unit = 10 ** max(len(str(number)) - 2, 0)
    return number // unit * unit


def _size(count):
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
