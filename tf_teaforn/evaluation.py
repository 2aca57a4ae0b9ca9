"""Metrics of a model on a split: hypotheses and scores, written beside the model."""

import json
import time

from etils import epath

from tf_teaforn import model_dir as model_dirs
from tf_teaforn.errors import UserError
from tf_teaforn.inference import Translator, search_config
from tf_teaforn.metrics import compute_metrics


def read_examples(source, split):
    """(sources, references) of a split as two lists of str."""
    pairs = [(s.decode(), t.decode()) for s, t in source.dataset(split).as_numpy_iterator()]
    if not pairs:
        raise UserError(f"The split {split} has no examples.")
    return tuple(map(list, zip(*pairs, strict=True)))


def evaluate_translator(translator, task, sources, references, progress=False):
    """Decodes `sources`; returns (`MetricResult`, hypotheses)."""
    hypotheses = [best[0][0] for best in translator.decode(sources, progress=progress)]
    return compute_metrics(task.metrics, hypotheses, references), hypotheses


def evaluate(model_dir, task, split="test", checkpoint="best", beam_sizes=None, alpha=None):
    """Scores a checkpoint and writes `eval/<split>-<checkpoint>-beam<k>-alpha<a>.json` and `.txt`.

    Args:
        model_dir: what `bin/train` wrote.
        task: the run's `Task`.
        split: of the task's data.
        checkpoint: best, latest, <step> or average:<n>.
        beam_sizes: list of beam widths; default: the run's.
        alpha: exponent of the length penalty; default: the run's.

    Returns:
        The contents of the JSON files, a list.
    """
    config = model_dirs.read_config(model_dir)
    alpha = config.decoding.beam_alpha if alpha is None else alpha
    searches = [
        search_config(config.decoding, beam_size=beam_size, alpha=float(alpha))
        for beam_size in beam_sizes or [config.decoding.beam_size]
    ]
    sources, references = read_examples(task.source, split)
    tokenizer = model_dirs.read_tokenizer(model_dir)
    seq2seq, found = model_dirs.load_seq2seq(
        model_dir, config, tokenizer.vocabulary_size, checkpoint
    )
    folder = epath.Path(model_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for search in searches:
        translator = Translator(
            seq2seq,
            tokenizer,
            search,
            config.data.max_source_length,
            config.data.max_target_length,
        )
        start = time.time()
        metrics, hypotheses = evaluate_translator(
            translator, task, sources, references, progress=True
        )
        result = {
            "metrics": dict(metrics.values),
            "signature": dict(metrics.signatures),
            "examples": len(sources),
            "beam_size": search.beam_size,
            "beam_alpha": search.alpha,
            "checkpoint": found.name,
            "steps": list(found.steps),
            "split": split,
            "seconds": time.time() - start,
        }
        name = f"{split}-{found.name}-beam{search.beam_size}-alpha{search.alpha}"
        name = name.replace("/", "_").replace(":", "_")
        lines = (text.replace("\n", "<n>") + "\n" for text in hypotheses)
        (folder / f"{name}.txt").write_bytes("".join(lines).encode())
        (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        results.append(result)
    return results
