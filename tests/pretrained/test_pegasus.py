"""PEGASUS of Hugging Face's and of Google's files: the numbers they have at home."""

import functools
import json
import shutil

import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from keras import ops

from tests.testdata.lines import plain_lines
from tf_teaforn import testing
from tf_teaforn.decoding import SearchConfig
from tf_teaforn.errors import UserError
from tf_teaforn.models.position import position_signal
from tf_teaforn.pretrained import google_pegasus
from tf_teaforn.pretrained.importers import open_folder
from tf_teaforn.pretrained.transformer import build_transformer, layer_variables
from tf_teaforn.teaforn import TeaForN
from tf_teaforn.tf_backend.inference import score_function, search_function


@pytest.fixture(scope="module")
def expected(pegasus_folder):
    return dict(np.load(pegasus_folder / "expected.npz"))


@pytest.fixture(scope="module")
def seq2seq(pegasus_folder):
    return open_folder(pegasus_folder).build()


@pytest.fixture
def changed(pegasus_folder, tmp_path):
    """Copies the folder with other settings or tensors; returns the copy."""

    def change(settings=None, tensors=None, files=()):
        folder = tmp_path / "copy"
        shutil.copytree(pegasus_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | (settings or {})))
        weights = safetensors.numpy.load_file(folder / "model.safetensors")
        weights = {k: v for k, v in (weights | (tensors or {})).items() if v is not None}
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        for name in files:
            (folder / name).unlink()
        return folder

    return change


def teacher_forced(source_ids, target_ids):
    source_ids, target_ids = source_ids.astype("int32"), target_ids.astype("int32")
    decoder_ids = np.pad(target_ids[:, :-1], ((0, 0), (1, 0)))
    return {"encoder_token_ids": source_ids, "decoder_token_ids": decoder_ids}, target_ids


def test_what_the_folder_says(pegasus_folder, seq2seq):
    pretrained = open_folder(pegasus_folder)
    assert (pretrained.model, pretrained.tokenizer.vocabulary_size) == ("pegasus", 273)
    assert seq2seq.vocabulary_size == 273 and seq2seq.start_id == 0
    settings = seq2seq.decoder.settings
    assert (settings["num_layers"], settings["num_heads"], settings["dropout"]) == (2, 2, 0.0)
    assert seq2seq.embedding.bias() is None


def test_decoders_keep_the_contract(seq2seq, google):
    for model, width, layout in ((seq2seq, 16, "half_split"), (google[1], 128, "tensor2tensor")):
        signal = functools.partial(position_signal, width=width, layout=layout)
        testing.check_decoder(model.decoder, width, position_signal=signal, tolerance=1e-4)


def test_logits_and_loss(seq2seq, expected):
    inputs, targets = teacher_forced(expected["source_ids"], expected["target_ids"])
    logits = ops.convert_to_numpy(seq2seq(inputs))
    there = targets != 0
    np.testing.assert_allclose(logits[there], expected["logits"][there], atol=1e-4)
    model = TeaForN(seq2seq, n=1, label_smoothing=0.0)
    sums = model.loss_sums(inputs, targets, there.astype("float32"))
    loss = float(sums.stages[0]) / float(sums.tokens)
    assert loss == pytest.approx(float(expected["loss"]), abs=1e-5)


@pytest.mark.parametrize(("name", "beam_size"), [("greedy", 1), ("beam", 4)])
def test_search(name, beam_size, seq2seq, expected):
    config = SearchConfig(beam_size=beam_size, alpha=0.0, max_length=12)
    found = search_function(seq2seq, config)(expected["source_ids"].astype("int32"))
    for row, theirs in zip(found.token_ids.numpy()[:, 0], expected[name], strict=True):
        theirs = theirs.tolist()
        end = theirs.index(1) + 1
        assert row[:end].tolist() == theirs[:end] and not row[end:].any()
    if name == "beam":
        np.testing.assert_allclose(found.scores[:, 0], expected["beam_scores"], atol=1e-4)


