"""The folder of a run: settings, vocabulary, checkpoints. Whatever follows needs nothing else."""

import json
import shlex

from etils import epath

from tf_teaforn import checkpoint
from tf_teaforn.config import RunConfig
from tf_teaforn.data.tokenizer import Tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.catalog import build_model
from tf_teaforn.models.seq2seq import Seq2Seq

CONFIG = "config.json"
VOCABULARY = "vocab.model"
COMMAND = "command.txt"
EXAMPLES = "examples.json"


def write_config(model_dir, config: RunConfig, command: list[str]):
    """Writes `config.json` and appends the command line to `command.txt`."""
    model_dir = epath.Path(model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    temporary = model_dir / f"{CONFIG}.tmp"
    temporary.write_text(config.to_json())
    temporary.replace(model_dir / CONFIG)
    log = model_dir / COMMAND
    earlier = log.read_text() if log.exists() else ""
    log.write_text(f"{earlier}{shlex.join(command)}\n")


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


def read_tokenizer(model_dir) -> Tokenizer:
    """Loads `vocab.model`."""
    return Tokenizer.load(epath.Path(model_dir) / VOCABULARY)


def write_examples(model_dir, sources, targets):
    """Writes a few pairs of texts, which an export warms a server up with, to `examples.json`."""
    content = {"sources": sources[:8], "targets": targets[:8]}
    path = epath.Path(model_dir) / EXAMPLES
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def read_examples(model_dir):
    """Reads `examples.json`: {"sources": list of str, "targets": list of str}.

    Raises:
        UserError: it is missing or damaged.
    """
    path = epath.Path(model_dir) / EXAMPLES
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is missing or damaged: the command that trained the model, given again, "
            "writes it."
        ) from error


def build_seq2seq(config: RunConfig, vocabulary_size: int) -> Seq2Seq:
    """The model of a configuration, with random weights."""
    overrides = {} if config.model.dropout is None else {"dropout": config.model.dropout}
    return build_model(
        config.model.model, vocabulary_size, dtype=config.model.precision, **overrides
    )


def load_seq2seq(model_dir, config: RunConfig, vocabulary_size: int, spec: str):
    """Builds Decoder-0's model and loads the checkpoint that `spec` names.

    Returns:
        (`Seq2Seq`, `checkpoint.Checkpoint`).
    """
    found = checkpoint.resolve(model_dir, spec)
    # Training may write a later one meanwhile.
    weights, _ = checkpoint.load_weights(model_dir, found.name if spec == "latest" else spec)
    seq2seq = build_seq2seq(config, vocabulary_size)
    checkpoint.assign(named_weights(seq2seq), served_weights(weights))
    return seq2seq, found


def named_weights(model):
    """Weights by path."""
    return {variable.path: variable for variable in model.weights}


def served_weights(weights):
    """Those of a checkpoint's tensors that belong to the `Seq2Seq`."""
    return {name: value for name, value in weights.items() if name.startswith("seq2seq/")}
