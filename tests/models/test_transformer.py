"""The Transformer keeps the decoder contract, and computes what its NumPy counterpart computes."""

import functools
import math

import keras
import numpy as np
import pytest
from keras import ops

from tests import numpy_transformer
from tf_teaforn import testing
from tf_teaforn.models.dropout import Dropout
from tf_teaforn.models.transformer import Residual, TransformerDecoder, TransformerEncoder

WIDTH = 8
SETTINGS = {"num_layers": 2, "hidden_dim": WIDTH, "intermediate_dim": 12, "num_heads": 2}
VARIANTS = {
    "pre": {},
    "post": {"norm": "post"},
    "bias": {"attention_bias": True},
    "interleaved": {"position_signal": "interleaved"},
    "tensor2tensor": {"position_signal": "tensor2tensor", "norm": "post"},
    "no_signal": {"position_signal": "none"},
    "dropout": {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5},
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def model_of(**variant):
    return testing.tiny_model(**{**SETTINGS, **variant})


@variants
def test_decoder_keeps_the_contract(variant):
    layout = variant.get("position_signal", "half_split")
    signal = functools.partial(numpy_transformer.position_signal, width=WIDTH, layout=layout)
    testing.check_decoder(
        model_of(**variant).decoder, WIDTH, position_signal=None if layout == "none" else signal
    )


class _WithoutStart(TransformerDecoder):
    def call(self, x, prepared, start_position=0, training=None):
        return super().call(x, prepared, training=training)


class _Acausal(TransformerDecoder):
    def call(self, x, prepared, start_position=0, training=None):
        x = x + ops.mean(x, axis=1, keepdims=True)
        return super().call(x, prepared, start_position, training)


class _SeesPadding(TransformerDecoder):
    def prepare(self, memory, memory_mask, **packing):
        return super().prepare(memory, ops.ones_like(memory_mask), **packing)


class _MixesHypotheses(TransformerDecoder):
    def step(self, x, state, prepared, position):
        return super().step(x + ops.mean(x, axis=1, keepdims=True), state, prepared, position)


class _ForgetsPositions(TransformerDecoder):
    def step(self, x, state, prepared, position):
        return super().step(x, state, prepared, position * 0)


class _LosesSettings(TransformerDecoder):
    def get_config(self):
        return {**super().get_config(), "norm": "pre"}


class _SeesAllSegments(TransformerDecoder):
    def prepare(self, memory, memory_mask, **packing):
        return super().prepare(memory, memory_mask)


class _HasANameTwice(TransformerDecoder):
    def build(self, input_shape=None):
        super().build()
        self.others = [keras.layers.Dense(1, name="other") for _ in range(2)]
        for layer in self.others:
            layer.build((None, 1))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_WithoutStart, "start_position=1 has no effect"),
        (_Acausal, "depend on inputs from there on"),
        (_SeesPadding, "padding of the memory is visible"),
        (_MixesHypotheses, "step is not call"),
        (_ForgetsPositions, "step is not call"),
        (_SeesAllSegments, "segments of a packed row see each other"),
        (_LosesSettings, "weights of other paths"),
        (_HasANameTwice, "the same path"),
    ],
)
def test_contract_test_finds(broken, message):
    decoder = broken(**SETTINGS, norm="post", dropout=0.0)
    decoder.build(None)
    keras.saving.register_keras_serializable("tests")(broken)
    signal = functools.partial(numpy_transformer.position_signal, width=WIDTH)
    with pytest.raises(AssertionError, match=message):
        testing.check_decoder(testing.randomize(decoder), WIDTH, position_signal=signal)


@variants
def test_logits_are_those_of_the_numpy_transformer(variant):
    model = model_of(**variant)
    inputs, _, _ = testing.padded_batch(testing.random_pairs(4, 6, 5))
    reference = numpy_transformer.NumpyTransformer(
        {w.path: ops.convert_to_numpy(w) for w in model.weights}, {**SETTINGS, **variant}
    )
    memories = reference.memories(inputs["encoder_token_ids"])
    x = reference.table[inputs["decoder_token_ids"]] * WIDTH**0.5
    hidden = reference.decode("seq2seq/decoder", x, memories)
    logits = ops.convert_to_numpy(model(inputs))
    np.testing.assert_allclose(logits, hidden @ reference.table.T, rtol=1e-4, atol=1e-5)


def test_encoder_reads_no_padding():
    model = model_of()
    inputs, _, _ = testing.padded_batch(testing.random_pairs(4, 6, 5))
    ids = inputs["encoder_token_ids"]
    longer = np.pad(ids, ((0, 0), (0, 3)))
    memory, mask = model.encode({"encoder_token_ids": longer})
    expected, expected_mask = model.encode({"encoder_token_ids": ids})
    memory, expected = (ops.convert_to_numpy(m) for m in (memory, expected))
    np.testing.assert_allclose(memory[:, :6][ids != 0], expected[ids != 0], atol=1e-5)
    np.testing.assert_array_equal(mask, longer != 0)
    np.testing.assert_array_equal(expected_mask, ids != 0)
    assert np.all(np.isfinite(memory))


