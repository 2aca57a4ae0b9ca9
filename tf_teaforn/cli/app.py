"""What all commands share: flags from settings, one-line errors, help."""

import dataclasses
import errno
import functools
import importlib.util
import logging
import os
import re
import sys
import textwrap

from absl import flags
from etils import epath

import tasks  # noqa: F401 (registers them)
from tf_teaforn import config as settings_module
from tf_teaforn.cli.stderr import quiet_tensorflow
from tf_teaforn.data.sources import with_data_dir
from tf_teaforn.errors import StoppedError, UserError, did_you_mean, user_error_in
from tf_teaforn.paths import check_writable, is_remote
from tf_teaforn.task import get_task, task_names

_DEFINE = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def define_settings(values, but=()):
    """A flag for every field of the run's settings but some; unset means the task's default."""
    for field in settings_module.settings():
        if field.name in but:
            continue
        kind = settings_module.field_type(field)
        help_text = field.metadata["help"]
        choices = field.metadata["choices"]
        if choices:
            help_text += f" One of {', '.join(choices)}."
        if field.default is not None:
            help_text += f" Default: {field.default}, unless the task has its own."
        _DEFINE[kind](field.name, None, help_text, flag_values=values)


def given_settings(values, but=()):
    """{name: value} of the flags of `define_settings` that are given."""
    given = {
        field.name: values[field.name].value
        for field in settings_module.settings()
        if field.name not in but and values[field.name].value is not None
    }
    model = given.get("model", "")
    if model.startswith("keras_nlp:"):
        if "init_from" in given:
            raise UserError(
                f"--model={model} names the weights too: leave out --init_from, or --model."
            )
        given["init_from"] = model
    elif "init_from" in given and not given["init_from"].startswith("keras_nlp:"):
        given["init_from"] = absolute(given["init_from"])
    if given.get("cache_dir"):
        given["cache_dir"] = absolute(local(values, "cache_dir"))
    return given


def run_config(values, task, options, but=()):
    """`RunConfig` from the task's defaults and the flags of `define_settings` that are given."""
    config = settings_module.RunConfig(
        task=task.name, task_options=options, data_dir=data_dir(values)
    )
    return config.replace({**task.defaults, **given_settings(values, but)})


def define_task_name(values, help_text):
    """The flag --task, whose help lists what there is."""
    lines = [f"{help_text} One of:"]
    lines += [f"{name}: {get_task(name).description}" for name in task_names()]
    flags.DEFINE_string("task", None, "\n".join(lines), flag_values=values)


def define_task_flags(values):
    """Flags that say where data and tasks come from."""
    define = functools.partial(flags.DEFINE_string, flag_values=values)
    define("data_dir", None, "Where TensorFlow Datasets keeps prepared data.")
    define(
        "module_import",
        None,
        "Python module to import first, for tasks of your own. This runs the module's code.",
    )
    for name, (kind, help_text) in _TASK_OPTIONS.items():
        owners = " or ".join(task for task in task_names() if name in get_task(task).options)
        _DEFINE[kind](name, None, f"Task {owners}: {help_text}", flag_values=values)


def define_model_flags(values):
    """Flags that say which trained model to use."""
    define = functools.partial(flags.DEFINE_string, flag_values=values)
    define("model_dir", None, "Folder of a trained model.")
    define(
        "checkpoint",
        "best",
        "best, latest, a step, average:<n> of the last n checkpoints, or the name of an average "
        "that bin/average wrote.",
    )


def define_batch_size(values):
    """The flag --batch_size of commands that decode or score."""
    flags.DEFINE_integer(
        "batch_size",
        settings_module.SENTENCES_AT_A_TIME,
        "Sentences at a time: fewer take less memory, more may be faster.",
        lower_bound=1,
        flag_values=values,
    )


