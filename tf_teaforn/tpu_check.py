"""Memory and arithmetic of the train step on a TPU, from the TPU's own compiler."""

import dataclasses
import math
import time

import keras

from tf_teaforn.hlo import matmul_flops
from tf_teaforn.jax_backend.tpu import DoesNotFit
from tf_teaforn.models.catalog import build_model
from tf_teaforn.optimizers import build_optimizer
from tf_teaforn.teaforn import TeaForN

_ON_JAX = keras.backend.backend() == "jax"
_SIZES = ("arguments", "temporaries", "total", "program")


def step_program(config, topology, batch_size):
    """`Program` of the train step on the longest rows.

    Args:
        config: `RunConfig`.
        topology: `Topology`.
        batch_size: rows of a batch over all devices, a multiple of their number.

    Raises:
        UserError: a setting out of its range.
    """
    skip = config.training.on_nonfinite == "skip"
    if _ON_JAX:
        return topology.lower(lambda: _model(config), _batch(config, batch_size), skip)

    from tf_teaforn.tf_backend.hlo import train_step_hlo

    # One device, with its share.
    devices = len(topology.devices)
    if config.teaforn.micro_batch_tokens is not None:
        share = max(config.teaforn.micro_batch_tokens // devices, 1)
        config = config.replace({"micro_batch_tokens": share})
    batch = _batch(config, batch_size // devices)
    return topology.load(train_step_hlo(_model(config), batch, skip))


def _model(config):
    settings = config.model
    seq2seq = build_model(
        settings.model, settings.vocab_size, dtype=settings.precision, dropout=settings.dropout
    )
    model = TeaForN(seq2seq, **dataclasses.asdict(config.teaforn))
    model.compile(optimizer=build_optimizer(config.training))
    model.optimizer.build(model.trainable_variables)
    return model


def _batch(config, rows):
    source, target = (
        keras.KerasTensor((rows, length), dtype="int32")
        for length in (config.data.max_source_length, config.data.max_target_length)
    )
    weights = keras.KerasTensor(target.shape, dtype="float32")
    inputs = {"encoder_token_ids": source, "decoder_token_ids": target}
    if config.data.batching == "pack":
        for name in ("segment_ids", "positions"):
            inputs |= {f"encoder_{name}": source, f"decoder_{name}": target}
    return inputs, target, weights


def measure(config, topology, batch_size, compiled=True):
    """What one train step takes.

    Args:
        config, topology, batch_size: as `step_program` takes them.
        compiled: whether to compile, or to count the arithmetic only.

    Returns:
        Dictionary: "flops" of all devices; if compiled also "seconds" of the compiler and either
        bytes on a device, "arguments", "temporaries", their "total" and "program", or "needs",
        what the compiler says of a step that does not fit.
    """
    program = step_program(config, topology, batch_size)
    measured = {"flops": matmul_flops(program.text) * (1 if _ON_JAX else len(topology.devices))}
    if compiled:
        start = time.monotonic()
        try:
            memory = program.memory()
        except DoesNotFit as error:
            measured["needs"] = str(error)
        else:
            measured.update({name: getattr(memory, name) for name in _SIZES})
        measured["seconds"] = time.monotonic() - start
    return measured


class Table:
    """Lines of text about what `measure` returned; ratios are to the first, if it fits.

    Args:
        names: of the settings that change from line to line.
        compiled: as `measure` takes it.
    """

    def __init__(self, names, compiled=True):
        columns = (*_SIZES, "ratio", "fits", "seconds") if compiled else ()
        self.head = "".join(
            [f"{name:>7}" for name in names]
            + [f"{column:>12}" for column in (*columns, "TFLOP", "ratio")]
        )
        self._compiled = compiled
        self._first = None

    def line(self, settings, measured):
        """The line of one step."""
        text = "".join(f"{value:>7}" for value in settings.values())
        self._first = self._first or measured
        if self._compiled:
            if "needs" in measured:
                text += f"{'no, needs ' + measured['needs']:>72}"
            else:
                total, first = measured["total"], self._first.get("total")
                text += "".join(f"{f'{measured[name] / 2**30:.3f} GiB':>12}" for name in _SIZES)
                text += f"{total / first if first else math.nan:>12.3f}"
                # The compiler refuses what does not.
                text += f"{'yes':>12}"
            text += f"{measured['seconds']:>12.0f}"
        flops = measured["flops"]
        return text + f"{flops / 1e12:>12.3f}{flops / self._first['flops']:>12.3f}"