def test_fine_tuning_follows_the_curve(pegasus_folder, expected):
    model = TeaForN(open_folder(pegasus_folder).build(), n=1, label_smoothing=0.0)
    model.compile(keras.optimizers.Adam(1e-4, epsilon=1e-8))
    inputs, targets = teacher_forced(expected["source_ids"], expected["source_ids"])
    weights = (targets != 0).astype("float32")
    data = tf.data.Dataset.from_tensors((inputs, targets, weights)).repeat(20)
    losses = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            losses.append(logs["loss"]),
            model.reset_metrics(),
        )
    )
    model.fit(data, verbose=0, callbacks=[callback])
    assert len(losses) == 20 and losses[0] - losses[-1] > 0.1
    np.testing.assert_allclose(losses, expected["curve"], rtol=0, atol=1e-3)


def test_every_stage_learns_real_text(pegasus_folder):
    pretrained = open_folder(pegasus_folder)
    model = TeaForN(pretrained.build(), n=3, discount=0.5, shared=False, label_smoothing=0.0)
    # A few steps are done before a graph of three decoders would be traced.
    model.compile(keras.optimizers.Adam(1e-2), run_eagerly=True)
    ids = pretrained.tokenizer.encode(plain_lines(32), 16).numpy()
    inputs, targets = teacher_forced(ids, ids)
    history = model.fit(inputs, targets, batch_size=32, epochs=8, verbose=0).history
    for stage in range(3):
        first, *_, last = history[f"loss_{stage}"]
        assert last < 0.6 * first


def test_it_keeps_its_architecture_and_dropout(seq2seq, pegasus_folder, changed):
    rates = {"dropout": 0.2, "attention_dropout": 0.0, "activation_dropout": 0.3}
    pretrained = open_folder(changed(rates))
    for dropout, names in ((None, (0.2, 0.0, 0.3)), (0.1, (0.1, 0.0, 0.1))):
        settings = pretrained.build(dropout=dropout).encoder.settings
        assert tuple(settings[name] for name in rates) == names
    mixed = open_folder(pegasus_folder).build(dtype="mixed_bfloat16")
    assert mixed.decoder.compute_dtype == "bfloat16"
    np.testing.assert_array_equal(
        mixed.embedding.embeddings.numpy(), seq2seq.embedding.embeddings.numpy()
    )


def test_a_bias_of_the_logits_counts_everywhere(changed, seq2seq, expected):
    bias = np.random.default_rng(0).normal(size=(1, 273)).astype("float32")
    biased = open_folder(changed(tensors={"final_logits_bias": bias})).build()
    inputs, targets = teacher_forced(expected["source_ids"], expected["target_ids"])
    logits = ops.convert_to_numpy(seq2seq(inputs)) + bias
    np.testing.assert_allclose(ops.convert_to_numpy(biased(inputs)), logits, atol=1e-5)
    log_probabilities = np.take_along_axis(
        ops.convert_to_numpy(ops.log_softmax(logits)), targets[..., None], -1
    )[..., 0]
    weights = (targets != 0).astype("float32")
    sums = (log_probabilities * weights).sum(-1)
    scores = score_function(biased)(inputs["encoder_token_ids"], targets)
    np.testing.assert_allclose(scores, sums, rtol=1e-5)
    model = TeaForN(biased, n=1, label_smoothing=0.0)
    (loss,) = model.loss_sums(inputs, targets, weights).stages
    assert float(loss) == pytest.approx(-sums.sum(), rel=1e-5)
    assert "logits_bias" not in [weight.name for weight in model.trainable_weights]


