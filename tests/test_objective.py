"""Shifted targets in numbers; cross-entropy and its gradient against NumPy, float64."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.gradients import gradients_of
from tf_teaforn import objective


def test_shift_left():
    rows = ops.convert_to_tensor([[1, 2, 3], [4, 5, 6]])
    expected = {
        0: [[1, 2, 3], [4, 5, 6]],
        1: [[2, 3, 0], [5, 6, 0]],
        2: [[3, 0, 0], [6, 0, 0]],
        3: [[0, 0, 0], [0, 0, 0]],
        5: [[0, 0, 0], [0, 0, 0]],
    }
    for offset, shifted in expected.items():
        np.testing.assert_array_equal(objective.shift_left(rows, offset), shifted)


def test_stage_targets_end_with_their_sentence():
    targets = ops.convert_to_tensor([[7, 8, 9, 1], [5, 1, 0, 0]])
    weights = ops.convert_to_tensor([[1.0, 1.0, 0.5, 1.0], [1.0, 1.0, 0.0, 0.0]])
    expected = [
        ([[7, 8, 9, 1], [5, 1, 0, 0]], [[1, 1, 0.5, 1], [1, 1, 0, 0]]),
        ([[8, 9, 1, 0], [1, 0, 0, 0]], [[1, 0.5, 1, 0], [1, 0, 0, 0]]),
        ([[9, 1, 0, 0], [0, 0, 0, 0]], [[0.5, 1, 0, 0], [0, 0, 0, 0]]),
    ]
    for stage, (stage_targets, stage_weights) in enumerate(expected):
        got_targets, got_weights = objective.stage_targets(targets, weights, stage)
        np.testing.assert_array_equal(got_targets, stage_targets)
        np.testing.assert_array_equal(got_weights, stage_weights)


def test_stage_targets_end_with_their_segment():
    targets = ops.convert_to_tensor([[7, 8, 1, 9, 1, 0]])
    weights = ops.convert_to_tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    segments = ops.convert_to_tensor([[1, 1, 1, 2, 2, 0]])
    for stage, expected in enumerate(([1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0])):
        _, got = objective.stage_targets(targets, weights, stage, segments)
        np.testing.assert_array_equal(got, [expected])


def test_discounted_sum():
    losses = [1.0, 10.0, 100.0]
    assert objective.discounted_sum(losses, 0.5) == 1 + 5 + 25
    assert objective.discounted_sum(losses, 1) == 111
    assert objective.discounted_sum(losses, 0) == 1
    assert objective.discounted_sum(losses[:1], 0.5) == 1


def smoothed_targets(targets, vocabulary_size, label_smoothing):
    one_hot = np.eye(vocabulary_size)[targets]
    return one_hot * (1 - label_smoothing) + label_smoothing / vocabulary_size


def numpy_loss(hidden, table, targets, label_smoothing):
    logits = hidden @ table.T
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = smoothed_targets(targets, len(table), label_smoothing)
    return -np.sum(expected * log_probabilities, axis=-1)


def numpy_gradients(hidden, table, targets, label_smoothing, upstream):
    logits = hidden @ table.T
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = odds / odds.sum(axis=-1, keepdims=True)
    by_logits = probabilities - smoothed_targets(targets, len(table), label_smoothing)
    by_logits = by_logits * upstream[:, None]
    return by_logits @ table, by_logits.T @ hidden


def case(rows=6, vocabulary_size=9, width=5, scale=1.0):
    random = np.random.default_rng(0)
    hidden = random.normal(size=(rows, width)) * scale
    table = random.normal(size=(vocabulary_size, width))
    targets = random.integers(0, vocabulary_size, size=rows).astype("int32")
    upstream = np.where(np.arange(rows) % 3 == 2, 0.0, random.normal(size=rows))
    return hidden.astype("float32"), table.astype("float32"), targets, upstream


smoothings = pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])


@smoothings
def test_loss(label_smoothing):
    hidden, table, targets, _ = case()
    loss, correct = objective.cross_entropy(
        ops.convert_to_tensor(hidden), ops.convert_to_tensor(table), targets, label_smoothing
    )
    expected = numpy_loss(hidden.astype("float64"), table, targets, label_smoothing)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(correct, np.argmax(hidden @ table.T, axis=-1) == targets)
    # Keras' own loss, with its own smoothing, is the same.
    keras_loss = keras.losses.categorical_crossentropy(
        np.eye(9)[targets], hidden @ table.T, from_logits=True, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(loss, keras_loss, rtol=1e-5)


def loss_gradients(hidden, table, targets, label_smoothing, upstream):
    def function(hidden, table):
        loss, correct = ops.unstack(
            objective.cross_entropy(hidden, table, targets, label_smoothing)
        )
        # The second row has no gradient, whatever comes from above.
        return ops.sum(loss * upstream) + 7.0 * ops.sum(correct), loss

    _, gradients, _ = gradients_of(function, [], hidden, table)
    return gradients


@smoothings
def test_gradient(label_smoothing):
    hidden, table, targets, upstream = case()
    by_hidden, by_table = loss_gradients(
        hidden, table, targets, label_smoothing, upstream.astype("float32")
    )
    hidden, table = hidden.astype("float64"), table.astype("float64")
    expected = numpy_gradients(hidden, table, targets, label_smoothing, upstream)
    np.testing.assert_allclose(by_hidden, expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_table, expected[1], rtol=1e-4, atol=1e-6)

    def total(hidden, table):
        return np.sum(numpy_loss(hidden, table, targets, label_smoothing) * upstream)

    for index in np.ndindex(hidden.shape):
        change = np.zeros_like(hidden)
        change[index] = 1e-6
        difference = (total(hidden + change, table) - total(hidden - change, table)) / 2e-6
        assert by_hidden[index] == pytest.approx(difference, rel=1e-3, abs=1e-5)
    for index in np.ndindex(table.shape):
        change = np.zeros_like(table)
        change[index] = 1e-6
        difference = (total(hidden, table + change) - total(hidden, table - change)) / 2e-6
        assert by_table[index] == pytest.approx(difference, rel=1e-3, abs=1e-5)


def test_large_logits_stay_finite():
    hidden, table, targets, _ = case(scale=1e4)
    upstream = np.ones(6)
    loss, _ = objective.cross_entropy(
        ops.convert_to_tensor(hidden), ops.convert_to_tensor(table), targets, 0.1
    )
    expected = numpy_loss(hidden.astype("float64"), table, targets, 0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    gradients = loss_gradients(hidden, table, targets, 0.1, upstream.astype("float32"))
    expected = numpy_gradients(hidden.astype("float64"), table, targets, 0.1, upstream)
    for gradient, reference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, reference, rtol=1e-3, atol=1e-3)


def test_a_tie_for_the_best_counts_as_right():
    hidden = ops.convert_to_tensor([[1.0, 0.0]] * 3)
    table = ops.convert_to_tensor([[2.0, 0.0], [2.0, 1.0], [1.0, 0.0]])
    _, correct = objective.cross_entropy(hidden, table, np.array([0, 1, 2]))
    np.testing.assert_array_equal(correct, [1, 1, 0])


def test_bfloat16_gradient_of_a_frequent_token():
    """Thousands of rows of one class: either distribution alone would drown the gradient."""
    random = np.random.default_rng(0)
    rows, vocabulary_size, width = 4096, 32, 8
    targets = np.where(random.random(rows) < 0.8, 3, random.integers(0, 32, rows)).astype("int32")
    table = random.normal(size=(vocabulary_size, width)) * width**-0.5
    hidden = random.normal(size=(rows, width)) + 0.5 + 2 * table[targets]
    # What bfloat16 can hold, so that only the computation differs.
    hidden, table = (
        ops.convert_to_numpy(ops.cast(ops.cast(x, "bfloat16"), "float32")) for x in (hidden, table)
    )

    def function(hidden, table):
        hidden, table = ops.cast(hidden, "bfloat16"), ops.cast(table, "bfloat16")
        loss = objective.cross_entropy(hidden, table, targets, 0.1)[0]
        assert keras.backend.standardize_dtype(loss.dtype) == "float32"
        return ops.sum(loss) / rows, loss

    _, gradients, loss = gradients_of(function, [], hidden, table)
    hidden, table = hidden.astype("float64"), table.astype("float64")
    expected_loss = numpy_loss(hidden, table, targets, 0.1)
    np.testing.assert_allclose(loss.mean(), expected_loss.mean(), rtol=1e-3)
    expected = numpy_gradients(hidden, table, targets, 0.1, np.full(rows, 1 / rows))
    for gradient, reference in zip(gradients, expected, strict=True):
        assert np.linalg.norm(gradient - reference) < 0.01 * np.linalg.norm(reference)
