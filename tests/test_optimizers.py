"""Schedules and first updates against closed formulas."""

import keras
import numpy as np
import pytest

from tf_teaforn.config import TrainingConfig
from tf_teaforn.errors import UserError
from tf_teaforn.optimizers import WarmupSchedule, build_optimizer

PEAK, WARMUP, LAST = 0.5, 10, 100
# Updates are counted from 1; Keras passes the number of those before.
UPDATES = np.arange(1, LAST + 1)


def rates(name, warmup=WARMUP):
    schedule = WarmupSchedule(name, PEAK, warmup, LAST)
    return np.array([float(schedule(update - 1)) for update in UPDATES])


@pytest.mark.parametrize("name", ["inverse_sqrt", "linear", "constant"])
def test_warm_up_is_linear_to_the_peak(name):
    np.testing.assert_allclose(rates(name)[:WARMUP], PEAK * UPDATES[:WARMUP] / WARMUP, rtol=1e-6)


def test_inverse_square_root():
    # Vaswani et al. 2017, equation 3, whose factor d^-0.5 is such that the peak is PEAK.
    scale = PEAK * WARMUP**0.5
    expected = scale * np.minimum(UPDATES**-0.5, UPDATES * WARMUP**-1.5)
    np.testing.assert_allclose(rates("inverse_sqrt"), expected, rtol=1e-6)


def test_linear_reaches_zero_after_the_last_update():
    expected = np.interp(UPDATES, [0, WARMUP, LAST + 1], [0, PEAK, 0])
    np.testing.assert_allclose(rates("linear"), expected, rtol=1e-5)
    assert float(WarmupSchedule("linear", PEAK, WARMUP, LAST)(LAST + 5)) == 0


def test_constant():
    np.testing.assert_allclose(rates("constant")[WARMUP:], PEAK, rtol=1e-6)


def test_without_warm_up_the_first_update_has_the_peak():
    np.testing.assert_allclose(rates("inverse_sqrt", 0), PEAK * UPDATES**-0.5, rtol=1e-6)
    np.testing.assert_allclose(rates("constant", 0), PEAK, rtol=1e-6)
    np.testing.assert_allclose(rates("linear", 0)[[0, -1]], [PEAK, PEAK / LAST], rtol=1e-5)


def test_warm_up_beyond_the_last_update():
    np.testing.assert_allclose(rates("linear", 1000), PEAK * UPDATES / 1000, rtol=1e-6)


def test_schedule_round_trip():
    schedule = WarmupSchedule("linear", PEAK, WARMUP, LAST)
    optimizer = keras.optimizers.SGD(schedule)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again._learning_rate.get_config() == schedule.get_config()


GRADIENT = np.array([2.0, -0.5, 1e-3, -3.0], np.float32)
START = np.array([1.0, -2.0, 3.0, 4.0], np.float32)


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("sgd", GRADIENT),
        # Bias-corrected moments of one gradient are that gradient and its square.
        ("adam", np.sign(GRADIENT)),
        # Shazeer and Stern 2018, algorithm 4, whose β2 is 0 at first; α is RMS(x) times the rate.
        ("adafactor", np.sign(GRADIENT) * np.sqrt(np.mean(START**2))),
    ],
)
def test_first_update(name, direction):
    training = TrainingConfig(
        optimizer=name, learning_rate=PEAK, schedule="constant", warmup_steps=WARMUP
    )
    variable = keras.Variable(START)
    build_optimizer(training).apply([keras.ops.convert_to_tensor(GRADIENT)], [variable])
    expected = START - PEAK / WARMUP * direction
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam", "adafactor"])
def test_variables_have_the_same_names_in_every_run(name):
    """With weight decay too, which needs none."""
    decay = 0.1 if name == "adam" else 0.0
    paths = []
    for weight_decay in (0.0, decay):
        optimizer = build_optimizer(TrainingConfig(optimizer=name, weight_decay=weight_decay))
        optimizer.build([keras.Variable(START, name="weight")])
        paths.append([variable.path for variable in optimizer.variables])
    assert paths[0] == paths[1] and f"{name}/iteration" in paths[0]