def test_a_row_of_padding_that_was_trained_is_the_start(changed, pegasus_folder, expected):
    """The same as another token of that vector in front."""
    table = safetensors.numpy.load_file(pegasus_folder / "model.safetensors")["model.shared.weight"]
    inputs, _ = teacher_forced(expected["source_ids"], expected["target_ids"])
    unused = 272
    assert unused not in np.concatenate([ids.ravel() for ids in inputs.values()])
    table = table.copy()
    table[[0, unused]] = np.random.default_rng(0).normal(size=16)
    model = open_folder(changed(tensors={"model.shared.weight": table})).build()
    assert model.start_id == 0
    logits = ops.convert_to_numpy(model(inputs))
    np.testing.assert_allclose(logits[..., 0], logits[..., unused], atol=1e-5)
    inputs["decoder_token_ids"][:, 0] = unused
    there = np.pad(inputs["decoder_token_ids"][:, 1:] != 0, ((0, 0), (1, 0)), constant_values=True)
    expected_logits = ops.convert_to_numpy(model(inputs))
    np.testing.assert_allclose(logits[there], expected_logits[there], atol=1e-5)
    plain = open_folder(pegasus_folder).build()
    assert np.abs(logits - ops.convert_to_numpy(plain(inputs)))[there].max() > 0.1


def test_half_precision_files_and_shards(changed, expected, seq2seq):
    folder = changed()
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    half = {name: weights[name].astype("float16") for name in names[::2]}
    safetensors.numpy.save_file(half, folder / "a.safetensors")
    # bfloat16 is the upper half of a float32; the library's numpy side cannot write it.
    upper = {name: (weights[name].view("<u4") >> 16).astype("<u2") for name in names[1::2]}
    header, start = {}, 0
    for name, value in upper.items():
        end = start + value.nbytes
        shape = list(value.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in upper.values())
    (folder / "b.safetensors").write_bytes(content)
    places = {name: file for file, members in parts.items() for name in members}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    inputs, _ = teacher_forced(expected["source_ids"], expected["target_ids"])
    logits = ops.convert_to_numpy(open_folder(folder).build()(inputs))
    np.testing.assert_allclose(logits, ops.convert_to_numpy(seq2seq(inputs)), atol=0.1)
    (folder / "b.safetensors").write_bytes(content[:-1])
    with pytest.raises(UserError, match="b.safetensors is no safetensors file .* does not fit"):
        open_folder(folder).build()
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match="b.safetensors is missing"):
        open_folder(folder).build()


QUERY = "model.decoder.layers.1.encoder_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("settings", "tensors", "files", "message"),
    [
        ({}, {QUERY: None}, (), f"{QUERY} is missing"),
        ({}, {"model.more": np.zeros(2, "f")}, (), "model.more is unknown"),
        ({}, {QUERY: np.zeros((16, 8), "f")}, (), r"q_proj.weight has shape \(16, 8\) instead of"),
        ({"decoder_layers": 1}, {}, (), r"model.decoder.layers.1.*is unknown.*; and \d+ more"),
        ({"pad_token_id": 5}, {}, (), "'pad_token_id': 5"),
        ({"activation_function": "tanh"}, {}, (), "activation_function 'tanh' is none of relu"),
        ({"tie_word_embeddings": False}, {}, (), "tied"),
        ({"d_model": None}, {}, (), "config.json has no d_model"),
        ({"encoder_attention_heads": 3}, {}, (), "settings cannot be used: .*num_heads 3"),
        ({"dropout": "much"}, {}, (), "settings cannot be used"),
        ({"vocab_size": "much"}, {}, (), "config.json has no vocab_size"),
        ({"vocab_size": 200}, {}, (), "spiece.model: spiece.model has ids up to 272"),
        ({}, {"lm_head.weight": np.ones((273, 16), "f")}, (), "lm_head.weight differs from"),
        ({}, {}, ("spiece.model",), "has no spiece.model, the vocabulary: copy"),
        ({}, {}, ("model.safetensors",), "model.safetensors is missing"),
        (
            {},
            {"model.encoder.embed_positions.weight": np.ones((64, 16), "f")},
            (),
            "embed_positions.weight does not hold the sinusoids",
        ),
    ],
)
def test_errors_name_the_tensor_or_setting(settings, tensors, files, message, changed):
    folder = changed(settings, tensors, files)
    with pytest.raises(UserError, match=message):
        open_folder(folder).build()


