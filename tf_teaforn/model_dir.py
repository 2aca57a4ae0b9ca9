"""The folder of a run: settings, vocabulary, checkpoints. Whatever follows needs nothing else.

A model that came from outside has its architecture there too, and the files of its own tokenizer.
"""

import hashlib
import json
import shlex

from etils import epath

from tf_teaforn import checkpoint
from tf_teaforn.config import RunConfig
from tf_teaforn.data.tokenizer import VOCABULARY_FILE, SubwordTokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import architecture_json, build_architecture
from tf_teaforn.models.catalog import build_model
from tf_teaforn.models.presets import PREFIX
from tf_teaforn.models.seq2seq import Seq2Seq
from tf_teaforn.paths import write_whole

CONFIG = "config.json"
VOCABULARY_DATA = "vocab.data.txt"
COMMAND = "command.txt"
ARCHITECTURE = "architecture.json"
EXAMPLES = "examples.json"
_FILES = (
    CONFIG,
    VOCABULARY_FILE,
    VOCABULARY_DATA,
    COMMAND,
    ARCHITECTURE,
    EXAMPLES,
    "metrics.jsonl",
)
_FOLDERS = ("averages", "best", "cache", "checkpoints", "eval", "export", "tensorboard")


def check_names(model_dir):
    """Finds what is in the way of files and folders that training writes.

    Raises:
        UserError: something that is no folder, or the other way round; the folder is unreadable,
            or its name is no text.
    """
    model_dir = epath.Path(model_dir)
    try:
        str(model_dir).encode()
    except UnicodeEncodeError as error:
        # TensorFlow takes no other names.
        raise UserError(
            f"--model_dir={str(model_dir)!r}: the name is not UTF-8. Take another."
        ) from error
    try:
        if model_dir.exists() and not model_dir.is_dir():
            raise UserError(f"--model_dir={model_dir} is a file. Name a folder.")
        found = {path.name: path for path in model_dir.iterdir()} if model_dir.exists() else {}
    except OSError as error:
        raise UserError(
            f"--model_dir={model_dir} cannot be read: {error.strerror or error}."
        ) from error
    for names, kind in ((_FOLDERS, "folder"), (_FILES, "file")):
        for name in names:
            if name in found and found[name].is_dir() != (kind == "folder"):
                raise UserError(
                    f"{found[name]} is no {kind}, which a run has there: take another --model_dir."
                )


def write_config(model_dir, config: RunConfig, command: list[str]):
    """Writes `config.json` and appends the command line to `command.txt`."""
    model_dir = epath.Path(model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    write_whole(model_dir / CONFIG, config.to_json())
    log = model_dir / COMMAND
    earlier = log.read_bytes() if log.exists() else b""
    # Names of files need not be UTF-8.
    write_whole(log, earlier + f"{shlex.join(command)}\n".encode(errors="surrogateescape"))


def read_config(model_dir) -> RunConfig:
    """Reads `config.json`.

    Raises:
        UserError: no such folder, or not one that training made.
    """
    model_dir = epath.Path(model_dir)
    if not model_dir.is_dir():
        raise UserError(f"--model_dir={model_dir}: there is no such folder.")
    path = model_dir / CONFIG
    if not path.exists():
        raise UserError(f"--model_dir={model_dir} has no {CONFIG}: bin/train did not write it.")
    return RunConfig.from_json(path.read_bytes(), origin=str(path))


def write_vocabulary_data(model_dir, config: RunConfig, task):
    """Writes down what the `vocab.model` there was trained on, to `vocab.data.txt`."""
    write_whole(epath.Path(model_dir) / VOCABULARY_DATA, _vocabulary_data(model_dir, config, task))


def has_other_vocabulary(model_dir, config: RunConfig, task) -> bool:
    """Whether `vocab.model` was trained on other data, or with another size, and for no checkpoint.

    One that the user has put there counts as the right one.
    """
    path = epath.Path(model_dir) / VOCABULARY_DATA
    if not path.exists() or checkpoint.steps(model_dir):
        return False
    written, here = path.read_bytes().decode(), _vocabulary_data(model_dir, config, task)
    return written != here and written.partition(" ")[0] == here.partition(" ")[0]


def _vocabulary_data(model_dir, config, task):
    digest = hashlib.sha256((epath.Path(model_dir) / VOCABULARY_FILE).read_bytes()).hexdigest()
    fingerprint = task.source.fingerprint("train")
    return f"{digest} {config.model.vocab_size} subwords of {task.name}: {fingerprint}\n"


def write_architecture(model_dir, seq2seq: Seq2Seq):
    """Writes `architecture.json`, which `build_seq2seq` then goes by."""
    write_whole(epath.Path(model_dir) / ARCHITECTURE, architecture_json(seq2seq))


def write_examples(model_dir, sources, targets):
    """Writes a few pairs of texts, which an export warms a server up with, to `examples.json`."""
    content = {"sources": sources[:8], "targets": targets[:8]}
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    write_whole(epath.Path(model_dir) / EXAMPLES, text)


def read_examples(model_dir):
    """Reads `examples.json`: {"sources": list of str, "targets": list of str}.

    Raises:
        UserError: it is missing or damaged.
    """
    path = epath.Path(model_dir) / EXAMPLES
    try:
        content = json.loads(path.read_bytes())
        return {name: [str(text) for text in content[name]] for name in ("sources", "targets")}
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is missing or damaged: the command that trained the model, given again, "
            "writes it."
        ) from error