def test_adam_has_the_field_s_settings():
    adam = build_optimizer(TrainingConfig())
    assert (adam.beta_1, adam.beta_2, adam.epsilon) == (0.9, 0.998, 1e-9)


@pytest.mark.parametrize("name", ["sgd", "adam", "adafactor"])
def test_the_norm_of_all_gradients_together_is_limited(name):
    random = np.random.default_rng(0)
    start = [random.normal(size=shape).astype("float32") for shape in ((3, 2), (4,))]
    clipped, plain = (
        TrainingConfig(optimizer=name, clip_norm=limit, schedule="constant", warmup_steps=0)
        for limit in (2.0, None)
    )
    optimizers = build_optimizer(clipped), build_optimizer(plain)
    weights = [[keras.Variable(value) for value in start] for _ in optimizers]
    # The norm of the first is below the limit.
    for scale in (0.1, 10.0, 3.0):
        gradients = [scale * random.normal(size=value.shape).astype("float32") for value in start]
        norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients))
        assert (norm > 2) == (scale > 1)
        factors = 1.0, min(1.0, 2.0 / norm)
        for optimizer, variables, factor in zip(optimizers, weights, factors, strict=True):
            given = [keras.ops.convert_to_tensor(factor * gradient) for gradient in gradients]
            optimizer.apply(given, variables)
    for actual, expected, value in zip(*weights, start, strict=True):
        expected = keras.ops.convert_to_numpy(expected)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(actual), expected, rtol=1e-5)
        assert np.max(np.abs(expected - value)) > 1e-3


def test_weight_decay_is_of_weights_that_are_no_biases_and_no_norms():
    """At a gradient of zero it is all there is."""
    training = TrainingConfig(
        learning_rate=0.5, schedule="constant", warmup_steps=0, weight_decay=0.1
    )
    shapes = {"kernel": (2, 3), "embeddings": (4, 2), "bias": (2, 2), "gamma": (3,), "beta": (3,)}
    variables = [keras.Variable(np.ones(shape), name=name) for name, shape in shapes.items()]
    # T5's, of distances.
    attention = keras.layers.Layer(name="self_attention")
    distances = attention.add_weight(shape=(2, 2), initializer="ones", name="embeddings")
    optimizer = build_optimizer(training)
    for _ in range(2):
        gradients = [keras.ops.zeros(variable.shape) for variable in (*variables, distances)]
        optimizer.apply(gradients, [*variables, distances])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(distances), np.ones((2, 2)))
    found = {v.name: float(keras.ops.convert_to_numpy(v).flat[0]) for v in variables}
    decayed = pytest.approx((1 - 0.5 * 0.1) ** 2)
    assert found == {"kernel": decayed, "embeddings": decayed, "bias": 1, "gamma": 1, "beta": 1}


def test_weight_decay_of_another_optimizer_is_refused():
    training = TrainingConfig(optimizer="adafactor", weight_decay=0.1)
    with pytest.raises(UserError, match="^--weight_decay=0.1 is for --optimizer=adam, not for ada"):
        build_optimizer(training)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_round_trip(weight_decay):
    training = TrainingConfig(clip_norm=0.5, weight_decay=weight_decay)
    optimizer = build_optimizer(training)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer) and again.global_clipnorm == 0.5
    assert again.weight_decay == (weight_decay or None)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_adafactor_s_rate_is_the_one_given(shape):
    """At update 10,000 too, where 1 / sqrt(step) is .01."""
    training = TrainingConfig(optimizer="adafactor", learning_rate=PEAK, schedule="constant")
    optimizer = build_optimizer(training)
    gradient, start = np.sign(GRADIENT).reshape(shape), START.reshape(shape)
    variable = keras.Variable(start)
    optimizer.build([variable])
    optimizer.iterations.assign(9999)
    optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    # Clipped to a root mean square of 1.
    expected = start - PEAK * np.sqrt(np.mean(START**2)) * gradient
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, rtol=1e-5)


