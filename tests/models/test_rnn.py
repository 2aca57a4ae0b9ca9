"""The recurrent models keep the decoder contract, compute what NumPy computes, and serve."""

import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.gradients import loss_and_gradients
from tf_teaforn import TeaForN, decoding, testing
from tf_teaforn.data.tokenizer import Tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.catalog import build_model
from tf_teaforn.models.rnn import CELLS, RnnDecoder, RnnEncoder
from tf_teaforn.tf_backend.export import ServingModule, write_saved_model

WIDTH = 6
SETTINGS = {"num_layers": 2, "hidden_dim": WIDTH, "dropout": 0.0}
cells = pytest.mark.parametrize("cell", ["lstm", "gru"])


def model_of(cell, vocabulary_size=testing.TINY_VOCABULARY_SIZE, **overrides):
    settings = {**SETTINGS, "cell": cell, **overrides}
    return testing.randomize(build_model("rnn_base", vocabulary_size, **settings))


def batch_of(pairs):
    return testing.padded_batch(testing.random_pairs(pairs, 6, 5))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class NumpyRnn:
    """The equations, a sentence and a position at a time; weights by the ends of their paths."""

    def __init__(self, model, cell):
        self.weights = {w.path: ops.convert_to_numpy(w).astype("float64") for w in model.weights}
        self.cell = cell
        self.table = self.of("embedding/embeddings")

    def of(self, end):
        (value,) = [value for path, value in self.weights.items() if path.endswith(end)]
        return value

    def recur(self, layer, x_TxD):
        kernel, recurrent, bias = (
            self.of(f"{layer}/{self.cell}_cell/{name}")
            for name in ("kernel", "recurrent_kernel", "bias")
        )
        h = c = np.zeros(recurrent.shape[0])
        outputs = []
        for x in x_TxD:
            if self.cell == "lstm":
                i, f, g, o = np.split(x @ kernel + h @ recurrent + bias, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
            else:
                z, r, g = np.split(x @ kernel + bias[0], 3)
                hz, hr, hg = np.split(h @ recurrent + bias[1], 3)
                z = sigmoid(z + hz)
                h = z * h + (1 - z) * np.tanh(g + sigmoid(r + hr) * hg)
            outputs.append(h)
        return np.array(outputs)

    def stack(self, x, layer):
        x = layer(0, x)
        return x + layer(1, x)

    def memory(self, ids):
        def layer(i, x):
            forward, backward = (
                f"encoder/layer_{i}/{side}_layer_{i}" for side in ("forward", "backward")
            )
            ahead, back = self.recur(forward, x), self.recur(backward, x[::-1])[::-1]
            return np.concatenate([ahead, back], axis=-1)

        return self.stack(self.table[ids] * WIDTH**0.5, layer)

    def logits(self, source_ids, target_ids):
        memory = self.memory(source_ids)
        x = self.table[target_ids] * WIDTH**0.5
        h = self.stack(x, lambda i, x: self.recur(f"decoder/layer_{i}", x))
        query, key, value, output = (
            self.of(f"decoder/attention/{name}/kernel")
            for name in ("query", "key", "value", "output")
        )
        scores = (h @ query) @ (memory @ key).T / WIDTH**0.5
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        context = weights @ (memory @ value) @ output
        y = np.concatenate([h, context], axis=-1)
        y = np.tanh(y @ self.of("combine/kernel") + self.of("combine/bias"))
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
        return (y * self.of("final_norm/gamma") + self.of("final_norm/beta")) @ self.table.T


@cells
def test_decoder_keeps_the_contract(cell):
    testing.check_decoder(model_of(cell).decoder, WIDTH)


@cells
def test_logits_are_those_of_the_numpy_rnn(cell):
    model = model_of(cell)
    inputs, _, weights = batch_of(4)
    logits = ops.convert_to_numpy(model(inputs))
    reference = NumpyRnn(model, cell)
    for row, (source, target) in enumerate(
        zip(inputs["encoder_token_ids"], inputs["decoder_token_ids"], strict=True)
    ):
        length = int(weights[row].sum())
        expected = reference.logits(source[source != 0], target[:length])
        np.testing.assert_allclose(logits[row, :length], expected, rtol=1e-4, atol=1e-5)


def test_a_row_of_padding_changes_nothing_and_gives_numbers():
    model = model_of("lstm")
    inputs, _, _ = batch_of(3)
    longer = {name: np.pad(ids, ((0, 1), (0, 2))) for name, ids in inputs.items()}
    logits, expected = (ops.convert_to_numpy(model(batch)) for batch in (longer, inputs))
    np.testing.assert_allclose(logits[:3, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5)
    assert np.all(np.isfinite(logits))


@pytest.mark.parametrize("shared", [True, False])
def test_three_stages_learn(shared):
    rnn = model_of("lstm", num_layers=1)
    model = TeaForN(rnn, n=3, discount=0.5, shared=shared, label_smoothing=0.0)
    inputs, targets, weights = batch_of(4)
    _, gradients = loss_and_gradients(model, inputs, targets, weights)
    assert all(np.any(gradient) for gradient in gradients.values())
    model.compile(optimizer=keras.optimizers.Adam(0.02))
    history = model.fit(
        inputs, targets, sample_weight=weights, batch_size=4, epochs=20, verbose=0
    ).history
    for stage in range(3):
        assert history[f"loss_{stage}"][-1] < 0.7 * history[f"loss_{stage}"][0]


def test_packed_batches_are_refused():
    model = model_of("gru")
    inputs, _, _ = testing.packed_batch([testing.random_pairs(2)])
    with pytest.raises(UserError, match="--batching=pack.*Write --batching=bucket"):
        model(inputs)
    segments = inputs["decoder_segment_ids"]
    with pytest.raises(UserError, match="--batching=pack"):
        model.decoder.prepare(np.zeros((1, 3, WIDTH), "float32"), np.ones((1, 3)), None, segments)


def test_dropout_works_in_training_only():
    model = model_of("gru", dropout=0.5)
    inputs, _, _ = batch_of(2)
    kept = [ops.convert_to_numpy(model(inputs)) for _ in range(2)]
    dropped = [ops.convert_to_numpy(model(inputs, training=True)) for _ in range(2)]
    np.testing.assert_array_equal(*kept)
    assert np.max(np.abs(dropped[0] - dropped[1])) > 1e-2


def test_bfloat16_keeps_its_state_in_float32():
    model, half = model_of("lstm"), model_of("lstm", dtype="mixed_bfloat16")
    inputs, _, _ = batch_of(4)
    memory, mask = half.encode(inputs)
    prepared = half.decoder.prepare(memory, mask)
    state = half.decoder.initial_state(prepared, 1, 5)
    hidden, state = half.decoder.step(
        half.embed(inputs["decoder_token_ids"][:, :1]), state, prepared, 0
    )
    assert {keras.backend.standardize_dtype(y.dtype) for y in (memory, hidden)} == {"bfloat16"}
    assert {s.dtype for s in keras.tree.flatten(state)} == {tf.float32}
    np.testing.assert_allclose(half(inputs), model(inputs), atol=0.15)


def test_impossible_settings_are_refused():
    with pytest.raises(UserError, match="rnn_base cannot be built.*must be one of lstm, gru"):
        build_model("rnn_base", 7, cell="elman")
    with pytest.raises(UserError, match="hidden_dim 5 is odd"):
        build_model("rnn_base", 7, hidden_dim=5)
    with pytest.raises(UserError, match="num_heads"):
        build_model("rnn_base", 7, num_heads=2)


def test_rnn_base():
    model = build_model("rnn_base", 7)
    assert isinstance(model.encoder, RnnEncoder) and isinstance(model.decoder, RnnDecoder)
    assert model.decoder.settings == {
        "num_layers": 2,
        "hidden_dim": 512,
        "cell": "lstm",
        "dropout": 0.2,
    }


def test_search_and_export_take_it_as_it_is(trained, tmp_path):
    tokenizer = Tokenizer.load(trained.model_dir / "vocab.model")
    model = model_of("lstm", tokenizer.vocabulary_size)
    config = decoding.SearchConfig(beam_size=3, max_length=6)
    module = ServingModule(model, tokenizer, config, 24, 24)
    texts = ["I see the cat", "you have the bird"]
    examples = {"sources": texts, "targets": texts}
    folder = write_saved_model(module, tmp_path, {}, examples, "predict")
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    served = serve(tf.constant(texts))
    none = serve(tf.constant([], tf.string))
    assert {name: value.shape.as_list() for name, value in none.items()} == {
        "outputs": [0],
        "scores": [0],
    }
    ids = tokenizer.encode(texts, 24)
    found = decoding.search(model, {"encoder_token_ids": ids}, config)
    np.testing.assert_allclose(served["scores"], found.scores[:, 0], rtol=1e-4)
    targets = found.token_ids[:, 0]
    np.testing.assert_allclose(
        decoding.score(model, {"encoder_token_ids": ids}, targets), found.scores[:, 0], rtol=1e-4
    )


@cells
def test_an_export_made_on_a_gpu_is_served_by_a_cpu(cell, trained, tmp_path, monkeypatch):
    tokenizer = Tokenizer.load(trained.model_dir / "vocab.model")
    model = model_of(cell, tokenizer.vocabulary_size)
    texts = {"sources": ["I see the cat", "the cat"], "targets": ["je vois le chat", "le chat"]}
    ids = {name: tokenizer.encode(values, 24) for name, values in texts.items()}
    expected = decoding.score(model, {"encoder_token_ids": ids["sources"]}, ids["targets"])
    keras_rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")
    monkeypatch.setattr(keras_rnn, "_is_gpu_available", lambda: True)
    module = ServingModule(model, tokenizer, decoding.SearchConfig(), 24, 24)
    recurrent = [layer for layer in model._flatten_layers() if isinstance(layer, CELLS[cell])]
    assert [layer.use_cudnn for layer in recurrent] == [False] * 6
    folder = write_saved_model(module, tmp_path, {}, texts, "score")
    score = tf.saved_model.load(str(folder)).signatures["serving_default"]
    inputs, targets = map(tf.constant, texts.values())
    np.testing.assert_allclose(score(inputs=inputs, targets=targets)["scores"], expected, rtol=1e-4)
