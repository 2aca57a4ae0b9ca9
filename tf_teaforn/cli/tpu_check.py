"""Compiles the train step for a TPU, without having one: memory and arithmetic.

    bin/tpu_check --task=gsg --model=pegasus_large --n=1,2,3 --remat=none,stage --batch_size=4 \\
        --output=tpu.jsonl
    KERAS_BACKEND=jax bin/tpu_check --task=wmt14_enfr --topology=v5e:2x2

The step is the one that bin/train runs with the same flags, under TensorFlow or JAX. That of
TensorFlow is of one device, without the exchange of gradients. Ratios are to the first line. Where
a step does not fit, the compiler has already tried to recompute what it could. A large step takes
minutes to compile: --output keeps each line as soon as it is there.
"""

import importlib.metadata
import importlib.util
import itertools
import json
import os

from absl import flags

from tf_teaforn.cli import app
from tf_teaforn.cli.evaluate import whole_numbers
from tf_teaforn.config import BOOKKEEPING, RunConfig
from tf_teaforn.errors import UserError

# Lists here.
_LISTS = ("n", "remat")
# Of a line of --output.
_KEYS = {"step", "measured"}
# Of models that exist: --model and --vocab_size say their sizes here, and all weights train.
_NOT_MEASURED = ("init_from", "freeze")
# Settings that no step's program depends on.
_OUTSIDE = BOOKKEEPING | {"eval_every", "eval_examples", "checkpoint_every", "decode_length"}
# Those that it depends on.
_PACKAGES = ("tensorflow", "tensorflow_cpu", "tensorflow-tpu", "jax", "libtpu", "keras")
# What libtpu asks the machine for, if it is not told, and JAX's own device.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
    # Memory is decided before instructions are ordered, which would take most of the time.
    "LIBTPU_INIT_ARGS": "--xla_jf_llo_level=0 --xla_jf_vliw_scheduler=false "
    "--xla_jf_critical_path_scheduler=false --xla_jf_xlu_optimizer=false",
}


def define_flags(values):
    """Flags of bin/tpu_check."""
    app.define_task_name(values, "Whose settings to take.")
    flags.DEFINE_list("n", [1, 2, 3], "Numbers N of stacked decoders.", flag_values=values)
    flags.DEFINE_list("remat", ["none"], "Values of bin/train's --remat.", flag_values=values)
    flags.DEFINE_string(
        "topology", "v5e:1x1", "TPU version and chips, such as v5e:2x2.", flag_values=values
    )
    flags.DEFINE_integer(
        "batch_size",
        None,
        "Sentence pairs in a batch over all chips. Default: as many of the maximum lengths as "
        "--batch_tokens holds.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "compile", True, "Compile, or count the arithmetic only, in seconds.", flag_values=values
    )
    flags.DEFINE_string(
        "output",
        None,
        "File that gets a line of JSON for each step. Steps that it has already are not compiled "
        "again.",
        flag_values=values,
    )
    app.define_settings(values, but=(*_LISTS, *_NOT_MEASURED))
    app.define_task_flags(values)


def check(values):
    """Runs the command."""
    name = app.required(values, "task")
    options = app.task_options(values)
    task = app.load_task(name, options, app.data_dir(values), values.module_import)
    config = app.run_config(values, task, options, but=(*_LISTS, *_NOT_MEASURED))
    counts = whole_numbers(values, "n")
    if not values.remat:
        raise UserError("--remat= is empty. Leave it out, or write e.g. none,layer.")
    lengths = config.data.max_source_length, config.data.max_target_length
    batch_size = values.batch_size
    if batch_size is None:
        batch_size = max(config.data.batch_tokens // max(lengths), 1)

    known = _known(values.output)

    _prepare_environment()

    from tf_teaforn.jax_backend import tpu

    topology = tpu.Topology(values.topology)
    if batch_size < 1 or batch_size % len(topology.devices):
        raise UserError(
            f"--batch_size={batch_size}: write a multiple of the {len(topology.devices)} devices "
            f"of {values.topology}."
        )

    from tf_teaforn.tpu_check import Table, measure

    print(
        f"{config.model.model}, {config.model.precision}, {config.training.optimizer}; "
        f"{values.topology}, {topology.memory / 2**30:.0f} GiB a device; batch {batch_size}, "
        f"S={lengths[0]}, T={lengths[1]}, V={config.model.vocab_size}"
    )
    table = Table(_LISTS, values.compile)
    print(table.head, flush=True)
    for remat, n in itertools.product(values.remat, counts):
        settings = {"n": n, "remat": remat}
        changed = config.replace(settings)
        step = {
            "settings": changed.flat(),
            "topology": values.topology,
            "batch_size": batch_size,
            "compile": values.compile,
            "compiler_flags": os.environ["LIBTPU_INIT_ARGS"],
            "versions": _versions(),
        }
        program = _program(step)
        measured = next((r["measured"] for r in known if _program(r["step"]) == program), None)
        if measured is None:
            measured = measure(changed, topology, batch_size, values.compile)
            if values.output:
                with open(values.output, "a") as file:
                    print(json.dumps({"step": step, "measured": measured}), file=file)
        print(table.line(settings, measured), flush=True)


def _program(step):
    """A step without the settings that its program does not depend on."""
    # A setting that an earlier version did not have had its default there.
    settings = {**RunConfig(task="").flat(), **step.get("settings", {})}
    settings = {name: value for name, value in settings.items() if name not in _OUTSIDE}
    return {**step, "settings": settings}


def _versions():
    import keras

    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in _PACKAGES if name in installed}
    return {"backend": keras.backend.backend(), **versions}


def _known(path):
    """What earlier runs wrote into their --output: a list of {"step": ..., "measured": ...}."""
    if not path:
        return []
    # What cannot be written is told before the compiler takes its minutes.
    with open(path, "a+", errors="replace") as file:
        file.seek(0)
        lines = file.readlines()
        records = [record for record in map(_record, lines) if record is not None]
        if not all(_KEYS <= record.keys() for record in records) or (lines and not records):
            raise UserError(
                f"--output={path} has other lines than bin/tpu_check writes. Name another file."
            )
        if lines and not lines[-1].endswith("\n"):
            print(file=file)
    return records


def _record(line):
    try:
        record = json.loads(line)
    except ValueError:
        # Torn when a process was killed.
        return None
    return record if isinstance(record, dict) else {}


def _prepare_environment():
    """Sets what libtpu and JAX read when they are first imported."""
    missing = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"The TPU's compiler needs {' and '.join(missing)}: "
            "pip install 'tf-teaforn[tpu_check]'."
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def main():
    """Entry point."""
    app.run(define_flags, check, __doc__, backends=("tensorflow", "jax"))
