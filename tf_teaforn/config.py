"""Settings of a run: frozen dataclasses, to and from JSON.

Every field is a flag of the same name; a task changes defaults, flags override.
"""

import dataclasses
import json
import math
import numbers
import sys
import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from tf_teaforn.errors import UserError

FORMAT_VERSION = 1
# Of a search, or of scoring, unless told otherwise.
SENTENCES_AT_A_TIME = 32


# What a value must be: a test, and the same in words.
NATURAL = (lambda value: value >= 1, "1 or more")
NOT_NEGATIVE = (lambda value: value >= 0, "0 or more")
# One subword and the end of sentence; attention over more than that fits no device.
LENGTH = (lambda value: 2 <= value <= 100_000, "a number from 2 to 100000")
OUTPUT_LENGTH = (lambda value: 1 <= value <= 100_000, "a number from 1 to 100000")
POSITIVE = (lambda value: 0 < value < math.inf, "a positive number")
NOT_NEGATIVE_NUMBER = (lambda value: 0 <= value < math.inf, "a number from 0")
RATE = (lambda value: 0 <= value < 1, "a number from 0, below 1")
FRACTION = (lambda value: 0 <= value <= 1, "a number from 0 to 1")
# TensorFlow's own type for sizes of arrays.
_LARGEST_INT = 2**31 - 1
SEED = (lambda value: 0 <= value < 2**32, "a number from 0, below 2^32")
FINITE = (math.isfinite, "a finite number")
# Settings that neither a step nor what is learned depends on.
BOOKKEEPING = frozenset(("data_dir", "cache_dir", "keep", "patience", "log_every"))
BOOKKEEPING |= {"export_on_best", "beam_size", "beam_alpha"}
PARTS = ("embedding", "encoder", "decoder")
SOME_PARTS = (
    lambda value: set(value.split(",")) < set(PARTS),
    f"one or two of {', '.join(PARTS)}",
)


