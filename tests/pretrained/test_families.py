"""Marian, BART and T5 of Hugging Face's files: the numbers they have at home."""

import dataclasses
import functools
import gzip
import json
import lzma
import shutil
from pathlib import Path

import keras
import keras_nlp
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from keras import ops
from keras_hub.src.utils.keras_utils import gelu_approximate

from tests.testdata.lines import plain_lines, text_lines
from tf_teaforn import testing
from tf_teaforn.data.marian_tokenizer import MarianTokenizer
from tf_teaforn.data.tokenizer import load_sentencepiece
from tf_teaforn.data.tokenizers import load_tokenizer, save_tokenizer
from tf_teaforn.decoding import SearchConfig, search
from tf_teaforn.errors import UserError
from tf_teaforn.inference import Translator
from tf_teaforn.models import presets
from tf_teaforn.models.architecture import architecture_json, build_architecture
from tf_teaforn.models.catalog import build_model
from tf_teaforn.models.hub import gelu_new
from tf_teaforn.models.position import position_signal
from tf_teaforn.pretrained.hub import HubPreset
from tf_teaforn.pretrained.importers import open_folder
from tf_teaforn.pretrained.tensors import open_safetensors
from tf_teaforn.teaforn import TeaForN
from tf_teaforn.tf_backend.export import ServingModule, write_saved_model

