"""The tied embedding: scale, row 0, logits and expectations against NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.gradients import check_frequent_rows, gradients_of
from tf_teaforn import testing
from tf_teaforn.models.embedding import TokenEmbedding

VOCABULARY_SIZE, WIDTH = 17, 4
# k · D up to V gathers rows, more scatters probabilities.
GATHER, SCATTER = (1, 4), (5, 16)


def embedding_of(**settings):
    embedding = TokenEmbedding(VOCABULARY_SIZE, WIDTH, **settings)
    embedding.build(None)
    return testing.randomize(embedding)


def table_of(embedding):
    return ops.convert_to_numpy(embedding.embeddings).astype("float64")


def random_logits(*shape):
    return np.random.default_rng(1).normal(size=(*shape, VOCABULARY_SIZE)).astype("float32")


def expected_embedding(logits, table, k):
    result = np.zeros((*logits.shape[:-1], WIDTH))
    for index in np.ndindex(logits.shape[:-1]):
        row = logits[index].astype("float64")
        masked = np.where(row >= np.sort(row)[-k], row, -np.inf)
        odds = np.exp(masked - masked.max())
        result[index] = odds / odds.sum() @ table
    return result


@pytest.mark.parametrize(("scaled", "scale"), [(True, 2.0), (False, 1.0)])
def test_ids_give_scaled_rows(scaled, scale):
    embedding = embedding_of(scaled=scaled)
    ids = np.array([[3, 1, 0], [16, 3, 2]])
    vectors = ops.convert_to_numpy(embedding(ids))
    np.testing.assert_allclose(vectors, table_of(embedding)[ids] * scale, rtol=1e-6)
    np.testing.assert_array_equal(vectors[0, 2], np.zeros(WIDTH))


def test_initial_table():
    keras.utils.set_random_seed(0)
    embedding = TokenEmbedding(2000, 64)
    embedding.build(None)
    table = ops.convert_to_numpy(embedding.embeddings)
    np.testing.assert_array_equal(table[0], np.zeros(64))
    assert np.all(np.any(table[1:] != 0, axis=1))
    # Scaled inputs then have unit variance, as the position signal has about.
    assert np.std(table[1:]) == pytest.approx(64**-0.5, rel=0.02)


def test_logits_are_unscaled_products_with_the_table():
    embedding = embedding_of()
    hidden = np.random.default_rng(0).normal(size=(2, 3, WIDTH)).astype("float32")
    logits = ops.convert_to_numpy(embedding.logits(hidden))
    np.testing.assert_allclose(logits, hidden @ table_of(embedding).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logits[..., 0], np.zeros((2, 3)))


@pytest.mark.parametrize("k", [*GATHER, *SCATTER, VOCABULARY_SIZE])
@pytest.mark.parametrize("scaled", [True, False])
def test_expectation_over_the_best_tokens(k, scaled):
    embedding = embedding_of(scaled=scaled)
    logits = random_logits(2, 3)
    expected = expected_embedding(logits, table_of(embedding), k) * embedding.scale
    # As an input row 0 is zero, whatever the softmax has there.
    embedding.embeddings.assign(table_of(embedding) + (np.arange(VOCABULARY_SIZE) == 0)[:, None])
    assert np.any(embedding.table()[0] != 0)
    expectation = ops.convert_to_numpy(embedding.expectation(ops.convert_to_tensor(logits), k))
    np.testing.assert_allclose(expectation, expected, rtol=1e-5, atol=1e-6)


def test_expectation_over_one_token_is_the_best_tokens_embedding():
    for width in (WIDTH, VOCABULARY_SIZE + 1):  # gathered, scattered
        embedding = TokenEmbedding(VOCABULARY_SIZE, width)
        embedding.build(None)
        logits = random_logits(2, 3)
        expectation = embedding.expectation(ops.convert_to_tensor(logits), 1)
        np.testing.assert_allclose(expectation, embedding(np.argmax(logits, axis=-1)), rtol=1e-6)


@pytest.mark.parametrize("k", [*GATHER, *SCATTER, VOCABULARY_SIZE])
def test_expectation_gradients_are_finite_differences(k):
    embedding = embedding_of()
    logits = random_logits(2, 3)
    random = np.random.default_rng(2)
    upstream = random.normal(size=(2, 3, WIDTH))

    def product(logits, table):
        return np.sum(expected_embedding(logits, table, k) * upstream) * embedding.scale

    def function(logits):
        return ops.sum(embedding.expectation(logits, k) * upstream.astype("float32")), ()

    (by_table,), (by_logits,), _ = gradients_of(function, [embedding.embeddings], logits)
    table = table_of(embedding)
    assert np.all(by_table[0] == 0)
    for _ in range(5):
        change = random.normal(size=logits.shape)
        by_change = (product(logits + 1e-6 * change, table) - product(logits, table)) / 1e-6
        assert np.sum(by_logits * change) == pytest.approx(by_change, rel=1e-3, abs=1e-4)
        change = random.normal(size=table.shape)
        change[0] = 0
        by_change = product(logits, change)
        assert np.sum(by_table * change) == pytest.approx(by_change, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("logits_bias", [False, True])
def test_logits_function_gives_logits(logits_bias):
    embedding = testing.randomize(embedding_of(logits_bias=logits_bias))
    hidden = random_logits(2, 3)[..., : embedding.output_dim]
    np.testing.assert_allclose(
        embedding.logits_function()(hidden), embedding.logits(hidden), rtol=1e-5, atol=1e-6
    )
    assert logits_bias == bool(np.any(embedding.logits(np.zeros_like(hidden))))


def test_search_ranks_tokens_in_float32():
    embedding = embedding_of(dtype="mixed_bfloat16")
    hidden = ops.cast(random_logits(2, 3)[..., :WIDTH], "bfloat16")
    expected = ops.convert_to_numpy(ops.cast(hidden, "float32")) @ table_of(embedding).T
    logits = embedding.logits_function()(hidden)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_no_gradient_reaches_row_zero():
    embedding = embedding_of()
    ids = np.array([0, 0, 3])
    hidden = np.ones((3, WIDTH), "float32")

    def function(hidden):
        return ops.sum(embedding(ids)) + ops.sum(embedding.logits(hidden)), ()

    (gradient,), _, _ = gradients_of(function, [embedding.embeddings], hidden)
    expected = np.full((VOCABULARY_SIZE, WIDTH), 3.0)
    expected[3] += embedding.scale
    expected[0] = 0.0
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_bfloat16():
    embedding = embedding_of(dtype="mixed_bfloat16")
    logits = ops.convert_to_tensor(random_logits(2, 3))
    table = table_of(embedding)
    for k in (1, *SCATTER, VOCABULARY_SIZE):
        expectation = embedding.expectation(logits, k)
        assert keras.backend.standardize_dtype(expectation.dtype) == "bfloat16"
        expected = expected_embedding(random_logits(2, 3), table, k) * embedding.scale
        np.testing.assert_allclose(ops.cast(expectation, "float32"), expected, atol=0.05)
    assert keras.backend.standardize_dtype(embedding(np.array([1])).dtype) == "bfloat16"
    hidden = ops.ones((1, WIDTH), "bfloat16")
    assert keras.backend.standardize_dtype(embedding.logits(hidden).dtype) == "float32"


def test_bfloat16_gradient_of_a_frequent_row():
    check_frequent_rows()


def test_config_round_trip():
    embedding = embedding_of(scaled=False, name="tokens")
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(embedding))
    assert copy.get_config() == embedding.get_config()
    copy.set_weights(embedding.get_weights())
    ids = np.arange(VOCABULARY_SIZE)
    np.testing.assert_array_equal(copy(ids), embedding(ids))


def test_softmax_weights_of_their_own():
    embedding = TokenEmbedding(6, 4, tie_weights=False)
    embedding.build(None)
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=weight.shape) for weight in embedding.weights]
    embedding.set_weights(tables)
    (inputs, outputs) = (t if t.shape == (6, 4) else t.T for t in tables)
    hidden = rng.normal(size=(2, 3, 4)).astype("float32")
    np.testing.assert_allclose(embedding.logits(hidden), hidden @ outputs.T, rtol=1e-5)
    np.testing.assert_allclose(embedding.logits_function()(hidden), hidden @ outputs.T, rtol=1e-5)
    np.testing.assert_allclose(embedding(np.array([2, 5])), 2 * inputs[[2, 5]], rtol=1e-6)


@pytest.mark.parametrize("settings", [{"reverse_dtype": "float32"}, {"logit_soft_cap": 30.0}])
def test_settings_that_the_loss_does_not_have(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: the loss does not have it"):
        TokenEmbedding(6, 4, **settings)