def build_seq2seq(config: RunConfig, vocabulary_size: int, model_dir) -> Seq2Seq:
    """The model of a configuration, with random weights.

    Its architecture is `<model_dir>/architecture.json`, if there is one, else the catalog's.

    Raises:
        UserError: the file is damaged, or missing for a model of KerasHub's.
    """
    path = epath.Path(model_dir) / ARCHITECTURE
    if path.exists():
        return build_architecture(
            path.read_bytes(), path, dtype=config.model.precision, dropout=config.model.dropout
        )
    if config.model.model.startswith(PREFIX):
        # Such a name would be opened as a path or an address.
        raise UserError(f"{path} is missing: the model of {config.model.model} cannot be built.")
    model = config.model
    return build_model(model.model, vocabulary_size, dtype=model.precision, dropout=model.dropout)


def load_seq2seq(
    model_dir,
    config: RunConfig,
    tokenizer: SubwordTokenizer,
    spec: str,
    precision: str = "float32",
):
    """Builds Decoder-0's model and loads the checkpoint that `spec` names.

    Unless told otherwise it computes in float32, whatever the run was trained with: logits of
    bfloat16 have eight bits, which is too coarse to rank tokens and hypotheses by.

    Returns:
        (`Seq2Seq`, the state that `checkpoint.load_weights` gives with its weights).

    Raises:
        UserError: there is no such checkpoint, or it was trained with another vocabulary.
    """
    weights, state = checkpoint.load_weights(model_dir, spec)
    config = config.replace({"precision": precision})
    seq2seq = build_seq2seq(config, tokenizer.vocabulary_size, model_dir)
    checkpoint.assign(named_weights(seq2seq), served_weights(weights))
    if state.get("vocabulary", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(
            f"{model_dir}: the vocabulary there is not the one that checkpoint "
            f"{state['checkpoint']} was trained with. Bring that back."
        )
    return seq2seq, state


def named_weights(model):
    """Weights by path.

    Raises:
        ValueError: two have the same: a checkpoint would lose one of them.
    """
    named = {}
    for variable in model.weights:
        if named.setdefault(variable.path, variable) is not variable:
            raise ValueError(f"Two weights are {variable.path}: give each layer a name of its own.")
    return named


def served_weights(weights):
    """Those of a checkpoint's tensors that belong to the `Seq2Seq`."""
    return {name: value for name, value in weights.items() if name.startswith("seq2seq/")}
