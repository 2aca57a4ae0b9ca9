import logging
import random
import re
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import sentencepiece
import tensorflow as tf

from tf_teaforn.cli import app
from tf_teaforn.data.tokenizer import Tokenizer, _draw, _parts, add_eos, train_sentencepiece
from tf_teaforn.errors import UserError

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen".split()
SENTENCES = [
    f"{NUMBERS[i % 14]} and {NUMBERS[i * 5 % 14]} make {NUMBERS[i * i % 14]}, said No. {i}."
    for i in range(400)
]
LINES = [
    "",
    " ",
    "   ",
    "a",
    " leading",
    "trailing ",
    "two  spaces   three",
    "tab\tinside\t",
    "carriage return\r",
    "one\ntwo",
    "\n",
    "\n\n x \n",
    " \n ",
    "emoji 😀 👩‍👩‍👧 🇫🇷",
    "שלום עולם",
    "مرحبا بالعالم",
    "漢字とかな",
    "e\u0301 é ﬁ ½ Å",
    "\u2028\u2029\u0085\u00a0\ufeff",
    "\0",
    "</s> <pad> <unk> <0x41> < n>",
    "\U0010ffff\ud7ff",
    "two and three make five, said No. 17.",
    "word " * 300,
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.model"
    train_sentencepiece(SENTENCES, 340, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return Tokenizer.load(model_path)


@pytest.fixture(scope="module")
def library(model_path):
    """The sentencepiece Python library on the same model."""
    return sentencepiece.SentencePieceProcessor(model_file=str(model_path))


def decoded(strings):
    return [string.decode() for string in strings.numpy()]


def test_special_pieces(library):
    assert [library.id_to_piece(i) for i in range(4)] == ["<pad>", "</s>", "<unk>", "<n>"]
    assert library.bos_id() == -1
    assert library.get_piece_size() == 340


def test_training_is_deterministic(model_path, tmp_path):
    train_sentencepiece(iter(SENTENCES), 340, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == model_path.read_bytes()


def test_training_on_a_sample_is_deterministic(model_path, tmp_path):
    def train():
        path = tmp_path / "vocab.model"
        train_sentencepiece(SENTENCES, 310, path, input_sentence_size=101)
        return path.read_bytes()

    assert train() == train() != model_path.read_bytes()


def test_training_on_a_share_of_the_characters(model_path, tmp_path, caplog):
    def train(most):
        caplog.clear()
        with caplog.at_level("INFO"):
            train_sentencepiece(SENTENCES, 340, tmp_path / "vocab.model", input_characters=most)
        return (tmp_path / "vocab.model").read_bytes()

    total = sum(map(len, SENTENCES))
    assert train(total) == model_path.read_bytes()
    assert "drawn from all" not in caplog.text
    assert train(total - 1) == train(total - 1) != model_path.read_bytes()
    found = re.search(r"on (\d+) of 400 sentences, drawn .*: (\d+) of (\d+) char", caplog.text)
    assert int(found[1]) < 400 and int(found[2]) < int(found[3]) == total


def test_commands_say_which_share_they_train_on(tmp_path, monkeypatch, capsys):
    def command(values):
        train_sentencepiece(SENTENCES, 310, tmp_path / "vocab.model", input_characters=10_000)

    level = logging.root.level
    # Those of pytest: a command sets nothing up beside them.
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setattr(app, "quiet_tensorflow", lambda: None)
    try:
        app.run(lambda values: None, command, "")
    finally:
        logging.root.setLevel(level)
    found = re.findall(r"vocabulary on \d+ of 400 sent.*of \d+ char.*\n", capsys.readouterr().err)
    assert len(found) == 1


def test_what_is_drawn_comes_from_all_of_the_text():
    texts = [f"{i:04}" for i in range(8_000)]
    drawn = _draw(iter(texts), 4 * 1_000)
    assert 900 <= len(drawn) <= 1_000 and drawn == sorted({*drawn})
    quarters = [sum(low <= int(t) < low + 2_000 for t in drawn) for low in range(0, 8_000, 2_000)]
    # A quarter each; 5 standard deviations are 68.
    assert all(abs(count - len(drawn) / 4) < 68 for count in quarters)
    assert _draw(iter(texts), 4 * 8_000) == texts


def test_newlines_separate_training_sentences(model_path, tmp_path):
    texts = ["\n".join(SENTENCES[i : i + 10]) + "\n\n" for i in range(0, 400, 10)]
    train_sentencepiece(texts, 340, tmp_path / "joined.model")
    assert (tmp_path / "joined.model").read_bytes() == model_path.read_bytes()


def test_long_documents_are_trained_on(tmp_path):
    # sentencepiece leaves out what is longer than 4192 bytes unless told otherwise.
    document = " ".join(SENTENCES)
    assert len(document) > 10_000
    train_sentencepiece([document], 310, tmp_path / "vocab.model")
    [row] = Tokenizer.load(tmp_path / "vocab.model").tokenize(["eleven and thirteen"]).to_list()
    assert len(row) < 15


def test_a_long_line_is_trained_on_in_parts():
    words = "".join(random.Random(3).choices("abc  ", k=9_000))
    parts = list(_parts(words))
    assert " ".join(parts) == words and max(map(len, parts)) <= 4_000 and len(parts) == 3
    assert list(_parts("x" * 9_000)) == ["x" * 4_000, "x" * 4_000, "x" * 1_000]
    assert list(_parts("")) == []


def test_nothing_is_left_beside_the_model(tmp_path):
    train_sentencepiece(SENTENCES, 340, tmp_path / "new" / "folder" / "vocab.model")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["vocab.model"]


def test_too_large_a_vocabulary(tmp_path):
    with pytest.raises(UserError, match="--vocab_size=5000 .* highest possible value is") as error:
        train_sentencepiece(SENTENCES, 5000, tmp_path / "vocab.model")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    highest = int(re.search(r"value is (\d+)", str(error.value))[1])
    train_sentencepiece(SENTENCES, highest, tmp_path / "vocab.model")
    assert Tokenizer.load(tmp_path / "vocab.model").vocabulary_size == highest
    with pytest.raises(UserError):
        train_sentencepiece(SENTENCES, highest + 1, tmp_path / "vocab.model")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_too_small_a_vocabulary(tmp_path, size):
    with pytest.raises(UserError) as error:
        train_sentencepiece(SENTENCES, size, tmp_path / "vocab.model")
    # 4 special pieces, 256 bytes, 34 characters.
    assert str(error.value) == (
        f"--vocab_size={size} is too small for this text: its characters and all bytes alone need "
        "294 pieces. Raise it."
    )


@pytest.mark.parametrize("sentences", [[], ["", "\n"]])
def test_no_text(sentences, tmp_path):
    with pytest.raises(UserError, match="no text"):
        train_sentencepiece(sentences, 340, tmp_path / "vocab.model")


def test_errors_of_the_sentences_pass_through(tmp_path):
    def sentences():
        yield "good"
        raise UserError("file.txt:2: bad")

    with pytest.raises(UserError, match="^file.txt:2: bad$"):
        train_sentencepiece(sentences(), 300, tmp_path / "vocab.model")
    assert list(tmp_path.iterdir()) == []


def test_equals_the_sentencepiece_library(tokenizer, library):
    lines = LINES + SENTENCES
    expected = library.encode([line.replace("\n", "<n>") for line in lines])
    assert tokenizer.tokenize(lines).to_list() == expected


def test_round_trip(tokenizer):
    lines = LINES + SENTENCES
    assert decoded(tokenizer.detokenize(tokenizer.encode(lines, 10_000))) == lines


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<")))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode([text], 1000)
    assert decoded(tokenizer.detokenize(ids)) == [text]
    assert 2 not in ids.numpy()


def test_the_newline_is_one_piece(tokenizer, library):
    [row] = tokenizer.tokenize(["one\ntwo"]).to_list()
    assert row == library.encode("one<n>two")
    assert row.count(library.piece_to_id("<n>")) == 1


def test_what_does_not_round_trip(tokenizer):
    ids = tokenizer.encode(["a<n>b", "a▁b"], 100)
    assert decoded(tokenizer.detokenize(ids)) == ["a\nb", "a b"]


@pytest.mark.parametrize("max_length", [1, 2, 3, 5, 8, 1000])
def test_encode_cuts_before_eos(tokenizer, library, max_length):
    lines = ["", "one", SENTENCES[0], SENTENCES[1] * 3]
    rows = [ids[: max_length - 1] + [1] for ids in library.encode(lines)]
    width = max(map(len, rows))
    ids = tokenizer.encode(lines, max_length)
    assert ids.dtype == tf.int32
    assert ids.numpy().tolist() == [row + [0] * (width - len(row)) for row in rows]


def test_encode_nothing(tokenizer):
    assert tokenizer.encode(tf.constant([], tf.string), 10).shape[0] == 0
    assert tokenizer.detokenize(tf.zeros([0, 5], tf.int32)).shape == (0,)
    assert decoded(tokenizer.detokenize(tf.zeros([2, 0], tf.int32))) == ["", ""]


def test_add_eos():
    tokens = tf.ragged.constant([[5, 6, 7, 8], [], [5, 6], [5]], dtype=tf.int32)
    assert add_eos(tokens, 3).to_list() == [[5, 6, 1], [1], [5, 6, 1], [5, 1]]


def test_detokenize_stops_at_eos_and_skips_padding(tokenizer, library):
    one, two = library.encode(["one", "two"])
    rows = [one + [1] + two, [0] + one + [0, 0] + two, [1] + one, [0, 0], one + [1, 1, 0]]
    ids = tf.ragged.constant(rows, dtype=tf.int32).to_tensor(0)
    assert decoded(tokenizer.detokenize(ids)) == ["one", "one two", "", "", "one"]


def test_detokenize_unknown_and_broken_bytes(tokenizer, library):
    the_bytes = [library.piece_to_id(piece) for piece in ("<0xF0>", "<0x9F>")]
    rows = [[2] * 3, the_bytes + library.encode("one")[:1]]
    ids = tf.ragged.constant(rows, dtype=tf.int32).to_tensor(0)
    unknown, broken = decoded(tokenizer.detokenize(ids))
    assert unknown == library.decode([2] * 3).removeprefix(" ")
    assert broken.startswith("\ufffd")


def test_in_the_data_graph(tokenizer):
    dataset = tf.data.Dataset.from_tensor_slices(SENTENCES).batch(64)
    rows = dataset.map(lambda batch: tokenizer.encode(batch, 50)).map(tokenizer.detokenize)
    assert [text.decode() for batch in rows for text in batch.numpy()] == SENTENCES


def test_in_a_saved_model(tokenizer, tmp_path):
    module = tf.Module()
    module.tokenizer = tokenizer

    def echo(inputs):
        return {"outputs": tokenizer.detokenize(tokenizer.encode(inputs, 100))}

    signature = tf.function(echo, input_signature=[tf.TensorSpec([None], tf.string, "inputs")])
    tf.saved_model.save(module, str(tmp_path), signatures=signature)
    serve = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    assert decoded(serve(inputs=tf.constant(LINES[:20]))["outputs"]) == LINES[:20]


def test_attributes(tokenizer, model_path):
    assert tokenizer.vocabulary_size == 340
    assert tokenizer.model_bytes == model_path.read_bytes()
    assert re.fullmatch("[0-9a-f]{64}", tokenizer.fingerprint)


def test_load_names_the_file(model_path, tmp_path):
    path = tmp_path / "v.model"
    with pytest.raises(UserError, match=f"{re.escape(str(path))}: .*No such file"):
        Tokenizer.load(path)
    for content in (b"", b"no model at all", model_path.read_bytes()[:-5]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: not a SentencePiece model"):
            Tokenizer.load(path)


def test_foreign_special_ids_are_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(tmp_path / "default"),
        vocab_size=90,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="at ids 0, 1, 2; this has them at -1, 2, 0"):
        Tokenizer.load(tmp_path / "default.model")


def test_setting_the_seed_leaves_a_tokenizer_alone(model_path):
    tokenizer = Tokenizer.load(model_path)
    before = tokenizer.tokenize(["one and two make three"]).to_list()
    tf.random.set_seed(3)
    assert tokenizer.tokenize(["one and two make three"]).to_list() == before
