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


def test_targets_of_all_stages():
    targets = ops.convert_to_tensor([[7, 8, 1], [5, 1, 0]])
    weights = ops.convert_to_tensor([[1.0, 0.5, 1.0], [1.0, 1.0, 0.0]])
    got_targets, got_weights = objective.all_stage_targets(targets, weights, 2)
    np.testing.assert_array_equal(got_targets, [[[7, 8, 1], [8, 1, 0]], [[5, 1, 0], [1, 0, 0]]])
    np.testing.assert_array_equal(got_weights, [[[1, 0.5, 1], [0.5, 1, 0]], [[1, 1, 0], [1, 0, 0]]])


def test_stage_targets_end_with_their_segment():
    targets = ops.convert_to_tensor([[7, 8, 1, 9, 1, 0]])
    weights = ops.convert_to_tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    segments = ops.convert_to_tensor([[1, 1, 1, 2, 2, 0]])
    for stage, expected in enumerate(([1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0])):
        _, got = objective.stage_targets(targets, weights, stage, segments)
        np.testing.assert_array_equal(got, [expected])


def test_discounts():
    assert objective.discounts(3, 0.5) == [1, 0.5, 0.25]
    assert objective.discounts(3, 1) == [1, 1, 1]
    assert objective.discounts(3, 0) == [1, 0, 0]
    assert objective.discounts(1, 0.5) == [1]


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


def case(rows=7, vocabulary_size=9, width=5, scale=1.0):
    random = np.random.default_rng(0)
    hidden = random.normal(size=(rows, width)) * scale
    table = random.normal(size=(vocabulary_size, width))
    targets = random.integers(0, vocabulary_size, size=rows).astype("int32")
    coefficients = np.where(np.arange(rows) % 3 == 2, 0.0, random.normal(size=rows))
    return *(x.astype("float32") for x in (hidden, table)), targets, coefficients.astype("float32")


def chunks_of(monkeypatch, rows, vocabulary_size=9):
    monkeypatch.setattr(objective, "_CHUNK_LOGITS", rows * vocabulary_size)


smoothings = pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
# All at once, and 7 rows as 2 chunks of 4 and 4 of 2 (a row more than there is), and as 7 of 1.
chunks = pytest.mark.parametrize("chunk", [100, 4, 3, 1])


@smoothings
@chunks
@pytest.mark.parametrize("training", [True, False])
def test_loss(label_smoothing, chunk, training, monkeypatch):
    chunks_of(monkeypatch, chunk)
    hidden, table, targets, coefficients = case()
    total, loss, correct = objective.cross_entropy(
        *map(ops.convert_to_tensor, (hidden, table)),
        targets,
        coefficients,
        label_smoothing,
        training,
    )
    expected = numpy_loss(hidden.astype("float64"), table, targets, label_smoothing)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(total, expected @ coefficients, rtol=1e-5)
    np.testing.assert_array_equal(correct, np.argmax(hidden @ table.T, axis=-1) == targets)
    # Keras' own loss, with its own smoothing, is the same.
    keras_loss = keras.losses.categorical_crossentropy(
        np.eye(9)[targets], hidden @ table.T, from_logits=True, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(loss, keras_loss, rtol=1e-5)


def loss_gradients(hidden, table, targets, label_smoothing, coefficients, upstream=1.0):
    def function(hidden, table):
        total, loss, correct = objective.cross_entropy(
            hidden, table, targets, coefficients, label_smoothing
        )
        # Only the total has a gradient, whatever comes from above.
        return upstream * total + 7.0 * ops.sum(correct) + 5.0 * ops.sum(loss), loss

    _, gradients, _ = gradients_of(function, [], hidden, table)
    return gradients


@smoothings
@chunks
def test_gradient(label_smoothing, chunk, monkeypatch):
    chunks_of(monkeypatch, chunk)
    hidden, table, targets, coefficients = case()
    by_hidden, by_table = loss_gradients(
        hidden, table, targets, label_smoothing, coefficients, upstream=3.0
    )
    hidden, table = hidden.astype("float64"), table.astype("float64")
    upstream = 3.0 * coefficients
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


@smoothings
@chunks
def test_bias_is_a_constant_column(label_smoothing, chunk, monkeypatch):
    chunks_of(monkeypatch, chunk)
    hidden, table, targets, coefficients = case()
    bias = np.random.default_rng(1).normal(size=len(table)).astype("float32")

    def loss_of(bias):
        def function(hidden, table):
            total, losses, correct = objective.cross_entropy(
                hidden, table, targets, coefficients, label_smoothing, bias_V=bias
            )
            return total, (losses, correct)

        return function

    ones = np.ones((len(hidden), 1), "float32")
    wide = (np.concatenate([hidden, ones], -1), np.concatenate([table, bias[:, None]], -1))
    expected = gradients_of(loss_of(None), [], *wide)
    found = gradients_of(loss_of(ops.convert_to_tensor(bias)), [], hidden, table)
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        # Gradients without the column.
        other = other[:, :-1] if other.ndim == 2 else other
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_evaluation_has_no_gradient_and_says_so():
    hidden, table, targets, coefficients = case()

    def function(hidden, table):
        total, *_ = objective.cross_entropy(hidden, table, targets, coefficients, training=False)
        return total, ()

    with pytest.raises(ValueError, match="with training=True only"):
        gradients_of(function, [], hidden, table)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="traces TensorFlow functions")
