"""Gap-sentence pre-training (Zhang et al. 2020, PEGASUS): learn to summarise from documents alone.

    bin/train --task=gsg --train_files='news/train-*.txt.gz' --valid_files=news/valid.txt \\
        --model_dir=DIR
    bin/train --task=gsg --tfds_name=newsroom --tfds_feature=text --model_dir=DIR

A file has one document a line, `<n>` for a newline in it. What is masked is chosen while the
documents are read, by all cores; `bin/prepare --task=gsg …` does it once, on one machine or many,
and `bin/train --task=gsg --prepared=DIR` reads what it wrote.

    bin/train --task=text --vocab=DIR/vocab.model --init_from=DIR …    fine-tunes the result

Defaults are those of PEGASUS' HugeNews model, which TeaForN's authors start from: 45% of the
sentences, of which a fifth stays in the document; 512 and 256 tokens, 500,000 steps of Adafactor
without label smoothing, but that the rate rises linearly over the first 10,000, where PEGASUS holds
it constant; see `--gap_stochastic` for the later, published variant. Its batch of 8,192 documents,
from a TPU pod, is `--batch_tokens=4194304`; one machine computes it in parts, with
`--micro_batch_tokens`. Decoders: `--n=1`, as in the paper; `--n=3` trains just so, at the cost that
the paper's Table 6 measures.

Expected: no score is published. ROUGE of the masked sentences picks the best checkpoint, on the
first 1,000 validation documents (`--eval_examples`).
"""

from tf_teaforn.data.documents import DocumentFiles, GapSource, PreparedSource, TfdsDocuments
from tf_teaforn.data.gaps import MASK, GapSettings
from tf_teaforn.errors import UserError
from tf_teaforn.task import Task, register_task

_SPLITS = "train,validation,test"


def gsg_task(
    train_files="",
    valid_files="",
    test_files="",
    tfds_name="",
    tfds_feature="",
    tfds_splits=_SPLITS,
    prepared="",
    gap_ratio=GapSettings.ratio,
    gap_intact=GapSettings.intact,
    gap_selection=GapSettings.selection,
    gap_stochastic=GapSettings.stochastic,
    gap_max_words=GapSettings.max_words,
    gap_language=GapSettings.language,
    gap_seed=GapSettings.seed,
):
    """The task "gsg" on these documents.

    Args:
        train_files, valid_files, test_files: see `DocumentFiles`.
        tfds_name, tfds_feature: builder and text feature of TensorFlow Datasets, instead of files.
        tfds_splits: its splits for training, validation and test, slices such as
            "train[:1%]" included.
        prepared: folder that bin/prepare wrote, instead of documents.
        gap_ratio, gap_intact, gap_selection, gap_stochastic, gap_max_words, gap_language,
            gap_seed: see `GapSettings`.

    Raises:
        UserError: none or several of files, TFDS and a prepared folder; settings out of range.
    """
    settings = GapSettings(
        gap_ratio,
        gap_intact,
        gap_selection,
        gap_stochastic,
        gap_max_words,
        gap_language,
        gap_seed,
    )
    files = train_files or valid_files or test_files
    given = [
        flag
        for flag, value in (
            ("--train_files", files),
            ("--tfds_name", tfds_name),
            ("--prepared", prepared),
        )
        if value
    ]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: documents come from one of them. Leave one.")
    if bool(tfds_name) != bool(tfds_feature):
        raise UserError("--tfds_name and --tfds_feature go together: write both.")
    if tfds_splits != _SPLITS and not tfds_name:
        raise UserError(f"--tfds_splits={tfds_splits} belongs to --tfds_name. Leave it out.")
    if prepared and settings != GapSettings():
        raise UserError(
            "--prepared: gap sentences have been chosen. Leave out --gap_*, or give them to "
            "bin/prepare."
        )
    if prepared:
        source = PreparedSource(prepared)
    elif tfds_name:
        names = tfds_splits.split(",")
        if len(names) > 3:
            raise UserError(
                f"--tfds_splits={tfds_splits}: write at most three, for training, validation "
                "and test."
            )
        splits = dict(zip(("train", "validation", "test"), names, strict=False))
        source = GapSource(TfdsDocuments(tfds_name, tfds_feature, tfds_feature, splits), settings)
    else:
        source = GapSource(DocumentFiles(train_files, valid_files, test_files), settings)
    return Task(
        name="gsg",
        description="gap-sentence pre-training on documents: files, --tfds_name or --prepared",
        source=source,
        metrics=("rouge",),
        headline_metric="rougeL",
        defaults={
            "model": "transformer_base",
            "n": 1,
            "discount": 0.5,
            "shared": True,
            "train_steps": 500_000,
            "eval_every": 10_000,
            "eval_examples": 1_000,
            "batch_tokens": 32 * 512,
            "vocab_size": 32_000,
            "max_source_length": 512,
            "max_target_length": 256,
            "decode_length": 256,
            "optimizer": "adafactor",
            "schedule": "inverse_sqrt",
            "warmup_steps": 10_000,
            "learning_rate": 1e-2,
            "label_smoothing": 0.0,
            "beam_size": 1,
            "beam_alpha": 0.8,
        },
        from_files=gsg_task,
        symbols=(MASK,),
        truncate=True,
    )


register_task(gsg_task())