def test_encoder_config_round_trip():
    encoder = model_of(norm="post", attention_bias=True, activation="gelu").encoder
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(encoder))
    copy.set_weights(encoder.get_weights())
    x = np.random.default_rng(0).normal(size=(2, 3, WIDTH)).astype("float32")
    mask = np.ones((2, 3), bool)
    assert copy.get_config() == encoder.get_config()
    np.testing.assert_array_equal(copy(x, mask), encoder(x, mask))


@pytest.mark.parametrize("start_position", [0, 2])
def test_packed_sentences_do_not_see_each_other(start_position):
    model = model_of()
    pairs = testing.random_pairs(5, 6, 5)
    rows = [pairs[:2], pairs[2:]]
    inputs, _, _ = testing.packed_batch(rows)

    def outputs(inputs):
        memory, mask = model.encode(inputs)
        prepared = model.prepare(model.decoder, inputs, memory, mask)
        x = model.embed(inputs["decoder_token_ids"])
        return ops.convert_to_numpy(model.decoder(x, prepared, start_position=start_position))

    packed = outputs(inputs)
    for row, in_row in enumerate(rows):
        for segment, pair in enumerate(in_row, 1):
            alone = outputs(testing.padded_batch([pair])[0])[0]
            there = inputs["decoder_segment_ids"][row] == segment
            np.testing.assert_allclose(packed[row, there], alone, rtol=1e-4, atol=1e-5)
    assert np.all(np.isfinite(packed))


def test_dropout_works_in_training_only():
    for rate in ("dropout", "attention_dropout", "activation_dropout"):
        model = model_of(**{"dropout": 0.0, rate: 0.5})
        inputs, _, _ = testing.padded_batch(testing.random_pairs(4, 6, 5))
        kept = [ops.convert_to_numpy(model(inputs)) for _ in range(2)]
        dropped = [ops.convert_to_numpy(model(inputs, training=True)) for _ in range(2)]
        np.testing.assert_array_equal(*kept)
        assert np.max(np.abs(dropped[0] - kept[0])) > 1e-2, rate
        assert np.max(np.abs(dropped[0] - dropped[1])) > 1e-2, rate


def test_masks_are_those_of_keras():
    x = np.ones((4, 50), "float32")
    masks = []
    for layer in (Dropout, keras.layers.Dropout):
        keras.utils.set_random_seed(5)
        layer = layer(0.3)
        masks.append([ops.convert_to_numpy(layer(x, training=True)) for _ in range(3)])
        np.testing.assert_array_equal(layer(x), x)
    np.testing.assert_array_equal(*masks)
    assert len({mask.tobytes() for mask in masks[0]}) == 3


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_the_rate_is_the_same_in_bfloat16(rate):
    """Numbers of seven bits would drop 1.6% at a rate of 1%."""
    count = 1_000_000
    layer = Dropout(rate, dtype="mixed_bfloat16", seed=3)
    found = layer(ops.ones([count], "bfloat16"), training=True)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    found = ops.convert_to_numpy(ops.cast(found, "float32"))
    deviation = math.sqrt(rate * (1 - rate) / count)
    assert abs(np.mean(found == 0) - rate) < 4 * deviation
    (kept,) = set(found.tolist()) - {0.0}
    np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=2**-8)


def test_bfloat16_computes_near_float32():
    model, half = model_of(), model_of(dtype="mixed_bfloat16")
    inputs, _, _ = testing.padded_batch(testing.random_pairs(4, 6, 5))
    memory, mask = half.encode(inputs)
    prepared = half.decoder.prepare(memory, mask)
    x = half.embed(inputs["decoder_token_ids"])
    hidden = half.decoder(x, prepared)
    state = half.decoder.initial_state(prepared, 1, 5)
    stepped, _ = half.decoder.step(x[:, :1], state, prepared, 0)
    logits = half(inputs)
    assert {keras.backend.standardize_dtype(y.dtype) for y in (memory, hidden, stepped)} == {
        "bfloat16"
    }
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    assert {keras.backend.standardize_dtype(w.dtype) for w in half.weights} == {"float32"}
    np.testing.assert_allclose(logits, model(inputs), atol=0.15)


@pytest.mark.parametrize("layer", [TransformerEncoder, TransformerDecoder])
def test_impossible_settings_are_refused(layer):
    with pytest.raises(ValueError, match="not a multiple of num_heads"):
        layer(**{**SETTINGS, "num_heads": 3})
    with pytest.raises(ValueError, match="'pre' or 'post'"):
        layer(**SETTINGS, norm="both")
    with pytest.raises(TypeError, match="typo"):
        layer(**SETTINGS, typo=1)


def test_norms_are_float32_under_bfloat16():
    """In bfloat16 the variance of numbers far from zero would be lost."""
    residual = Residual(64, "post", 1e-6, 0.0, dtype="mixed_bfloat16")
    residual.build()
    random = np.random.default_rng(0)
    x = ops.cast(20 + random.normal(size=(3, 5, 64)), "bfloat16")
    output = ops.cast(residual(x, sublayer=ops.zeros_like), "float32")
    exact = np.array(ops.cast(x, "float32"), "float64")
    exact -= exact.mean(axis=-1, keepdims=True)
    exact /= np.sqrt(exact.var(axis=-1, keepdims=True) + 1e-6)
    # A result is rounded to eight bits.
    np.testing.assert_allclose(output, exact, rtol=0.01, atol=0.01)
