"""The gap-sentence task: its options, its vocabulary, a few steps of training."""

import json

import pytest

from tasks.gsg import gsg_task
from tests import nano_model
from tests.documents import DOCUMENTS
from tf_teaforn.data.documents import GapSource, PreparedSource
from tf_teaforn.data.gaps import MASK, GapSettings
from tf_teaforn.data.tokenizer import Tokenizer, train_sentencepiece
from tf_teaforn.data.tokenizers import load_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.task import get_task
from tf_teaforn.training import missing_symbols


def test_settings_of_pegasus():
    task = gsg_task("a.txt", "b.txt")
    assert task.source.settings == GapSettings()
    assert (task.source.settings.ratio, task.source.settings.intact) == (0.45, 0.2)
    expected = {"max_source_length": 512, "max_target_length": 256, "label_smoothing": 0.0}
    assert {name: task.defaults[name] for name in expected} == expected
    assert task.symbols == (MASK,)


def test_options_reach_the_source():
    task = gsg_task(
        tfds_name="newsroom",
        tfds_feature="text",
        tfds_splits="train[1%:],train[:1%]",
        gap_ratio=0.3,
        gap_intact=0.0,
        gap_selection="random",
        gap_stochastic=True,
        gap_max_words=100,
        gap_language="fr",
        gap_seed=4,
    )
    assert task.source.settings == GapSettings(0.3, 0.0, "random", True, 100, "fr", 4)
    assert task.source.source.tfds_splits == {"train": "train[1%:]", "validation": "train[:1%]"}
    assert gsg_task(prepared="/pairs").source == PreparedSource("/pairs")
    assert isinstance(gsg_task(valid_files="b.txt").source, GapSource)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train_files": "a", "prepared": "b"},
            "--train_files and --prepared: docu",
        ),
        ({"tfds_name": "a"}, "--tfds_name and --tfds_feature go together: write both"),
        (
            {"tfds_name": "a", "tfds_feature": "b", "tfds_splits": "a,b,c,d"},
            "^--tfds_splits=a,b,c,d: write at most three, for training, validation and test",
        ),
        ({"train_files": "a", "tfds_splits": "a,b"}, "^--tfds_splits=a,b belongs to --tfds_name"),
        ({"prepared": "a", "gap_seed": 4}, "--prepared: gap sentences have been chosen"),
        ({"gap_ratio": 2.0}, "--gap_ratio=2.0: write a number above 0 and below 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        gsg_task(**options)


@pytest.mark.parametrize(("symbols", "missing"), [((), [MASK]), ((MASK,), [])])
def test_a_vocabulary_without_the_mask_is_found(tmp_path, symbols, missing):
    train_sentencepiece(DOCUMENTS, 400, tmp_path / "vocab.model", symbols=symbols)
    tokenizer = Tokenizer.load(tmp_path / "vocab.model")
    assert missing_symbols(gsg_task("a.txt"), tokenizer) == missing
    assert missing_symbols(get_task("text"), tokenizer) == []


def test_training(tmp_path, call_command, eagerly):
    """N = 3 learns; sources longer than the maximum are cut, not left out."""
    lines = [document.replace("\n", "<n>") for document in DOCUMENTS]
    (tmp_path / "documents.txt").write_text("\n".join(lines * 8))
    flags = (
        "--task=gsg",
        f"--train_files={tmp_path}/documents.txt",
        f"--valid_files={tmp_path}/doc*.txt",
        "--gap_intact=0",
        *nano_model.FLAGS,
        "--decode_length=8",
        "--vocab_size=400",
        "--max_source_length=48",
        "--max_target_length=48",
        "--batching=pack",
        "--batch_tokens=512",
        "--n=3",
        "--train_steps=8",
        "--log_every=4",
        "--eval_every=8",
        "--warmup_steps=1",
        "--learning_rate=0.02",
    )
    with eagerly():
        assert call_command("train", *flags, f"--model_dir={tmp_path}/model") == 0
    records = [json.loads(line) for line in open(tmp_path / "model" / "metrics.jsonl")]
    train = [record for record in records if record["kind"] == "train"]
    for stage in range(3):
        assert train[1][f"loss_{stage}"] < train[0][f"loss_{stage}"]
    tokenizer = load_tokenizer(tmp_path / "model")
    ids = tokenizer.tokenize([f"One. {MASK} Two."])[0].numpy()
    mask = tokenizer.tokenize([MASK])[0].numpy()[-1]
    assert list(ids).count(mask) == 1
    assert tokenizer.detokenize([ids]).numpy()[0].decode() == f"One. {MASK} Two."