# Of writing alone: no space, a quota, a limit, a disk for reading.
_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_ADDRESS = re.compile(r"\bgs://")
# What is no address that can be read, nor a preset, which KerasHub reads by itself; pathlib leaves
# one slash.
_OTHER_ADDRESS = re.compile(r"(?!gs://|keras_nlp:)(gs:/|.*?://)")
# Flags that may hold addresses of other kinds.
_NO_PATHS = ("beam_options", "tpu")
_FILES = ("train_files", "valid_files", "test_files", "prepared")
# Flags of tasks with options of their own: type and meaning.
_TASK_OPTIONS = {
    "train_files": (
        str,
        "training data. text: one TSV file or source,target; gsg: documents, one a "
        "line, files or patterns separated by commas; .gz accepted.",
    ),
    "valid_files": (str, "validation data, as --train_files."),
    "test_files": (str, "test data, as --train_files."),
    "metric": (
        str,
        "what picks the best checkpoint: bleu, chrf (for targets without spaces between words, "
        "such as Chinese, Japanese or Thai) or rouge. Default: bleu.",
    ),
    "tfds_name": (str, "TFDS builder to read documents from, instead of files."),
    "tfds_feature": (str, "the text feature of --tfds_name."),
    "tfds_splits": (
        str,
        "splits of --tfds_name for training, validation and test, separated by "
        "commas. Default: train,validation,test.",
    ),
    "prepared": (str, "folder that bin/prepare wrote, instead of documents."),
    "gap_ratio": (float, "share of a document's sentences to select. Default: 0.45."),
    "gap_intact": (float, "share of them that stays in the document. Default: 0.2."),
    "gap_selection": (
        str,
        "which are selected: ind_orig (best ROUGE-1 against the rest), random "
        "or lead. Default: ind_orig.",
    ),
    "gap_stochastic": (
        bool,
        "whether ratio (from a third of it up) and scores (by 20%) vary at random. Default: false.",
    ),
    "gap_max_words": (int, "words of a document that are used. Default: 512."),
    "gap_language": (str, "language of the documents, an ISO 639 code. Default: en."),
    "gap_seed": (int, "seed of what is random in the selection. Default: 0."),
}


def task_options(values):
    """What is given of the flags that belong to tasks with options, as {name: value}.

    Paths are absolute: they are kept with the model, which is used from other folders.
    """
    given = {name: values[name].value for name in _TASK_OPTIONS if values[name].value is not None}
    for name in given:
        if name in _FILES:
            given[name] = ",".join(absolute(part) for part in given[name].split(","))
    return given


def data_dir(values):
    """--data_dir as an absolute path, or None."""
    return absolute(values.data_dir) if values.data_dir else None


def absolute(path):
    """The path from the root; what is empty or on a remote file system stays as it is."""
    if not path or is_remote(path):
        return path
    return os.path.abspath(path)


def load_task(name, options, data_dir, module_import=None):
    """The `Task` of that name, on its files and data folder.

    Args:
        name: registered name.
        options: of `task_options`.
        data_dir: where TFDS keeps prepared data, or None.
        module_import: module to import first, or None. The current folder is searched too.
    """
    if module_import:
        sys.path.append(os.getcwd())
        try:
            importlib.import_module(module_import)
        except (ImportError, TypeError, ValueError, SyntaxError) as error:
            raise UserError(f"--module_import={module_import}: {error}.") from error
    task = get_task(name)
    for option in options:
        if option not in task.options:
            owners = [other for other in task_names() if option in get_task(other).options]
            raise UserError(f"--{option} belongs to --task={' or '.join(owners)}, not to {name}.")
        kind = _TASK_OPTIONS[option][0]
        if not isinstance(options[option], kind if kind is not float else (int, float)):
            raise UserError(f"--{option}={options[option]}: write a value of another type.")
    if task.from_files is not None:
        task = task.from_files(**options)
    return dataclasses.replace(task, source=with_data_dir(task.source, data_dir))


def trained_task(values):
    """The `Task` that the model in --model_dir was trained on."""
    from tf_teaforn.model_dir import read_config

    config = read_config(required(values, "model_dir"))
    options = {**config.task_options, **task_options(values)}
    folder = data_dir(values) or config.data_dir
    if config.task not in task_names() and not values.module_import:
        raise UserError(
            f"--model_dir={values.model_dir} was trained on the task {config.task}, which does not "
            "come with tf_teaforn. Name its Python module with --module_import."
        )
    return load_task(config.task, options, folder, values.module_import)


