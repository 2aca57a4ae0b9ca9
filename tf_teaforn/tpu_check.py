"""Memory and arithmetic of the train step on a TPU, from the TPU's own compiler."""

import dataclasses

import keras

from tf_teaforn.hlo import matmul_flops
from tf_teaforn.jax_backend.tpu import DoesNotFit
from tf_teaforn.models.catalog import build_model
from tf_teaforn.optimizers import build_optimizer
from tf_teaforn.teaforn import TeaForN

_ON_JAX = keras.backend.backend() == "jax"


def step_program(config, topology, batch_size):
    """`Program` of the train step on the longest sentences.

    Args:
        config: `RunConfig`.
        topology: `Topology`.
        batch_size: rows of a batch over all devices, a multiple of their number.

    Raises:
        UserError: a setting out of its range.
    """
    if _ON_JAX:
        return topology.lower(lambda: _model(config), _batch(config, batch_size))

    from tf_teaforn.tf_backend.hlo import train_step_hlo

    batch = _batch(config, batch_size // len(topology.devices))
    return topology.load(train_step_hlo(_model(config), batch))


def _model(config):
    overrides = {} if config.model.dropout is None else {"dropout": config.model.dropout}
    seq2seq = build_model(
        config.model.model, config.model.vocab_size, dtype=config.model.precision, **overrides
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
    return {"encoder_token_ids": source, "decoder_token_ids": target}, target, weights


def report(config, topology, batch_size, settings, compiled=True):
    """Compiles one train step after the other.

    Args:
        config, topology, batch_size: as `step_program` takes them.
        settings: list of dictionaries, the settings of the run that change from line to line.
        compiled: whether to compile, or to count the arithmetic only.

    Yields:
        Lines of a table; ratios are to its first line.
    """
    names = list(settings[0])
    columns = ("arguments", "temporaries", "program", "total", "ratio", "fits")
    yield "".join(
        [f"{name:>7}" for name in names]
        + [f"{column:>12}" for column in (columns if compiled else ())]
        + [f"{column:>12}" for column in ("TFLOP", "ratio")]
    )
    first_total = first_flops = None
    for changes in settings:
        program = step_program(config.replace(changes), topology, batch_size)
        flops = matmul_flops(program.text)
        if not _ON_JAX:
            flops *= len(topology.devices)
        first_flops = first_flops or flops
        line = "".join(f"{value:>7}" for value in changes.values())
        if compiled:
            try:
                memory = program.memory()
            except DoesNotFit as error:
                line += f"{f'needs {error}':>72}"
            else:
                first_total = first_total or memory.total
                sizes = (*memory, memory.total)
                line += "".join(f"{f'{size / 2**30:.2f} GiB':>12}" for size in sizes)
                line += f"{memory.total / first_total:>12.3f}"
                line += f"{'yes' if memory.total <= topology.memory else 'no':>12}"
        yield line + f"{flops / 1e12:>12.3f}{flops / first_flops:>12.3f}"