def test_copies_that_older_files_have(changed, pegasus_folder, seq2seq, expected):
    table = safetensors.numpy.load_file(pegasus_folder / "model.safetensors")["model.shared.weight"]
    positions = ops.convert_to_numpy(position_signal(np.arange(64), 16, "half_split"))
    copies = {"lm_head.weight": table, "model.decoder.embed_tokens.weight": table}
    folder = changed(tensors=copies | {"model.decoder.embed_positions.weight": positions})
    inputs, _ = teacher_forced(expected["source_ids"], expected["target_ids"])
    np.testing.assert_array_equal(open_folder(folder).build()(inputs), seq2seq(inputs))


# Names and shapes as a checkpoint of google-research/pegasus lists them.
GOOGLE_NAMES = {
    "embeddings/weights": (273, 128),
    "encoder/LayerNorm/beta": (128,),
    "encoder/layer_1/self_attention/LayerNorm/gamma": (128,),
    "encoder/layer_1/self_attention/q_proj/kernel": (128, 128),
    "encoder/layer_1/ffn/LayerNorm/beta": (128,),
    "encoder/layer_1/ffn/dense/kernel": (128, 24),
    "encoder/layer_1/ffn/dense/bias": (24,),
    "encoder/layer_1/ffn/dense_1/kernel": (24, 128),
    "encoder/layer_1/ffn/dense_1/bias": (128,),
    "decoder/LayerNorm/gamma": (128,),
    "decoder/layer_0/self_attention/output_proj/kernel": (128, 128),
    "decoder/layer_0/memory_attention/LayerNorm/beta": (128,),
    "decoder/layer_0/memory_attention/k_proj/kernel": (128, 128),
    "decoder/layer_0/memory_attention/v_proj/kernel": (128, 128),
}


def write_checkpoint(prefix, values):
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=[*values],
        shape_and_slices=[""] * len(values),
        tensors=[*values.values()],
    )


@pytest.fixture(scope="module")
def google(pegasus_folder, tmp_path_factory):
    """(folder of a checkpoint under Google's names, the model it was written from)."""
    sizes = {"num_layers": 2, "hidden_dim": 128, "intermediate_dim": 24, "num_heads": 2}
    sizes |= {"norm_epsilon": 1e-12, "position_signal": "tensor2tensor"}
    keras.utils.set_random_seed(0)
    model = build_transformer(273, sizes, sizes, dtype=None, scaled=True)
    random = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(weight + 0.1 * random.normal(size=weight.shape))
    variables = {
        google_pegasus.google_name(*key): variable
        for key, variable in layer_variables(model).items()
    }
    variables["embeddings/weights"] = model.embedding.embeddings
    values = {name: variable.numpy() for name, variable in variables.items()}
    values["global_step"] = np.int64(7)
    values["decoder/LayerNorm/gamma/Adafactor"] = np.zeros(128, "float32")
    folder = tmp_path_factory.mktemp("google")
    write_checkpoint(folder / "model.ckpt-7", values)
    shutil.copy(pegasus_folder / "spiece.model", folder / "c4.unigram.newline.model")
    return folder, model


