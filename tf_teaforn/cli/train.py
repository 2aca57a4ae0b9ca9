"""Trains a model with TeaForN.

    bin/train --task=demo_enfr --n=2 --model_dir=runs/demo_enfr
    bin/train --task=wmt14_enfr --n=2 --model_dir=gs://bucket/run --strategy=tpu --batching=pack
    bin/train --task=text --train_files=train.tsv --valid_files=valid.tsv --model_dir=runs/mine

Only --task and --model_dir are needed: each task has defaults of its own for the rest, which
--task=NAME --help lists. The same command, given again, continues where the run stopped, also
after SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C: they end the step in progress and save
(exit codes 143, 129 and 130). Exit code 75: another worker of the run is gone; start all of them
again.
"""

import contextlib
import dataclasses
import os
import sys

from absl import flags
from etils import epath

from tf_teaforn.cli import app
from tf_teaforn.cli.malloc import keep_freed_memory
from tf_teaforn.errors import UserError, did_you_mean


def define_flags(values):
    """Flags of bin/train."""
    app.define_task_name(values, "What to train on.")
    flags.DEFINE_string(
        "model_dir", None, "Folder for everything the run writes.", flag_values=values
    )
    app.define_settings(values)
    flags.DEFINE_string(
        "vocab", None, "SentencePiece .model file to use; default: train one.", flag_values=values
    )
    flags.DEFINE_string(
        "strategy",
        "auto",
        "Devices: one, mirrored (all local GPUs), multi_worker (the processes that TF_CONFIG "
        "lists), tpu, or auto: what there is.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "tpu", "local", "Which TPU to train on: local, that of this machine.", flag_values=values
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "With KERAS_BACKEND=jax: parts that batch and model are split into, as batch:4,model:2.",
        flag_values=values,
    )
    app.define_task_flags(values)


def train(values):
    """Runs the command."""
    name = app.required(values, "task")
    model_dir = app.required(values, "model_dir")
    options = app.task_options(values)
    task = app.load_task(name, options, app.data_dir(values), values.module_import)
    config = app.run_config(values, task, options)

    keep_freed_memory()
    # Several workers have to find each other before TensorFlow does anything else.
    strategy = make_strategy(values)

    from tf_teaforn.lock import locked
    from tf_teaforn.model_dir import check_names
    from tf_teaforn.training import Run, Workers

    check_names(model_dir)
    check_clone_init(config, model_dir, values)
    if config.model.init_from:
        config = with_pretrained(config, model_dir, values)
    else:
        config = with_vocabulary(config, task, model_dir, values)
    check(config, task)
    with locked(model_dir) if Workers(strategy).chief else contextlib.nullcontext():
        run = Run(config, task, model_dir, strategy, values.vocab, command=sys.argv)
        best = run.run()
    if not run.workers.chief:
        return
    if best is None:
        raise UserError(
            f"--train_steps={config.training.train_steps}: the run is at step {run.step} already "
            "and has no score yet. Raise it."
        )
    imported = f" --module_import={values.module_import}" if values.module_import else ""
    print(
        f"Best {task.headline_metric} on the validation split, greedy: {best:.2f} at step "
        f"{run.state['best_step']}. Next: bin/evaluate --model_dir={model_dir}{imported}"
    )


def make_strategy(values):
    """The devices that --strategy, --tpu and --mesh name, for Keras' backend."""
    if os.environ["KERAS_BACKEND"] == "jax":
        if values["tpu"].present:
            raise UserError(
                f"--tpu={values.tpu} has no effect with KERAS_BACKEND=jax, which takes the TPU of "
                "this machine. Leave it out."
            )
        from tf_teaforn.jax_backend import strategy

        return strategy.make_strategy(values.strategy, values.mesh)
    if values.mesh is not None:
        raise UserError(f"--mesh={values.mesh} needs JAX: set KERAS_BACKEND=jax.")
    # Whoever names a TPU wants one.
    asked = values["tpu"].present
    if asked and values.strategy not in ("auto", "tpu"):
        raise UserError(
            f"--tpu={values.tpu} belongs to --strategy=tpu, not to --strategy={values.strategy}. "
            "Leave it out, or write --strategy=tpu."
        )
    from tf_teaforn.tf_backend import strategy

    return strategy.make_strategy("tpu" if asked else values.strategy, values.tpu)