def required(values, name):
    """The value of a flag that must be given."""
    if not values[name].value:
        meaning = values[name].help.splitlines()[0].removesuffix(" One of:")
        raise UserError(f"--{name} is missing. {meaning}")
    return values[name].value


def local(values, name):
    """The value of a flag that must be given, one path or several, none of them remote."""
    found = required(values, name)
    for path in found if isinstance(found, list) else [found]:
        if is_remote(path):
            raise UserError(f"--{name}={path}: this has to be on a local disk. Copy from or to it.")
    return found


def check_output(path):
    """Refuses an --output that cannot be written, before there is work to lose."""
    if epath.Path(path).is_dir():
        raise UserError(f"--output={path} is a folder. Name a file.")
    try:
        check_writable(path)
    except OSError as error:
        raise UserError(
            f"--output={path} cannot be written: {error.strerror or error}. Name another file."
        ) from error


def run(define_flags, main, description, backends=("tensorflow",)):
    """Parses the command line and calls `main(flags)`; ends the process.

    Exit codes: 0; 2 with one line on standard error for a mistake of the user; 130 when
    interrupted; those of `StoppedError`, with one line too.

    Args:
        define_flags: `define_flags(values)` defines the command's flags.
        main: the command.
        description: shown by --help.
        backends: values of KERAS_BACKEND that the command works with.
    """
    quiet_tensorflow()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("absl", "jax", "tensorboard", "tensorflow", "sacrebleu"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        values = flags.FlagValues()
        define_flags(values)
        if any(argument in ("--help", "-help", "-h", "help") for argument in sys.argv[1:]):
            print(f"{description.strip()}\n\nFlags:\n{_help(values)}{_task_defaults()}")
        else:
            _check_command_line(values, backends)
            if os.environ["KERAS_BACKEND"] == "jax":
                from tf_teaforn.tf_backend.devices import hide_gpus

                # TensorFlow, which reads the data, would take most of their memory.
                hide_gpus()
            main(values)
        sys.stdout.flush()
    except flags.IllegalFlagValueError as error:
        _fail(_value_error(values, str(error)))
    except flags.UnrecognizedFlagError as error:
        guess = did_you_mean(error.flagname, list(values.flag_values_dict()))
        _fail(f"Unknown flag --{error.flagname}.{guess} --help lists all.")
    except StoppedError as error:
        _fail(error, error.exit_code)
    except (UserError, flags.Error) as error:
        _fail(_innermost(error))
    except BrokenPipeError:
        # Whoever read the output has gone, as in `bin/decode | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        if (line := _os_error_line(error)) is None:
            raise
        _fail(line)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if message := user_error_in(error):
            _fail(message)
        if _is_out_of_memory(error):
            first_line = str(error).partition("\n")[0]
            if re.search("No space left|[Qq]uota", first_line):
                # TensorFlow calls a full disk an exhausted resource too.
                _fail(f"{first_line}.")
            _fail(
                f"Not enough memory ({first_line}). Take a smaller --batch_size (of bin/train: "
                "--micro_batch_tokens or --batch_tokens), --beam_size or model."
            )
        # TensorFlow's errors on remote file systems are of no common kind.
        if not (type(error).__module__.startswith("tensorflow.") and _ADDRESS.search(str(error))):
            raise
        _fail(error)


def _os_error_line(error):
    """What the system says of a file, a disk or a server; None for an error of the program."""
    if error.filename is None and error.errno is None:
        # Those of remote file systems have a text alone.
        return str(error) if _ADDRESS.search(str(error)) else None
    # What is wrong with standard output, or with a disk as a whole, has no name.
    unnamed = "output" if error.errno in _NO_OUTPUT else "reading or writing"
    return f"{error.filename or unnamed}: {error.strerror or error}."


def _is_out_of_memory(error):
    """Whether Python, TensorFlow or JAX says so; the latter two need not be imported."""
    kind = type(error).__name__
    on_jax = kind == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError) or kind == "ResourceExhaustedError" or on_jax


def _innermost(error):
    """The error as a layer raised it: Keras and AutoGraph wrap it in one with pages of context."""
    wrappers = ("Exception encountered when calling", "in user code:")
    while error.__context__ and str(error).startswith(wrappers):
        error = error.__context__
    return error


