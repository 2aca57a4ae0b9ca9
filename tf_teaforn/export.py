"""From a model directory to a SavedModel."""

import dataclasses

from tf_teaforn import model_dir as model_dirs
from tf_teaforn.errors import UserError
from tf_teaforn.inference import search_config
from tf_teaforn.tf_backend.export import MODES, ServingModule, write_saved_model


def export(model_dir, export_dir, checkpoint="best", mode="predict", **search_overrides):
    """Exports Decoder-0 of a checkpoint.

    Args:
        model_dir: what `bin/train` wrote.
        export_dir: receives `<integer version>/`.
        checkpoint: best, latest, <step> or average:<n>.
        mode: "predict" (signatures serving_default and token_ids) or "score".
        **search_overrides: fields of `SearchConfig`, where they differ from the run's settings.

    Returns:
        The new folder.

    Raises:
        UserError: no such folder, checkpoint or mode, or an impossible search.
    """
    if mode not in MODES:
        raise UserError(f"--mode={mode}: write {' or '.join(MODES)}.")
    config = model_dirs.read_config(model_dir)
    search = search_config(config.decoding, **search_overrides)
    tokenizer = model_dirs.read_tokenizer(model_dir)
    seq2seq, found = model_dirs.load_seq2seq(
        model_dir, config, tokenizer.vocabulary_size, checkpoint
    )
    module = ServingModule(
        seq2seq, tokenizer, search, config.data.max_source_length, config.data.max_target_length
    )
    details = {
        "mode": mode,
        "checkpoint": found.name,
        "steps": list(found.steps),
        "task": config.task,
        "max_source_length": config.data.max_source_length,
        "max_target_length": config.data.max_target_length,
        **dataclasses.asdict(search),
    }
    examples = model_dirs.read_examples(model_dir)
    return write_saved_model(module, export_dir, details, examples, mode)