def setting(default, help, choices=None, bounds=None):
    """A field with its help text and either the strings or the numbers that are allowed."""
    metadata = {"help": help, "choices": choices, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture."""

    model: str = setting(
        "transformer_base",
        "Architecture: transformer_tiny, transformer_multi30k, transformer_small, "
        "transformer_base, transformer_big, transformer_big_enfr, pegasus_large, rnn_base, or "
        "keras_nlp:<preset or folder>.",
    )
    vocab_size: int = setting(
        32000, "Number of subwords of the vocabulary to train.", bounds=NATURAL
    )
    dropout: float | None = setting(None, "Dropout rate. Default: the model's own.", bounds=RATE)
    precision: str = setting(
        "float32", "Numbers that activations are computed in.", ("float32", "mixed_bfloat16")
    )
    init_from: str | None = setting(
        None,
        "Folder to start from: a Hugging Face model, a PEGASUS checkpoint of google-research, or a "
        "--model_dir, with @<checkpoint> for another than the best. It sets architecture and "
        "vocabulary.",
    )


@dataclasses.dataclass(frozen=True)
class TeaForNConfig:
    """The method."""

    n: int = setting(2, "Number N of stacked decoders; 1 is teacher forcing.", bounds=NATURAL)
    discount: float = setting(
        0.4, "Discount λ: stage s weighs λ^s. 0 is teacher forcing.", bounds=FRACTION
    )
    shared: bool = setting(True, "Whether one set of weights serves all decoders.")
    clone_init: str = setting(
        "copy", "With --noshared: how decoders 1 to N-1 start.", ("copy", "independent")
    )
    stage_input: str = setting(
        "hidden",
        "What Decoder-s reads: outputs of Decoder-(s-1), or the expected embedding of its top-k "
        "tokens.",
        ("hidden", "top_k"),
    )
    top_k: int | None = setting(
        None, "k of --stage_input=top_k, 1 to the vocabulary size.", bounds=NATURAL
    )
    word_drop: float = setting(
        0.0, "Probability of zeroing a ground-truth input embedding.", bounds=RATE
    )
    label_smoothing: float = setting(0.1, "Label smoothing, at every stage.", bounds=RATE)
    remat: str = setting(
        "none",
        "What the backward pass computes again instead of keeping it: nothing, encoder and stages "
        "one by one, or their layers one by one.",
        ("none", "stage", "layer"),
    )
    micro_batch_tokens: int | None = setting(
        None,
        "Padded tokens of the longer side that are computed at a time over all devices; gradients "
        "are summed over the parts of a batch. Default: a batch as a whole.",
        bounds=NATURAL,
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Lengths and batches."""

    max_source_length: int = setting(
        256, "Longest source in subwords, end of sentence included.", bounds=LENGTH
    )
    max_target_length: int = setting(
        256, "Longest target in subwords, end of sentence included.", bounds=LENGTH
    )
    batching: str = setting(
        "bucket",
        "Training batches: examples of like length, each padded to one of a few shapes (bucket); "
        "all padded to the maximum lengths (fixed); several examples a row (pack).",
        ("bucket", "fixed", "pack"),
    )
    batch_tokens: int = setting(
        25000, "Padded tokens of the longer side in a batch over all devices.", bounds=NATURAL
    )
    cache_dir: str | None = setting(
        None,
        "Folder for the tokenised data, on a local disk; runs may share it. Default: "
        "<model_dir>/cache, or one in /tmp where --model_dir is remote.",
    )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Optimisation, checkpoints, reports."""

    train_steps: int = setting(100000, "Number of updates.", bounds=NATURAL)
    seed: int = setting(1, "Seed of weights, data order and dropout.", bounds=SEED)
    optimizer: str = setting("adam", "Optimizer.", ("adam", "adafactor", "sgd"))
    learning_rate: float = setting(1e-3, "Highest learning rate.", bounds=POSITIVE)
    schedule: str = setting(
        "inverse_sqrt",
        "Learning rate after warm-up.",
        ("inverse_sqrt", "linear", "constant"),
    )
    clip_norm: float | None = setting(
        None,
        "Largest norm of the gradient, of all weights together and of the whole batch; a longer "
        "gradient is scaled down to it. Default: no limit.",
        bounds=POSITIVE,
    )
    weight_decay: float = setting(
        0.0,
        "With --optimizer=adam: what each update takes off a weight besides, as a share of it and "
        "times the learning rate (AdamW); biases and norms keep theirs.",
        bounds=NOT_NEGATIVE_NUMBER,
    )
    freeze: str | None = setting(
        None,
        f"What keeps its weights: {', '.join(PARTS)}; several with commas between.",
        bounds=SOME_PARTS,
    )
    warmup_steps: int = setting(8000, "Steps of linear warm-up.", bounds=NOT_NEGATIVE)
    eval_every: int = setting(
        1000, "Steps between validations; each saves a checkpoint.", bounds=NATURAL
    )
    eval_examples: int = setting(
        0,
        "How many validation examples, from the first on, a validation scores; 0: all.",
        bounds=NOT_NEGATIVE,
    )
    checkpoint_every: int = setting(1000, "Steps between checkpoints.", bounds=NATURAL)
    keep: int = setting(20, "Number of checkpoints to keep, besides the best.", bounds=NATURAL)
    patience: int | None = setting(
        None,
        "Stop after so many validations without a better score. Default: never.",
        bounds=NATURAL,
    )
    export_on_best: bool = setting(False, "Export a SavedModel at each new best score.")
    log_every: int = setting(100, "Steps between log lines and TensorBoard points.", bounds=NATURAL)
    steps_per_execution: int = setting(
        1, "Steps in one call of the compiled function; none crosses a report.", bounds=NATURAL
    )
    on_nonfinite: str = setting(
        "stop",
        "After a step whose loss or gradient is not finite: stop, or skip it, leaving weights and "
        "optimizer as they were.",
        ("stop", "skip"),
    )


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """Search, at validation and by default afterwards."""

    beam_size: int = setting(
        4, "Beam width; 1 is greedy. Validation while training is greedy.", bounds=NATURAL
    )
    beam_alpha: float = setting(
        0.6, "Exponent of the length penalty ((5 + length) / 6)^alpha.", bounds=FINITE
    )
    decode_length: int | None = setting(
        None,
        "Longest output in subwords. Default: source length + 50.",
        bounds=OUTPUT_LENGTH,
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything `<model_dir>/config.json` holds.

    Attributes:
        task: registered name.
        task_options: what a task with options needs, by flag: files, metric, TFDS names, gap_….
        data_dir: where TensorFlow Datasets keeps prepared data, or None for its default.
    """

    task: str
    task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data_dir: str | None = None
    model: ModelConfig = ModelConfig()
    teaforn: TeaForNConfig = TeaForNConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()

    def replace(self, values):
        """Returns a copy with `values`, a mapping from field (flag) names to values.

        Raises:
            UserError: unknown name, wrong type, value that is none of the choices or out of
                bounds. What settings of the method ask of each other and of the vocabulary is
                checked by `teaforn.check_settings`.
        """
        values = dict(values)
        groups = {}
        for group_name in GROUPS:
            group = getattr(self, group_name)
            names = {field.name for field in dataclasses.fields(group)}
            changes = {name: values.pop(name) for name in list(values) if name in names}
            check(type(group), changes)
            groups[group_name] = dataclasses.replace(group, **changes)
        if values:
            raise UserError(f"Unknown setting: {', '.join(sorted(values))}.")
        return dataclasses.replace(self, **groups)

    def to_json(self):
        """Text of `config.json`."""
        return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text, origin="config.json"):
        """Reads `to_json`'s text; `origin` names the file in errors.

        Raises:
            UserError: not such a file, or one of a newer version.
        """
        try:
            content = dict(json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{origin} is not a configuration of tf_teaforn: {error}.") from error
        version = content.pop("format_version", None)
        if version is None:
            raise UserError(
                f"{origin} is not a configuration of tf_teaforn: it has no format_version."
            )
        if version != FORMAT_VERSION:
            raise UserError(
                f"{origin} has format version {version}; this release reads {FORMAT_VERSION}. "
                "Use the release that wrote it."
            )
        try:
            values = {}
            for name in GROUPS:
                values.update(content.pop(name))
            config = cls(**content)
            _check_task(config)
            return config.replace(values)
        except KeyError as error:
            raise UserError(f"{origin} has no {error.args[0]!r}: it is damaged.") from error
        except (TypeError, ValueError, UserError) as error:
            raise UserError(f"{origin} cannot be used: {error}") from error

    def flat(self):
        """All settings by flag."""
        flat = {"task": self.task, "data_dir": self.data_dir, **self.task_options}
        for group in GROUPS:
            flat.update(dataclasses.asdict(getattr(self, group)))
        return flat

    def differences(self, other):
        """Lines "--flag: value there, value here" for every setting; `other` is here."""
        mine, theirs = self.flat(), other.flat()
        return [
            f"--{name}: {mine.get(name)} there, {theirs.get(name)} here"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]


GROUPS = {
    "model": ModelConfig,
    "teaforn": TeaForNConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "decoding": DecodingConfig,
}


def settings():
    """All fields that are flags: list of `dataclasses.Field`, in order."""
    return [field for group in GROUPS.values() for field in dataclasses.fields(group)]


def field_type(field):
    """The type of a field's value: bool, int, float or str; None is allowed besides by some."""
    if get_origin(field.type) in (types.UnionType,):
        return get_args(field.type)[0]
    return field.type


def _check_task(config):
    if not isinstance(config.task, str):
        raise UserError("task is no text.")
    if not isinstance(config.data_dir, str | None):
        raise UserError("data_dir is no text.")
    options = config.task_options
    if not isinstance(options, Mapping) or not all(
        isinstance(value, str | int | float) for value in options.values()
    ):
        raise UserError("task_options are no names with text or numbers.")


# Type of a field -> what its values are, and the same in words.
_KINDS = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
}


def check(group, values):
    """Checks values, by name, of a group of settings, such as `TeaForNConfig`.

    Raises:
        UserError: a value of another type, none of the choices, or out of bounds.
    """
    for field in dataclasses.fields(group):
        if field.name in values:
            _check(field, values[field.name])


def _check(field, value):
    optional = field.default is None
    kind = field_type(field)
    if value is None and optional:
        return
    values, words = _KINDS[kind]
    fits = isinstance(value, values) and (kind is bool or not isinstance(value, bool))
    if fits and kind is float and isinstance(value, int):
        fits = abs(value) <= sys.float_info.max
    if not fits:
        raise UserError(f"--{field.name}={value}: write {words}.")
    if kind is int and abs(value) > _LARGEST_INT and field.name != "seed":
        raise UserError(f"--{field.name}={value}: write {_LARGEST_INT} or less.")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"--{field.name}={value}: write one of {', '.join(choices)}.")
    if field.metadata["bounds"]:
        fits, words = field.metadata["bounds"]
        if not fits(value):
            raise UserError(f"--{field.name}={value}: write {words}.")