def _check_command_line(values, backends):
    # Commands record it, to be given again without the files.
    sys.argv[1:] = _arguments(values)
    try:
        rest = values(sys.argv)[1:]
    except ValueError as error:
        # absl's alone is no error of flags.
        argument = str(error).removesuffix(" does not take an argument")
        name = argument.lstrip("-").partition("=")[0].removeprefix("no")
        raise UserError(f"{argument}: write --{name}=true or --{name}=false.") from error
    if rest:
        raise UserError(f"What is {rest[0]!r}? Flags are written --name=value.")
    for name in values:
        if values[name].present and name not in _NO_PATHS:
            _check_paths(name, values[name])
    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if backend not in backends:
        raise UserError(
            f"KERAS_BACKEND={backend}: this command runs on {' or '.join(backends)}. Unset it."
        )
    if backend == "jax" and importlib.util.find_spec("jax") is None:
        raise UserError("KERAS_BACKEND=jax needs JAX: pip install 'tf-teaforn[jax]'.")


def _arguments(values):
    """The arguments, with the content of flagfiles in their place."""
    try:
        return values.read_flags_from_files(sys.argv[1:])
    except flags.IllegalFlagValueError as error:
        raise UserError("--flagfile names no file. Write --flagfile=FILE.") from error
    except UnicodeDecodeError as error:
        named = (part for part in sys.argv[1:] if part.lstrip("-").startswith("flagfile"))
        raise UserError(
            f"{' '.join(named)}: this is not UTF-8. Convert the file, with iconv for example."
        ) from error


def _check_paths(name, flag):
    """Refuses addresses without a file system; `~` becomes the home folder, which bash leaves."""
    several = isinstance(flag.value, list)
    if not several and not isinstance(flag.value, str):
        return
    parts = flag.value if several else flag.value.split(",")
    for part in parts:
        if found := _OTHER_ADDRESS.match(part):
            raise UserError(
                f"--{name}={','.join(parts)}: there is no file system {found[1]}. Write a path, or "
                "an address that begins with gs://."
            )
    # A preset of KerasHub's may be a folder.
    prefixes = ["keras_nlp:" if part.startswith("keras_nlp:") else "" for part in parts]
    parts = [
        prefix + os.path.expanduser(part.removeprefix(prefix))
        for prefix, part in zip(prefixes, parts, strict=True)
    ]
    flag.value = parts if several else ",".join(parts)


def _value_error(values, message):
    """Says in the user's words what absl could not read."""
    name, value = re.match(r"flag --(\w+)=(.*?): ", message, re.DOTALL).groups()
    least = getattr(values[name].parser, "lower_bound", None)
    if least is not None and re.fullmatch("-?[0-9]+", value):
        return f"--{name}={value}: write {least} or more."
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    choices = getattr(values[name].parser, "enum_values", None)
    expected = f"one of {', '.join(choices)}" if choices else kinds.get(values[name].flag_type())
    return f"--{name}={value}: write {expected or 'values with commas between them'}."


def _fail(message, code=2):
    print(f"{os.path.basename(sys.argv[0])}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(code)


def _task_defaults():
    """What the task that is named besides --help sets, as lines."""
    names = [argument for argument in sys.argv[1:] if argument.startswith("--task=")]
    if not names:
        return ""
    name = names[-1].removeprefix("--task=")
    if name not in task_names():
        # One of the user's own, or several.
        return ""
    given = [f"--{flag}={value}" for flag, value in get_task(name).defaults.items()]
    return f"\n\nDefaults of --task={name}:\n" + textwrap.fill(
        " ".join(given), 90, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def _help(values):
    entries = []
    for name in values.flag_values_dict():
        text = values[name].help
        # absl puts quotation marks around it.
        default = (values[name].default_as_str or "").strip("'")
        if default and "Default: " not in text:
            text += f" Default: {default}."
        lines = (
            textwrap.fill(line, 90, initial_indent=" " * 6, subsequent_indent=" " * 6)
            for line in text.splitlines()
        )
        entries.append("\n".join([f"  --{name}", *lines]))
    return "\n".join(entries)