@pytest.mark.parametrize(("jit_compile", "static"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 6, 7])
def test_compiled(rows, jit_compile, static, monkeypatch):
    import tensorflow as tf

    chunks_of(monkeypatch, 2)
    hidden, table, targets, coefficients = case(rows)
    length = rows if static else None

    @tf.function(
        jit_compile=jit_compile,
        input_signature=[
            tf.TensorSpec((length, 5)),
            tf.TensorSpec((9, 5)),
            tf.TensorSpec((length,), "int32"),
            tf.TensorSpec((length,)),
        ],
    )
    def function(hidden, table, targets, coefficients):
        with tf.GradientTape() as tape:
            tape.watch([hidden, table])
            total, *_ = objective.cross_entropy(hidden, table, targets, coefficients, 0.1)
        return total, *tape.gradient(total, [hidden, table])

    total, *gradients = function(hidden, table, targets, coefficients)
    hidden, table = hidden.astype("float64"), table.astype("float64")
    losses = numpy_loss(hidden, table, targets, 0.1)
    assert float(total) == pytest.approx(losses @ coefficients, rel=1e-5)
    expected = numpy_gradients(hidden, table, targets, 0.1, coefficients)
    for gradient, reference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="reads TensorFlow's graph")
def test_logits_exist_for_one_chunk_and_code_for_one():
    import tensorflow as tf

    @tf.function
    def function(hidden, table, targets, coefficients):
        with tf.GradientTape() as tape:
            tape.watch([hidden, table])
            total, *_ = objective.cross_entropy(hidden, table, targets, coefficients, 0.1)
        return tape.gradient(total, [hidden, table])

    operations = {}
    vocabulary_size = 2**17
    for rows in (1024, 8192):
        specs = [((rows, 2), "float32"), ((vocabulary_size, 2), "float32")]
        specs += [((rows,), "int32"), ((rows,), "float32")]
        graph = function.get_concrete_function(*(tf.TensorSpec(*spec) for spec in specs)).graph
        graphs = [graph, *(each.graph for each in graph._functions.values())]
        operations[rows] = [each for graph in graphs for each in graph.get_operations()]
        shapes = [tensor.shape for each in operations[rows] for tensor in each.outputs]
        sizes = [shape.num_elements() for shape in shapes if shape.is_fully_defined()]
        # 256 MiB of float32, whatever the rows.
        assert max(sizes) == 2**26 and sizes.count(2**26) > 4
    assert len(operations[1024]) == len(operations[8192])


def test_large_logits_stay_finite():
    hidden, table, targets, _ = case(scale=1e4)
    upstream = np.ones(7, "float32")
    _, loss, _ = objective.cross_entropy(
        ops.convert_to_tensor(hidden), ops.convert_to_tensor(table), targets, upstream, 0.1
    )
    expected = numpy_loss(hidden.astype("float64"), table, targets, 0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    gradients = loss_gradients(hidden, table, targets, 0.1, upstream)
    expected = numpy_gradients(hidden.astype("float64"), table, targets, 0.1, upstream)
    for gradient, reference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, reference, rtol=1e-3, atol=1e-3)


def test_a_tie_for_the_best_counts_as_right():
    hidden = ops.convert_to_tensor([[1.0, 0.0]] * 3)
    table = ops.convert_to_tensor([[2.0, 0.0], [2.0, 1.0], [1.0, 0.0]])
    _, _, correct = objective.cross_entropy(hidden, table, np.array([0, 1, 2]), np.ones(3, "f"))
    np.testing.assert_array_equal(correct, [1, 1, 0])


@pytest.mark.parametrize("table_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chunk", [4096, 1024])
def test_bfloat16_gradient_of_a_frequent_token(chunk, table_dtype, monkeypatch):
    """Thousands of rows of one class: either distribution alone would drown the gradient."""
    chunks_of(monkeypatch, chunk, vocabulary_size=32)
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
        hidden, table = ops.cast(hidden, "bfloat16"), ops.cast(table, table_dtype)
        coefficients = np.ones(rows, "float32")
        total, loss, _ = objective.cross_entropy(hidden, table, targets, coefficients, 0.1)
        for value in (total, loss):
            assert keras.backend.standardize_dtype(value.dtype) == "float32"
        return total / rows, loss

    _, gradients, loss = gradients_of(function, [], hidden, table)
    hidden, table = hidden.astype("float64"), table.astype("float64")
    expected_loss = numpy_loss(hidden, table, targets, 0.1)
    np.testing.assert_allclose(loss.mean(), expected_loss.mean(), rtol=1e-3)
    expected = numpy_gradients(hidden, table, targets, 0.1, np.full(rows, 1 / rows))
    for gradient, reference in zip(gradients, expected, strict=True):
        assert np.linalg.norm(gradient - reference) < 0.01 * np.linalg.norm(reference)
