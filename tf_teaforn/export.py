"""From a model directory to a SavedModel."""

import dataclasses
import logging

from tf_teaforn import checkpoint as checkpoints
from tf_teaforn import model_dir as model_dirs
from tf_teaforn.data.tokenizers import load_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.inference import search_config
from tf_teaforn.pretrained.to_hugging_face import write_folder
from tf_teaforn.tf_backend.export import (
    MODES,
    WEIGHTS_DTYPES,
    ServingModule,
    write_saved_model,
)

_logger = logging.getLogger(__name__)


def export_all(model_dir, export_dir, **settings):
    """Exports every checkpoint of training, the earliest as the lowest version.

    Takes the arguments of `export`, without `checkpoint`; yields pairs of step and new folder. A
    checkpoint that a running training deletes meanwhile is left out, with a logged warning.
    """
    model_dirs.read_config(model_dir)
    steps = checkpoints.steps(model_dir)
    if not steps:
        raise UserError(f"--checkpoint=all: --model_dir={model_dir} has no checkpoint.")
    for step in steps:
        try:
            folder = export(model_dir, export_dir, str(step), **settings)
        except UserError as error:
            # The newest one is not deleted.
            if step == steps[-1] or step in checkpoints.steps(model_dir):
                raise
            _logger.warning("Warning: checkpoint %d is gone and not exported: %s", step, error)
            continue
        yield step, folder


def export_transformers(model_dir, export_dir, checkpoint="best"):
    """Writes Decoder-0's model as Hugging Face `transformers` keeps it; returns the folder.

    Args:
        model_dir: what `bin/train` wrote.
        export_dir: the folder to write, which must not exist or be empty.
        checkpoint: best, latest, <step> or average:<n>.

    Raises:
        UserError: the model has no counterpart there, or there is no such checkpoint.
    """
    config = model_dirs.read_config(model_dir)
    tokenizer = load_tokenizer(model_dir)
    seq2seq, _ = model_dirs.load_seq2seq(model_dir, config, tokenizer, checkpoint)
    # The start token counts there.
    given = config.decoding.decode_length
    limit = config.data.max_source_length + 50 if given is None else given + 1
    write_folder(
        seq2seq,
        tokenizer,
        export_dir,
        max_length=max(config.data.max_source_length + 50, config.data.max_target_length, limit),
        generation_length=limit,
        beam_size=config.decoding.beam_size,
    )
    return export_dir


def export(
    model_dir,
    export_dir,
    checkpoint="best",
    mode="predict",
    static_batch=None,
    static_length=None,
    weights_dtype="float32",
    **search_overrides,
):
    """Exports Decoder-0 of a checkpoint.

    Args:
        model_dir: what `bin/train` wrote.
        export_dir: receives `<integer version>/`.
        checkpoint: best, latest, <step> or average:<n>.
        mode: "predict" (signatures serving_default and token_ids) or "score".
        static_batch, static_length: B and S, in subwords with end-of-sentence, of additional
            signatures compiled by XLA; both or neither.
        weights_dtype: "float32", or "bfloat16" for half the size.
        **search_overrides: fields of `SearchConfig`, where they differ from the run's settings.

    Returns:
        The new folder.

    Raises:
        UserError: no such folder, checkpoint or mode, or an impossible search.
    """
    if mode not in MODES:
        raise UserError(f"--mode={mode}: write {' or '.join(MODES)}.")
    if weights_dtype not in WEIGHTS_DTYPES:
        raise UserError(f"--weights_dtype={weights_dtype}: write {' or '.join(WEIGHTS_DTYPES)}.")
    static_shape = _static_shape(mode, static_batch, static_length)
    config = model_dirs.read_config(model_dir)
    search = search_config(config.decoding, **search_overrides)
    tokenizer = load_tokenizer(model_dir)
    seq2seq, state = model_dirs.load_seq2seq(model_dir, config, tokenizer, checkpoint)
    module = ServingModule(
        seq2seq,
        tokenizer,
        search,
        config.data.max_source_length,
        config.data.max_target_length,
        static_shape,
        weights_dtype,
    )
    details = {
        "mode": mode,
        "checkpoint": state["checkpoint"],
        "steps": state["steps"],
        "task": config.task,
        "max_source_length": config.data.max_source_length,
        "max_target_length": config.data.max_target_length,
        "static_batch": static_batch,
        "static_length": static_length,
        "weights_dtype": weights_dtype,
        **dataclasses.asdict(search),
    }
    examples = model_dirs.read_examples(model_dir)
    return write_saved_model(module, export_dir, details, examples, mode)


def _static_shape(mode, batch, length):
    """(B, S) or None; refuses half of it."""
    given = {"static_batch": batch, "static_length": length}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 2:
        return None
    if missing:
        (name,) = set(given) - set(missing)
        raise UserError(
            f"--{name}={given[name]} alone makes no shape: add --{missing[0]}, or leave both out."
        )
    if mode == "score":
        raise UserError("--mode=score has no static signature: leave out --static_batch.")
    for name, least in (("static_batch", 1), ("static_length", 2)):
        if given[name] < least:
            raise UserError(f"--{name}={given[name]}: write {least} or more.")
    return batch, length