def test_adafactor_is_that_of_keras_in_less_memory():
    settings = {"beta_2_decay": -0.8, "clip_threshold": 1.0, "relative_step": False}
    training = TrainingConfig(optimizer="adafactor", schedule="constant", warmup_steps=0)
    ours = build_optimizer(training)
    theirs = keras.optimizers.Adafactor(training.learning_rate, **settings)
    random = np.random.default_rng(0)
    start = [random.normal(size=shape).astype("float32") for shape in ((5, 3), (4,), (2, 3, 4))]
    weights = [[keras.Variable(value) for value in start] for _ in range(2)]
    for _ in range(4):
        gradients = [random.normal(size=value.shape).astype("float32") for value in start]
        for optimizer, variables in zip((ours, theirs), weights, strict=True):
            optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients], variables)
    for actual, expected, value in zip(*weights, start, strict=True):
        expected = keras.ops.convert_to_numpy(expected)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(actual), expected, rtol=1e-5)
        assert np.max(np.abs(expected - value)) > 1e-4
    # Rows and columns of the matrices; the vector's moments and two placeholders; the step.
    assert sum(np.prod(v.shape) for v in ours.variables) == 5 + 3 + 4 + 2 + 2 * 3 + 2 * 4 + 1


def test_adafactor_of_a_row_without_a_gradient():
    """Such as padding's: its moment, 1e-30, times that of a small column has no float32."""
    training = TrainingConfig(
        optimizer="adafactor", learning_rate=PEAK, schedule="constant", warmup_steps=0
    )
    optimizer = build_optimizer(training)
    random = np.random.default_rng(0)
    start = random.normal(size=(60, 50)).astype("float32")
    gradient = random.normal(size=start.shape).astype("float32")
    gradient[:, 0] *= 1e-6
    gradient[0] = 0
    variable = keras.Variable(start)
    optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    squares = gradient.astype("float64") ** 2 + 1e-30
    rows, columns = squares.mean(1, keepdims=True), squares.mean(0, keepdims=True)
    update = gradient / np.sqrt(rows / rows.mean() * columns)
    update /= max(1, np.sqrt(np.mean(update**2)))
    expected = start - PEAK * np.sqrt(np.mean(start**2)) * update
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, rtol=1e-5, atol=1e-6)
    assert np.all(expected[0] == start[0])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's kernel")
@pytest.mark.parametrize("jit", [False, True])
def test_adam_is_that_of_keras(jit):
    """Five updates, compiled by XLA or not, of a matrix, a vector and rows of a table."""
    import tensorflow as tf

    training = TrainingConfig(optimizer="adam", learning_rate=0.1, warmup_steps=3, train_steps=5)
    ours = build_optimizer(training)
    config = {**ours.get_config(), "learning_rate": ours._learning_rate}
    theirs = keras.optimizers.Adam(**config)
    random = np.random.default_rng(0)
    start = [random.normal(size=shape).astype("float32") for shape in ((4, 3), (3,), (5, 2))]

    def updated(optimizer):
        random = np.random.default_rng(1)
        variables = [keras.Variable(value) for value in start]
        optimizer.build(variables)

        @tf.function(jit_compile=jit)
        def update(matrix, vector, rows):
            table = tf.IndexedSlices(rows, tf.constant([3, 1]), tf.constant([5, 2]))
            optimizer.apply([matrix, vector, rows if jit else table], variables)

        for _ in range(5):
            sizes = (4, 3), (3,), (5, 2) if jit else (2, 2)
            update(*(tf.constant(random.normal(size=size), tf.float32) for size in sizes))
        return [value.numpy() for value in (*variables, *optimizer.variables)]

    mine, other = updated(ours), updated(theirs)
    assert len(mine) == 3 * 3 + 1
    for one, two in zip(mine, other, strict=True):
        # 1 - β2 of the kernel is that of β2 rounded to float32: .002 to 1.3e-5.
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=1e-6)
    for before, after in zip(start, mine, strict=False):
        assert np.abs(before - after).max() > 0.1
