"""What all commands share: flags from settings, one-line errors, help."""

import dataclasses
import functools
import importlib
import logging
import os
import sys
import textwrap

from absl import flags

from tf_teaforn import config as settings_module
from tf_teaforn.errors import UserError

_DEFINE = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def define_settings(values):
    """A flag for every field of the run's settings; unset means the task's default."""
    for field in settings_module.settings():
        kind = settings_module.field_type(field)
        help_text = field.metadata["help"]
        choices = field.metadata["choices"]
        if choices:
            help_text += f" One of {', '.join(choices)}."
        if field.default is not None:
            help_text += f" Default: {field.default}, unless the task has its own."
        _DEFINE[kind](field.name, None, help_text, flag_values=values)


def define_task_flags(values):
    """Flags that say where data and tasks come from."""
    define = functools.partial(flags.DEFINE_string, flag_values=values)
    define("data_dir", None, "Where TensorFlow Datasets keeps prepared data.")
    define(
        "module_import",
        None,
        "Python module to import first, for tasks of your own. This runs the module's code.",
    )
    for split in ("train", "valid", "test"):
        define(
            f"{split}_files",
            None,
            f"Task text: {split} data, one TSV file or source,target; .gz accepted.",
        )
    define("metric", None, "Task text: bleu or rouge. Default: bleu.")


def define_model_flags(values):
    """Flags that say which trained model to use."""
    define = functools.partial(flags.DEFINE_string, flag_values=values)
    define("model_dir", None, "Folder of a trained model.")
    define("checkpoint", "best", "best, latest, a step, or average:<n> of the last n checkpoints.")


TASK_OPTIONS = ("train_files", "valid_files", "test_files", "metric")


def load_task(name, options, values):
    """The `Task` of that name, on its files and data folder.

    Args:
        name: registered name.
        options: mapping with `TASK_OPTIONS` as far as they are given.
        values: the flags, for data_dir and module_import.
    """
    import tasks  # noqa: F401 (registers them)
    from tf_teaforn.data.sources import with_data_dir
    from tf_teaforn.task import get_task

    if values.module_import:
        try:
            importlib.import_module(values.module_import)
        except ImportError as error:
            raise UserError(f"--module_import={values.module_import}: {error}.") from error
    task = get_task(name)
    if task.from_files is not None:
        task = task.from_files(**options)
    elif options:
        raise UserError(f"--{next(iter(options))} belongs to --task=text, not to {name}.")
    return dataclasses.replace(task, source=with_data_dir(task.source, values.data_dir))


def trained_task(values):
    """The `Task` that the model in --model_dir was trained on."""
    from tf_teaforn.model_dir import read_config

    config = read_config(required(values, "model_dir"))
    given = {name: values[name].value for name in TASK_OPTIONS if values[name].value is not None}
    return load_task(config.task, {**config.task_options, **given}, values)


def required(values, name):
    """The value of a flag that must be given."""
    if values[name].value is None:
        raise UserError(f"--{name} is missing.")
    return values[name].value


def run(define_flags, main, description):
    """Parses the command line and calls `main(flags)`; ends the process.

    Exit codes: 0; 2 with one line on standard error for a mistake of the user; 130 when
    interrupted.

    Args:
        define_flags: `define_flags(values)` defines the command's flags.
        main: the command.
        description: shown by --help.
    """
    # Start-up messages of TensorFlow hide those that matter.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)
    values = flags.FlagValues()
    define_flags(values)
    try:
        if any(argument.lstrip("-") in ("help", "h") for argument in sys.argv[1:]):
            print(f"{description.strip()}\n\nFlags:\n{_help(values)}")
            return
        rest = values(sys.argv)[1:]
        if rest:
            raise UserError(f"What is {rest[0]!r}? Flags are written --name=value.")
        main(values)
    except (UserError, flags.Error) as error:
        print(f"{os.path.basename(sys.argv[0])}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


def _help(values):
    entries = []
    for name in values.flag_values_dict():
        text = textwrap.fill(values[name].help, 90, initial_indent=" " * 6, subsequent_indent=" " * 6)
        entries.append(f"  --{name}\n{text}")
    return "\n".join(entries)