def check_clone_init(config, model_dir, values):
    """Refuses --clone_init in a new run whose decoders are one.

    Raises:
        UserError: it has no effect.
    """
    from tf_teaforn.model_dir import CONFIG

    # A run that was begun with it is continued with it.
    begun = (epath.Path(model_dir) / CONFIG).exists()
    if values["clone_init"].present and config.teaforn.shared and not begun:
        raise UserError(
            f"--clone_init={values.clone_init} has no effect where all decoders share their "
            "weights. Leave it out, or add --noshared."
        )


def with_vocabulary(config, task, model_dir, values):
    """`config` with the vocabulary size of a ready vocabulary, if there is one.

    Args:
        config: `RunConfig`.
        task: the `Task` it names.
        model_dir: may hold a vocabulary.
        values: the flags, of which --vocab names one.

    Raises:
        UserError: no such file, not a vocabulary, or another one than asked for.
    """
    from tf_teaforn.data.tokenizer import VOCABULARY_FILE, Tokenizer
    from tf_teaforn.model_dir import CONFIG, has_other_vocabulary

    path, size_given = values.vocab, values["vocab_size"].present
    kept = epath.Path(model_dir) / VOCABULARY_FILE
    ready = Tokenizer.load(path) if path else None
    if kept.exists() and not has_other_vocabulary(model_dir, config, task):
        found = Tokenizer.load(kept)
        if ready and ready.fingerprint != found.fingerprint:
            raise UserError(
                f"--vocab={path} differs from {kept}, which this run has used so far. Leave it "
                "out, or take another --model_dir."
            )
        # A size that differs from that of a run which exists is among its other differences.
        if not size_given or not (epath.Path(model_dir) / CONFIG).exists():
            ready, path = found, kept
    if ready is None:
        return config
    if size_given and config.model.vocab_size != ready.vocabulary_size:
        raise UserError(
            f"--vocab_size={config.model.vocab_size}, but {path} has {ready.vocabulary_size} "
            "subwords. Leave out one of the two."
        )
    return config.replace({"vocab_size": ready.vocabulary_size})


def with_pretrained(config, model_dir, values):
    """`config` with the architecture and vocabulary size of what --init_from names.

    Args:
        config: `RunConfig`.
        model_dir: a run found there has them already.
        values: flags; --model, --vocab_size and --vocab may repeat what is so, nothing else.

    Raises:
        UserError: there is nothing to start from, or a flag says otherwise.
    """
    from tf_teaforn.data.tokenizer import Tokenizer
    from tf_teaforn.data.tokenizers import load_tokenizer
    from tf_teaforn.model_dir import CONFIG, read_config
    from tf_teaforn.pretrained.importers import open_folder

    folder = config.model.init_from
    earlier = read_config(model_dir).model if (epath.Path(model_dir) / CONFIG).exists() else None
    if earlier and earlier.init_from == folder:
        name, tokenizer = earlier.model, load_tokenizer(model_dir)
    else:
        pretrained = open_folder(folder)
        name, tokenizer = pretrained.model, pretrained.tokenizer
    found = {"model": name, "vocab_size": tokenizer.vocabulary_size}
    for flag, value in found.items():
        if values[flag].present and values[flag].value != value:
            raise UserError(
                f"--{flag}={values[flag].value}, but --init_from={folder} has {value}. Leave it "
                "out: the folder decides."
            )
    if values.vocab and Tokenizer.load(values.vocab).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"--vocab={values.vocab} is not the vocabulary of --init_from={folder}. Leave it out."
        )
    return config.replace(found)


def check(config, task):
    """Finds what cannot work before anything expensive starts.

    Raises:
        UserError: settings out of range, an unknown model, files that are missing or malformed.
    """
    from tf_teaforn import optimizers
    from tf_teaforn.models.catalog import model_names
    from tf_teaforn.teaforn import check_settings

    name = config.model.model
    if not config.model.init_from and name not in model_names():
        raise UserError(
            f"Unknown --model={name}.{did_you_mean(name, model_names())} Write one of: "
            f"{', '.join(model_names())}."
        )
    if config.training.export_on_best and os.environ["KERAS_BACKEND"] == "jax":
        raise UserError(
            "--export_on_best writes SavedModels, which KERAS_BACKEND=jax cannot: leave it out and "
            "run bin/export afterwards without KERAS_BACKEND."
        )
    check_settings(dataclasses.asdict(config.teaforn), config.model.vocab_size)
    optimizers.check_settings(config.training)
    for split in task.source.splits:
        task.source.fingerprint(split)
    # The test split too: it is scored when all is trained.
    for split in dict.fromkeys(("validation", "train", *task.source.splits)):
        task.source.dataset(split)


def main():
    """Entry point."""
    app.run(define_flags, train, __doc__, backends=("tensorflow", "jax"))
