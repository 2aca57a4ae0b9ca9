"""The served model: padding, packing, serialisation."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from tf_teaforn import testing
from tf_teaforn.models.seq2seq import Seq2Seq

PAIRS = testing.random_pairs(4, 6, 5)


def test_padding_changes_nothing():
    model = testing.tiny_model()
    inputs, targets, _ = testing.padded_batch(PAIRS)
    logits = ops.convert_to_numpy(model(inputs))
    for row, pair in enumerate(PAIRS):
        alone = ops.convert_to_numpy(model(testing.padded_batch([pair])[0]))[0]
        np.testing.assert_allclose(logits[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)
    longer = {name: np.pad(ids, ((0, 2), (0, 3))) for name, ids in inputs.items()}
    padded = ops.convert_to_numpy(model(longer))
    assert np.all(np.isfinite(padded))
    length = targets.shape[1]
    np.testing.assert_allclose(padded[:4, :length], logits, rtol=1e-4, atol=1e-5)


def test_packing_changes_nothing():
    model = testing.tiny_model()
    rows = [PAIRS[:1], PAIRS[1:]]
    inputs, _, _ = testing.packed_batch(rows)
    logits = ops.convert_to_numpy(model(inputs))
    for row, pairs in enumerate(rows):
        for segment, pair in enumerate(pairs, 1):
            alone = ops.convert_to_numpy(model(testing.padded_batch([pair])[0]))[0]
            there = inputs["decoder_segment_ids"][row] == segment
            np.testing.assert_allclose(logits[row, there], alone, rtol=1e-4, atol=1e-5)


def test_embedding_is_one_for_source_target_and_softmax():
    model = testing.tiny_model()
    tables = [w for w in model.weights if w.shape[0] == testing.TINY_VOCABULARY_SIZE]
    assert len(tables) == 1


@pytest.mark.parametrize(
    "overrides",
    [{}, {"norm": "post", "attention_bias": True}, {"dtype": "mixed_bfloat16", "num_layers": 2}],
    ids=["pre", "post", "bfloat16"],
)
def test_round_trips(overrides, tmp_path):
    model = testing.tiny_model(**overrides)
    inputs, _, _ = testing.padded_batch(PAIRS)
    logits = ops.convert_to_numpy(model(inputs))

    copy = Seq2Seq.from_config(json.loads(json.dumps(model.get_config())))
    assert copy.get_config() == model.get_config()
    assert [w.path for w in copy.weights] == [w.path for w in model.weights]
    copy.set_weights(model.get_weights())
    np.testing.assert_array_equal(copy(inputs), logits)

    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, Seq2Seq)
    np.testing.assert_array_equal(loaded(inputs), logits)

    model.save_weights(tmp_path / "model.weights.h5")
    other = testing.tiny_model(seed=5, **overrides)
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(other(inputs), logits)


def test_predict_gives_the_same_logits():
    model = testing.tiny_model()
    inputs, _, _ = testing.padded_batch(PAIRS)
    np.testing.assert_allclose(model.predict(inputs, verbose=0), model(inputs), atol=1e-5)