def test_google_checkpoint(google, expected):
    folder, model = google
    listed = dict(tf.train.list_variables(str(folder / "model.ckpt-7")))
    assert {name: tuple(listed[name]) for name in GOOGLE_NAMES} == GOOGLE_NAMES
    pretrained = open_folder(folder)
    copy = pretrained.build(dropout=0.0)
    assert len(copy.weights) == len(model.weights) == len(listed) - 2
    for one, other in zip(copy.weights, model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    inputs, _ = teacher_forced(expected["source_ids"], expected["target_ids"])
    np.testing.assert_array_equal(copy(inputs), model(inputs))
    assert copy.encoder.settings["num_heads"] == 2
    assert pretrained.build().encoder.settings["attention_dropout"] == 0.1
    # Its row of padding counts in the softmax; texts and decoding see zeros.
    assert np.any(copy.embedding.embeddings[0]) and not np.any(copy.embed(np.zeros(3, "int32")))


def test_google_equals_hugging_face(google, tmp_path, expected, pegasus_folder):
    """The same weights through both importers, sinusoids and the row of padding set alike."""
    folder, model = google
    tensors = {}
    for key, variable in layer_variables(model).items():
        part, layer, sublayer, piece, parameter = key
        name = google_pegasus.google_name(*key)
        for ours, theirs in (
            ("memory_attention/", "encoder_attn/"),
            ("self_attention/", "self_attn/"),
            ("encoder_attn/LayerNorm/", "encoder_attn_layer_norm/"),
            ("self_attn/LayerNorm/", "self_attn_layer_norm/"),
            ("ffn/LayerNorm/", "final_layer_norm/"),
            ("coder/LayerNorm/", "coder/layer_norm/"),
            ("ffn/dense/", "fc1/"),
            ("ffn/dense_1/", "fc2/"),
            ("output_proj/", "out_proj/"),
            ("/layer_0", "/layers/0"),
            ("/layer_1", "/layers/1"),
            ("kernel", "weight"),
            ("gamma", "weight"),
            ("beta", "bias"),
            ("/", "."),
        ):
            name = name.replace(ours, theirs)
        value = variable.numpy()
        tensors[f"model.{name}"] = np.ascontiguousarray(value.T)
        if "_proj." in name:
            bias = f"model.{name}".replace("weight", "bias")
            tensors[bias] = np.zeros(value.shape[-1], "float32")
    table = model.embedding.embeddings.numpy()
    table[0] = 0.0
    copy = tmp_path / "hugging_face"
    shutil.copytree(pegasus_folder, copy)
    settings = json.loads((copy / "config.json").read_text()) | {"d_model": 128}
    (copy / "config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(
        {**tensors, "model.shared.weight": table}, copy / "model.safetensors"
    )
    hugging_face, ours = open_folder(copy).build(), open_folder(folder).build(dropout=0.0)
    ours.embedding.embeddings.assign(table)
    for part in (hugging_face.encoder, hugging_face.decoder):
        part.settings["position_signal"] = "tensor2tensor"
    inputs, _ = teacher_forced(expected["source_ids"], expected["target_ids"])
    np.testing.assert_allclose(hugging_face(inputs), ours(inputs), atol=1e-4, rtol=1e-4)


def test_google_errors(google, tmp_path):
    folder, _ = google
    for path in folder.glob("model.ckpt*"):
        shutil.copy(path, tmp_path)
    with pytest.raises(UserError, match="copy the SentencePiece model"):
        open_folder(tmp_path)
    reader = tf.train.load_checkpoint(str(folder / "model.ckpt-7"))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    missing = "decoder/layer_0/memory_attention/k_proj/kernel"
    values.pop(missing)
    values["decoder/layer_0/extra"] = np.zeros(2, "float32")
    values["encoder/LayerNorm/beta"] = np.zeros(3, "float32")
    # The newest one counts.
    write_checkpoint(tmp_path / "model.ckpt-10", values)
    shutil.copy(folder / "c4.unigram.newline.model", tmp_path)
    with pytest.raises(UserError, match="model.ckpt-10 does not fit") as error:
        open_folder(tmp_path).build()
    for words in (f"{missing} is missing", "extra is unknown", "beta has shape (3,) instead of"):
        assert words in str(error.value)
    (tmp_path / "model.ckpt-10.index").write_bytes(b"damaged")
    with pytest.raises(UserError, match="model.ckpt-10 is no TensorFlow checkpoint"):
        open_folder(tmp_path)