TESTDATA = Path(__file__).resolve().parent.parent / "testdata"
NAMES = ("bart", "t5", "t5_v1_1", "marian")
families = pytest.mark.parametrize("name", NAMES)
tokenizers = pytest.mark.parametrize("name", ["bart", "t5", "marian"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder as Hugging Face keeps it}."""
    root = tmp_path_factory.mktemp("families")
    vocabulary = lzma.decompress((TESTDATA / "t5" / "spiece.model.xz").read_bytes())
    for name in NAMES:
        shutil.copytree(TESTDATA / name, root / name)
        if name.startswith("t5"):
            (root / name / "spiece.model").write_bytes(vocabulary)
    return {name: root / name for name in NAMES}


@pytest.fixture
def changed(folders, tmp_path):
    """Copies a folder with other settings and tensors (None: without them); returns the copy."""

    def change(name, settings=None, tensors=None):
        folder = shutil.copytree(folders[name], tmp_path / "copy")
        config = json.loads((folder / "config.json").read_text())
        config = {k: v for k, v in (config | (settings or {})).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        weights = safetensors.numpy.load_file(folder / "model.safetensors")
        weights = {k: v for k, v in (weights | (tensors or {})).items() if v is not None}
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        return folder

    return change


class Family:
    """What Hugging Face computes, in our ids."""

    def __init__(self, folder):
        self.pretrained = open_folder(folder)
        self.seq2seq = self.pretrained.build()
        self.expected = dict(np.load(folder / "expected.npz"))
        size = self.seq2seq.vocabulary_size
        self.order = getattr(self.pretrained.tokenizer, "order", np.arange(size))
        self.ours = np.argsort(self.order)

    def ids(self, key):
        return self.ours[self.expected[key]].astype("int32")

    def batch(self, source_ids, target_ids):
        """(inputs, targets, weights)."""
        start = np.full_like(target_ids[:, :1], self.seq2seq.start_id)
        decoder_ids = np.concatenate([start, target_ids[:, :-1]], axis=1)
        inputs = {"encoder_token_ids": source_ids, "decoder_token_ids": decoder_ids}
        return inputs, target_ids, (target_ids != 0).astype("float32")


@pytest.fixture(scope="module")
def family(folders):
    """Opens a family; the same `Family` each time, whose weights tests must not change."""
    return functools.cache(lambda name: Family(folders[name]))


@pytest.mark.parametrize("name", ["bart", "t5_v1_1", "marian"])
def test_decoder_keeps_the_contract(name, family):
    decoder = family(name).seq2seq.decoder
    signal = None
    if name == "bart":
        table = ops.convert_to_numpy(decoder.position_embedding.position_embeddings)
        signal = table.__getitem__
    elif name == "marian":
        signal = functools.partial(position_signal, width=16, layout="half_split")
    testing.check_decoder(decoder, 16, position_signal=signal, tolerance=1e-4)


@families
def test_logits_loss_and_search(name, family):
    it = family(name)
    inputs, targets, weights = it.batch(it.ids("source_ids"), it.ids("target_ids"))
    logits = ops.convert_to_numpy(it.seq2seq(inputs))
    expected = it.expected["logits"][..., it.order]
    np.testing.assert_allclose(logits[weights > 0], expected[weights > 0], atol=1e-4)
    sums = TeaForN(it.seq2seq, n=1, label_smoothing=0.0).loss_sums(inputs, targets, weights)
    loss = float(sums.total) / float(sums.tokens)
    assert loss == pytest.approx(float(it.expected["loss"]), abs=1e-5)
    for key, beam_size in (("greedy", 1), ("beam", 4)):
        config = SearchConfig(beam_size=beam_size, alpha=0.0, max_length=12)
        found = search(it.seq2seq, {"encoder_token_ids": inputs["encoder_token_ids"]}, config)
        for row, theirs in zip(np.asarray(found.token_ids)[:, 0], it.ids(key), strict=True):
            end = theirs.tolist().index(1) + 1
            assert row[:end].tolist() == theirs[:end].tolist() and not row[end:].any()
    np.testing.assert_allclose(found.scores[:, 0], it.expected["beam_scores"], atol=1e-4)


@families
def test_fine_tuning_follows_the_curve(name, folders):
    it = Family(folders[name])
    model = TeaForN(it.seq2seq, n=1, label_smoothing=0.0)
    model.compile(keras.optimizers.Adam(1e-4, epsilon=1e-8))
    source_ids = it.ids("source_ids")
    data = tf.data.Dataset.from_tensors(it.batch(source_ids, source_ids)).repeat(20)
    losses = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (losses.append(logs["loss"]), model.reset_metrics())
    )
    model.fit(data, verbose=0, callbacks=[callback])
    assert len(losses) == 20 and losses[0] - losses[-1] > 0.1
    np.testing.assert_allclose(losses, it.expected["curve"], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "shared"), [("bart", False), ("t5", False), ("marian", False), ("t5", True)]
)
def test_every_stage_learns_real_text(name, shared, folders):
    it = Family(folders[name])
    model = TeaForN(it.seq2seq, n=3, discount=0.5, shared=shared, label_smoothing=0.0)
    model.compile(keras.optimizers.Adam(2e-2), run_eagerly=True)
    tokenizer = it.pretrained.tokenizer
    ids = tokenizer.encode(plain_lines(8), 12).numpy()
    batch = it.batch(ids, tokenizer.targets.encode(plain_lines(8), 12).numpy())
    history = model.fit(*batch[:2], sample_weight=batch[2], batch_size=16, epochs=4, verbose=0)
    for stage in range(3):
        first, *_, last = history.history[f"loss_{stage}"]
        assert last < 0.9 * first


@tokenizers
def test_tokenizer_is_that_of_transformers(name, folders, tmp_path):
    tokenizer = open_folder(folders[name]).tokenizer
    save_tokenizer(tokenizer, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    order = getattr(tokenizer, "order", np.arange(tokenizer.vocabulary_size))
    expected = np.load(folders[name] / "expected.npz")
    ends = np.cumsum(expected["line_lengths"])
    lines = text_lines()
    # Kernels are dropped when a seed is set.
    tf.random.set_seed(0)
    rows = tf.function(lambda texts: tokenizer.encode(texts, 1000))(tf.constant(lines)).numpy()
    texts = json.loads(gzip.decompress((folders[name] / "lines.json.gz").read_bytes()))
    decoded = [text.decode() for text in tokenizer.detokenize(rows).numpy()]
    for line, row, text, theirs, their_text in zip(
        lines, rows, decoded, np.split(expected["line_ids"], ends[:-1]), texts, strict=True
    ):
        assert order[row[row != 0]].tolist() == theirs.tolist(), line
        assert text == their_text, line


@pytest.mark.parametrize(
    ("name", "of_text"),
    [
        ("bart", ["RegexSplitWithOffsets"]),
        ("t5", ["SentencepieceDetokenizeOp", "SentencepieceTokenizeOp"]),
        ("marian", ["SentencepieceDetokenizeOp", "SentencepieceTokenizeOp"]),
    ],
)
def test_a_served_model_needs_tensorflow_and_its_text_alone(name, of_text, family, tmp_path):
    it = family(name)
    config = SearchConfig(beam_size=2, max_length=6)
    module = ServingModule(it.seq2seq, it.pretrained.tokenizer, config, 24, 24)
    texts = ["my brother's station", "", "the train leaves"]
    folder = write_saved_model(
        module, tmp_path, {}, {"sources": texts, "targets": texts}, "predict"
    )
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    graph = serve.graph.as_graph_def()
    functions = [node for function in graph.library.function for node in function.node_def]
    operators = {node.op for node in (*graph.node, *functions)}
    # Python functions of this process are no part of a SavedModel.
    assert not [name for name in operators if "PyFunc" in name]
    assert sorted(name for name in operators if not hasattr(tf.raw_ops, name)) == of_text
    served = serve(tf.constant(texts))
    ids = it.pretrained.tokenizer.encode(texts, 24)
    found = search(it.seq2seq, {"encoder_token_ids": ids}, config)
    expected = it.pretrained.tokenizer.targets.detokenize(found.token_ids[:, 0]).numpy()
    assert served["outputs"].numpy()[[0, 2]].tolist() == expected[[0, 2]].tolist()


@pytest.mark.parametrize(
    "line",
    [
        ">>fra<< We use cout<< function",
        ">>fra<< a >>deu<< b",
        ">>fra<<>>deu<< a",
        ">>fra<<",
        ">>x\ny<< a",
        ">><< a<<",
        ">>fra the train leaves",
        " >>fra<< a",
        "a >>fra<< b",
    ],
)
def test_language_codes_of_marian(line, folders):
    """A code ends at the first "<<", as in transformers 5.24, and pieces are sentencepiece's."""
    files = {path.name: path.read_bytes() for path in folders["marian"].iterdir()}
    ids = json.loads(files["vocab.json"])
    ids |= {">>fra<<": len(ids), ">>deu<<": len(ids) + 1}
    tokenizer = MarianTokenizer(files | {"vocab.json": json.dumps(ids).encode()})
    end = line.find("<<") + 2 if line.startswith(">>") and "<<" in line else 0
    pieces = [line[:end]] if end else []
    pieces += load_sentencepiece(files["source.spm"]).encode(line[end:], out_type=str)
    (row,) = tokenizer.tokenize([line]).to_list()
    assert [tokenizer.order[i] for i in row] == [ids.get(p, ids["<unk>"]) for p in pieces]


def test_words_of_bart_beyond_1024_bytes_are_merged_in_parts(folders, monkeypatch):
    tokenizer = open_folder(folders["bart"]).tokenizer
    word = "a" + "re" * 600
    first, second, long = tokenizer.tokenize([word[:1024], word[1024:], word]).to_list()
    assert len(first) < 600 and long == first + second[1:]
    texts = [f"see {'é' * 1100} and {word}", word]
    rows = tokenizer.encode(texts, 9999)
    assert [text.decode() for text in tokenizer.detokenize(rows).numpy()] == texts
    monkeypatch.setattr("tf_teaforn.data.byte_pair_tokenizer._LONGEST", 9999)
    whole, other = tokenizer.tokenize([word[:1024], word]).to_list()
    assert whole == first and other != long


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_newlines_as_lines_of_files_have_them(name, family):
    it = family(name)
    tokenizer = it.pretrained.tokenizer
    config = SearchConfig(beam_size=2, max_length=6)
    translator = Translator(it.seq2seq, tokenizer, config, 24, 24)
    module = ServingModule(it.seq2seq, tokenizer, config, 24, 24)

    def answers(source, target):
        return (
            translator.decode([source]),
            translator.score([source], [target]),
            translator.count_tokens([target]),
            module._predict(tf.constant([source]))["scores"],
            module._score(tf.constant([source]), tf.constant([target]))["scores"],
        )

    lines = answers("my brother<n>leaves", "the<n>train")
    for line, text in zip(lines, answers("my brother\nleaves", "the\ntrain"), strict=True):
        np.testing.assert_array_equal(line, text)


@families
def test_it_keeps_its_architecture(name, family):
    seq2seq = family(name).seq2seq
    copy = build_architecture(architecture_json(seq2seq), "test", dropout=0.3)
    assert [w.path for w in copy.weights] == [w.path for w in seq2seq.weights]
    assert copy.decoder.settings["dropout"] == 0.3 and copy.start_id == seq2seq.start_id
    copy = build_architecture(architecture_json(seq2seq), "test")
    copy.set_weights(seq2seq.get_weights())
    inputs, _, _ = family(name).batch(*[family(name).ids("source_ids")] * 2)
    np.testing.assert_array_equal(copy(inputs), seq2seq(inputs))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("bart", "model.decoder.layers.1.encoder_attn.q_proj.bias"),
        ("t5", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("marian", "model.shared.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, tensor, changed):
    wrong = {tensor: np.zeros((3, 5), "float32"), "extra.weight": np.zeros(2, "float32")}
    with pytest.raises(UserError) as error:
        open_folder(changed(name, tensors=wrong)).build()
    assert f"{tensor} has shape (3, 5) instead of (" in str(error.value)
    assert "extra.weight is unknown" in str(error.value)
    shutil.rmtree(Path(str(error.value).split(" does not fit")[0]))
    with pytest.raises(UserError, match=f"{tensor} is missing"):
        open_folder(changed(name, tensors={tensor: None})).build()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bart", {"activation_function": "relu"}, "activation_function must be 'gelu'"),
        ("bart", {"vocab_size": 100}, "vocab.json has ids up to 419.*do not belong together"),
        ("bart", {"pad_token_id": 0}, "does not fit vocab.json: pad_token_id is 0, not 1"),
        ("bart", {"eos_token_id": 3}, "does not fit vocab.json: eos_token_id is 3, not 2"),
        ("bart", {"decoder_start_token_id": 420}, "must be an id from 0 to 419, not 420"),
        ("t5", {"relative_attention_num_buckets": 16}, "num_buckets must be 32, not 16"),
        ("t5", {"feed_forward_proj": "linear"}, "'linear' is none of relu, gated-gelu"),
        ("t5", {"d_kv": 5}, r"SelfAttention.k.weight has shape \(12, 16\) instead of \(10, 16\)"),
        ("marian", {"pad_token_id": 0}, "vocab.json: pad_token_id is 0, not 168"),
        ("marian", {"normalize_before": True}, "normalize_before True is not supported"),
    ],
)
def test_settings_that_we_cannot_compute_are_refused(name, settings, message, changed):
    with pytest.raises(UserError, match=message):
        open_folder(changed(name, settings)).build()


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_tokens_that_were_added_to_a_vocabulary_are_refused(name, changed):
    folder = changed(name)
    # Both names are of no text, wherever they are.
    added = {"<extra_id_7>": 500, "<mask>": 501}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    open_folder(folder)
    decoder = {"added_tokens_decoder": {"0": {"content": "<x>"}, "502": {"content": "<hl>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    with pytest.raises(UserError, match="copy: the tokens <hl> were added to its vocabulary"):
        open_folder(folder)


def test_bart_s_vocabulary_spells_every_byte(changed):
    folder = changed("bart")
    ids = json.loads((folder / "vocab.json").read_text())
    ids["ÿ and more"] = ids.pop("ÿ")
    (folder / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(
        UserError, match="vocab.json is not BART's: 1 of 256 bytes have no token in it"
    ):
        open_folder(folder)


def test_marks_of_old_checkpoints_of_bart_are_left_out(changed, family):
    marks = {f"model.{part}.version": np.ones(1, "float32") for part in ("encoder", "decoder")}
    model = open_folder(changed("bart", tensors=marks)).build()
    for ours, weight in zip(family("bart").seq2seq.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, weight)


def test_settings_of_generation_are_told(changed):
    folder = changed("bart")
    settings = {"num_beams": 4, "min_length": 56, "eos_token_id": 2, "length_penalty": None}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (note,) = open_folder(folder).notes
    assert "not taken over: num_beams=4, min_length=56. See" in note


def test_target_languages_of_marian_are_told(folders, changed):
    assert not any("target languages" in note for note in open_folder(folders["marian"]).notes)
    folder = changed("marian")
    ids = json.loads((folder / "vocab.json").read_text())
    pad = ids.pop("<pad>")
    ids |= {">>fra<<": pad, ">>deu<<": pad + 1, "<pad>": pad + 2}
    (folder / "vocab.json").write_text(json.dumps(ids))
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": pad + 3, "pad_token_id": pad + 2, "decoder_start_token_id": pad + 2}
    (folder / "config.json").write_text(json.dumps(config))
    note = open_folder(folder).notes[-1]
    assert note == "It has 2 target languages: a source begins with one of >>fra<<, >>deu<<"


def test_bart_starts_from_an_id(folders, changed):
    model = open_folder(changed("bart", {"decoder_start_token_id": 0})).build()
    assert model.start_id == 2
    path = shutil.copytree(folders["bart"], folders["bart"].parent / "null") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_start_token_id": None}))
    with pytest.raises(UserError, match="decoder_start_token_id must be .* not None"):
        open_folder(path.parent)


@pytest.mark.parametrize(
    ("name", "missing"), [("bart", "merges.txt"), ("t5", "spiece.model"), ("marian", "target.spm")]
)
def test_a_missing_vocabulary_is_named(name, missing, changed):
    folder = changed(name)
    (folder / missing).unlink()
    with pytest.raises(UserError, match=f"has no {missing}, the vocabulary: copy what is missing"):
        open_folder(folder)


@pytest.mark.parametrize("merge", [str.split, str])
def test_bart_with_tokenizer_json_alone(merge, changed, family):
    """As transformers 5.24 writes it (pairs), and as older ones do (strings)."""
    folder = changed("bart")
    ids = json.loads((folder / "vocab.json").read_text())
    _, *merges = (folder / "merges.txt").read_text().splitlines()
    model = {"type": "BPE", "vocab": ids, "merges": [merge(line) for line in merges]}
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    found = open_folder(folder).tokenizer
    expected = family("bart").pretrained.tokenizer
    np.testing.assert_array_equal(found.order, expected.order)
    lines = text_lines()
    np.testing.assert_array_equal(found.encode(lines, 1000), expected.encode(lines, 1000))
    model = {"type": "Unigram", "vocab": [["a", -1.0]]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(UserError, match="json has no vocabulary of BART.*: copy vocab.json"):
        open_folder(folder)


def test_bart_without_a_row_for_the_mask(changed, folders, family):
    """As the published models of summarisation; `<mask>` has the last id of vocab.json."""
    it = family("bart")
    weights = safetensors.numpy.load_file(folders["bart"] / "model.safetensors")
    weights["model.shared.weight"] = np.delete(weights["model.shared.weight"], 4, axis=0)
    weights["final_logits_bias"] = np.delete(weights["final_logits_bias"], 4, axis=1)
    folder = changed("bart", {"vocab_size": 419}, weights)
    ids = json.loads((folder / "vocab.json").read_text())
    ids = {piece: i - (i > 4) for piece, i in ids.items()} | {"<mask>": 419}
    (folder / "vocab.json").write_text(json.dumps(ids))
    cut = open_folder(folder)
    lines = plain_lines(20)
    rows = it.pretrained.tokenizer.encode(lines, 99).numpy()
    found = cut.tokenizer.encode(lines, 99)
    np.testing.assert_array_equal(found, rows - (rows > 4))
    assert [text.decode() for text in cut.tokenizer.detokenize(found).numpy()] == lines
    inputs, _, _ = it.batch(it.ids("source_ids"), it.ids("target_ids"))
    logits = cut.build()({name: value - (value > 4) for name, value in inputs.items()})
    expected = np.delete(ops.convert_to_numpy(it.seq2seq(inputs)), 4, axis=-1)
    np.testing.assert_allclose(ops.convert_to_numpy(logits), expected, atol=1e-5)


def test_t5_with_an_output_of_its_own(changed, family):
    """T5 1.1 as it was published: the softmax weights are not the embedding."""
    it = family("t5_v1_1")
    output = np.random.default_rng(0).normal(size=(312, 16)).astype("float32")
    model = open_folder(changed("t5_v1_1", tensors={"lm_head.weight": output})).build()
    inputs, _, _ = it.batch(it.ids("source_ids"), it.ids("target_ids"))
    seq2seq = it.seq2seq
    memory, mask = seq2seq.encode(inputs)
    x = seq2seq.embed(inputs["decoder_token_ids"])
    hidden = seq2seq.decoder(x, seq2seq.decoder.prepare(memory, mask))
    expected = ops.convert_to_numpy(hidden) @ output.T
    np.testing.assert_allclose(ops.convert_to_numpy(model(inputs)), expected, atol=1e-4)
    probabilities = keras.ops.softmax(expected)
    mixed = model.embedding.expectation(expected, 312)
    table = ops.convert_to_numpy(model.embedding.embeddings)
    np.testing.assert_allclose(mixed, ops.convert_to_numpy(probabilities) @ table, atol=1e-4)


@pytest.mark.parametrize(("model_type", "factor"), [("mt5", 1.0), ("t5", 16**-0.5)])
def test_only_t5_divides_where_tied(model_type, factor, changed, family):
    """Transformers 5 writes that mT5, too, is tied."""
    it = family("t5_v1_1")
    settings = {"model_type": model_type, "tie_word_embeddings": True}
    model = open_folder(changed("t5_v1_1", settings | {"scale_decoder_outputs": None})).build()
    inputs, _, _ = it.batch(it.ids("source_ids"), it.ids("target_ids"))
    expected = factor * ops.convert_to_numpy(it.seq2seq(inputs))
    np.testing.assert_allclose(ops.convert_to_numpy(model(inputs)), expected, atol=1e-5)


def test_a_shared_table_under_another_name(changed, family, monkeypatch):
    """As facebook/bart-large-cnn has it; an index of shards that are gone lies beside."""
    read = []

    def counted(folder):
        file = open_safetensors(folder)
        return dataclasses.replace(file, read=lambda name: read.append(name) or file.read(name))

    monkeypatch.setattr("tf_teaforn.pretrained.bart_layout.open_safetensors", counted)
    folder = changed("bart")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    kept = "model.decoder.embed_tokens.weight"
    weights[kept] = weights.pop("model.shared.weight")
    names = ("model.shared.weight", "model.encoder.embed_tokens.weight", "lm_head.weight")
    metadata = {"format": "pt", **dict.fromkeys(names, kept)}
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata)
    index = {"weight_map": {"model.shared.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for ours, weight in zip(
        family("bart").seq2seq.weights, open_folder(folder).build().weights, strict=True
    ):
        np.testing.assert_array_equal(ours, weight)
    assert [name for name in read if name in (kept, *names)] == ["model.shared.weight"]


COPIES = ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")


def with_copies(changed, folders, name, copies, keep, add=0.0):
    """(folder, names of the shared table and of its copies).

    `keep` says whether the first is there.
    """
    prefix = "" if name == "t5" else "model."
    shared = f"{prefix}shared.weight"
    names = [f"{'' if copy == 'lm_head' else prefix}{copy}.weight" for copy in copies]
    table = safetensors.numpy.load_file(folders[name] / "model.safetensors")[shared]
    tensors = {shared: table if keep else None, **dict.fromkeys(names, table + np.float32(add))}
    return changed(name, tensors=tensors), shared, names


@pytest.mark.parametrize(
    ("keep", "copies"), [(True, COPIES), *((False, (copy,)) for copy in COPIES)]
)
@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_copies_of_the_shared_table(name, keep, copies, changed, folders, family):
    """One may stand for it, as in transformers 5.24."""
    folder, _, _ = with_copies(changed, folders, name, copies, keep)
    for ours, weight in zip(
        family(name).seq2seq.weights, open_folder(folder).build().weights, strict=True
    ):
        np.testing.assert_array_equal(ours, weight)


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("bart", "lm_head"),
        ("marian", "decoder.embed_tokens"),
        ("t5", "encoder.embed_tokens"),
        ("t5", "decoder.embed_tokens"),
    ],
)
def test_a_copy_of_other_values_is_refused(name, copy, changed, folders):
    """transformers 5.24 takes it for a table of its own."""
    folder, shared, (copy,) = with_copies(changed, folders, name, (copy,), keep=True, add=1.0)
    with pytest.raises(UserError, match=f"{copy} differs from {shared}: they must be one"):
        open_folder(folder).build()


def test_a_file_without_the_head_of_a_task(changed, family):
    """As BartModel is saved."""
    folder = changed("bart", tensors={"final_logits_bias": None})
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    assert all(name.startswith("model.") for name in weights)
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    safetensors.numpy.save_file(bare, folder / "model.safetensors")
    for ours, weight in zip(
        family("bart").seq2seq.weights, open_folder(folder).build().weights, strict=True
    ):
        np.testing.assert_array_equal(ours, weight)


def test_marian_that_starts_from_a_vector(changed, folders, family):
    """Fine-tuning by transformers moves the row of padding."""
    weights = safetensors.numpy.load_file(folders["marian"] / "model.safetensors")
    table = weights["model.shared.weight"].copy()
    table[-1] = 1.0
    moved = open_folder(changed("marian", tensors={"model.shared.weight": table})).build()
    it = family("marian")
    inputs, _, _ = it.batch(it.ids("source_ids"), it.ids("target_ids"))
    assert np.all(ops.convert_to_numpy(moved.embed(np.zeros(1, "int32"))) == 4.0)
    difference = ops.convert_to_numpy(moved(inputs) - it.seq2seq(inputs))
    assert np.abs(difference[:, 0, 1:]).max() > 1e-2


def test_positions_past_the_table_of_bart(family):
    decoder = family("bart").seq2seq.decoder
    table = ops.convert_to_numpy(decoder.position_embedding.position_embeddings)
    # With its own vector each position adds up to nothing: then all outputs are alike.
    x = -table[None, 1:64]
    prepared = decoder.prepare(np.zeros_like(x), np.ones((1, 63), bool))
    outputs = ops.convert_to_numpy(decoder(x, prepared, start_position=1))
    assert outputs.shape == (1, 63, 16) and np.ptp(table[1:64], axis=0).min() > 0.01
    np.testing.assert_allclose(outputs, np.broadcast_to(outputs[:, :1], outputs.shape), atol=1e-5)
    with pytest.raises(UserError, match="63 tokens at positions from 2 on exceed the 64 positions"):
        decoder(x, prepared, start_position=2)


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_packed_rows_are_their_sentences(name, family):
    """Also where a row is longer than BART's table of positions."""
    seq2seq = family(name).seq2seq
    model = TeaForN(seq2seq, n=3, discount=0.5, label_smoothing=0.0)
    pairs = testing.random_pairs(18, 12, 12)
    losses = []
    for batch in (testing.padded_batch(pairs), testing.packed_batch([pairs[:2], pairs[2:]])):
        inputs, targets, weights = batch
        starts = inputs["decoder_token_ids"] == 0
        starts[:, 1:] &= weights[:, 1:] > 0
        inputs["decoder_token_ids"][starts] = seq2seq.start_id
        losses.append(model.loss_sums(inputs, targets, weights).stages)
    assert all(ids.shape[1] > 64 for ids in inputs.values())
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.fixture(scope="module")
def t5_preset(folders, tmp_path_factory):
    """(KerasHub's own model, name of its preset): T5 1.1 with random weights."""
    backbone = keras_nlp.models.T5Backbone(
        vocabulary_size=312,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
        key_value_dim=6,
        activation="gelu",
        tie_embedding_weights=False,
    )
    vocabulary = (folders["t5"] / "spiece.model").read_bytes()
    tokenizer = keras_nlp.models.T5Tokenizer(proto=vocabulary)
    preprocessor = keras_nlp.models.T5Seq2SeqLMPreprocessor(tokenizer, 16, 16)
    model = keras_nlp.models.T5Seq2SeqLM(backbone=backbone, preprocessor=preprocessor)
    folder = tmp_path_factory.mktemp("presets") / "t5"
    model.save_to_preset(str(folder))
    return model, f"keras_nlp:{folder}"


@pytest.mark.parametrize(
    ("name", "file"), [("t5", "spiece.model"), ("marian", "source.spm"), ("marian", "target.spm")]
)
def test_a_vocabulary_that_git_has_not_fetched(name, file, changed):
    folder = changed(name)
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(UserError, match=f"{file}: not a SentencePiece model, or a pointer of git"):
        open_folder(folder).tokenizer.targets.tokenize(["a"])


@families
def test_missing_weights_are_told_of_at_once(name, changed):
    folder = changed(name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model.safetensors is missing. Weights are read from"):
        open_folder(folder)


def test_a_prefix_space_is_refused(changed):
    folder = changed("bart")
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with pytest.raises(UserError, match="add_prefix_space is not supported"):
        open_folder(folder)


@keras.saving.register_keras_serializable("test_families")
def _squared(x):
    return x * x


def test_flan_t5_of_keras_hub(caplog):
    """Its presets name a function, which a model directory may not hold."""
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    for tied in (False, True):
        backbone = keras_nlp.models.T5Backbone(
            vocabulary_size=40,
            **sizes,
            activation=gelu_approximate,
            tie_embedding_weights=tied,
        )
        model = presets.seq2seq_of(backbone, None, 0.0)
        again = build_architecture(architecture_json(model), "x")
        assert again.decoder.settings["activation"] == "gelu_new"
        assert ("Hugging Face's" in caplog.text) == tied
    x = np.linspace(-3, 3, 7, dtype="float32")
    np.testing.assert_array_equal(gelu_new(x), gelu_approximate(x))
    backbone = keras_nlp.models.T5Backbone(40, **sizes, activation=_squared)
    with pytest.raises(UserError, match="its activation .* is not supported"):
        presets.seq2seq_of(backbone, None, 0.0)


def test_t5_of_keras_hub(t5_preset):
    theirs, name = t5_preset
    model = build_model(name, 312)
    ids = np.random.default_rng(0).integers(2, 300, (2, 7)).astype("int32")
    inputs = {"encoder_token_ids": ids, "decoder_token_ids": np.roll(ids, 1, axis=1)}
    masks = {f"{part}_padding_mask": np.ones_like(ids) for part in ("encoder", "decoder")}
    np.testing.assert_allclose(model(inputs), theirs({**inputs, **masks}), atol=1e-5)
    with pytest.raises(UserError, match="has 312 tokens, not 300"):
        build_model(name, 300)
    with pytest.raises(UserError, match="has its sizes: num_layers cannot be set"):
        build_model(name, 312, num_layers=1)
    with pytest.raises(UserError, match="--model=keras_nlp:no_such_preset: KerasHub cannot open"):
        build_model("keras_nlp:no_such_preset", None)


def test_bart_as_keras_hub_converts_it(changed, family):
    folder = changed("bart", {"num_hidden_layers": 2})
    converted = HubPreset(f"keras_nlp:{folder}")
    ours = family("bart")
    model = converted.build(dropout=0.2)
    assert model.start_id == 1 and model.decoder.settings["dropout"] == 0.2
    for a, b in zip(model.weights, ours.seq2seq.weights, strict=True):
        assert a.path == b.path
        np.testing.assert_array_equal(a, b)
    text = ["my brother's station 🙂"]
    np.testing.assert_array_equal(
        converted.tokenizer.encode(text, 99), ours.pretrained.tokenizer.encode(text, 99)
    )


def test_bin_train_starts_from_a_preset(
    t5_preset, folders, corpus, call_command, eagerly, tmp_path, capsys
):
    name = t5_preset[1]
    command = (
        "train",
        "--task=text",
        *(f"--{split}_files={corpus / split}.tsv" for split in ("train", "valid", "test")),
        "--max_source_length=40",
        "--max_target_length=40",
        "--batch_tokens=512",
        "--train_steps=1",
        "--eval_every=1",
        "--n=2",
        "--beam_size=1",
        "--decode_length=4",
        f"--model={name}",
        f"--model_dir={tmp_path / 'model'}",
    )
    assert call_command(*command, "--init_from=elsewhere") == 2
    assert "names the weights too: leave out --init_from, or --model." in capsys.readouterr().err
    bart = f"keras_nlp:{folders['bart']}"
    refused = [flag for flag in command if not flag.startswith("--model=")]
    assert call_command(*refused, f"--model={bart}", "--max_target_length=64") == 2
    message = "--max_target_length=64 and --n=2 need 65 positions; the model has 64"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model/architecture.json").exists()
    shutil.rmtree(tmp_path / "model")
    with eagerly():
        assert call_command(*command) == 0
    assert json.loads((tmp_path / "model/config.json").read_text())["model"]["model"] == name
