"""Two replicas are one device, on batches whose halves hold very different numbers of tokens.

The runs are in a process of their own: the number of CPU devices is fixed when TensorFlow starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "1": {"n": 1},
    "3-shared": {"n": 3},
    "3-unshared": {"n": 3, "shared": False},
}
WAYS = ("fit", "step_runner")
STEPS, ROWS = 3, 4


def data():
    """Rows 0 and 1 of each batch go to one replica, 2 and 3 to the other."""
    from tf_teaforn import testing

    long, short = (testing.random_pairs(2 * STEPS, 4, length, seed=9) for length in (6, 2))
    pairs = [pair for i in range(0, 2 * STEPS, 2) for pair in (*long[i : i + 2], *short[i : i + 2])]
    inputs, targets, weights = testing.padded_batch(pairs)
    weights[-2:] = 0.0  # the last batch is full on one replica only
    return inputs, targets, weights


def spoiled_data():
    """`data` with a loss that is not a number in each batch, on the first replica."""
    inputs, targets, weights = data()
    weights[::ROWS, 0] = np.nan
    return inputs, targets, weights


def replica_masks(strategy):
    """Dropout masks of the replicas in two steps, and the generator's state after them."""
    import keras
    import tensorflow as tf

    from tf_teaforn.tf_backend.random import seeds_of_this_replica

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dropout(0.5, seed=3)])

    @tf.function
    def step():
        with seeds_of_this_replica(model):
            return model(tf.ones([64]), training=True)

    masks = [strategy.experimental_local_results(strategy.run(step)) for _ in range(2)]
    states = strategy.experimental_local_results(model.layers[0].seed_generator.state.value)
    return np.array(masks), np.array([state.numpy() for state in states])


def train_all(output):
    """Trains every case on one device and on two in both ways; writes weights and logs."""
    import keras
    import tensorflow as tf

    from tf_teaforn import TeaForN, testing
    from tf_teaforn.tf_backend.step_runner import StepRunner

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    mirrored = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    assert mirrored.num_replicas_in_sync == 2
    one = tf.distribute.get_strategy()
    for name, strategy in (("one", one), ("mirrored", mirrored)):
        for time in (1, 2):
            masks, states = replica_masks(strategy)
            np.savez(f"{output}/masks-{name}-{time}.npz", masks=masks, states=states)
    dataset, spoiled = (
        tf.data.Dataset.from_tensor_slices(arrays).batch(ROWS, drop_remainder=True)
        for arrays in (data(), spoiled_data())
    )

    def run(strategy, way, settings):
        with strategy.scope():
            model = testing.randomize(TeaForN(testing.tiny_model(), discount=0.7, **settings))
            model.compile(optimizer=keras.optimizers.SGD(0.5, momentum=0.5))
        if way == "fit":
            history = model.fit(dataset, epochs=1, shuffle=False, verbose=0).history
            logs = {name: values[-1] for name, values in history.items()}
            evaluated = model.evaluate(dataset, return_dict=True, verbose=0)
        else:
            runner = StepRunner(strategy, model, skip_nonfinite=way == "skip")
            training = dataset.concatenate(spoiled) if way == "skip" else dataset
            batches = runner.iterator(lambda shard: training.repeat())
            runner.train(batches, first_step=1)
            runner.train(batches, first_step=2, steps=STEPS - 1)
            if way == "skip":
                assert runner.guard.read() == (0, None, "")
                runner.train(batches, first_step=STEPS + 1, steps=STEPS)
                what = "the loss of stage 0, the gradient"
                assert runner.guard.read() == (STEPS, STEPS + 1, what)
                assert runner.guard.read() == (STEPS, None, what)
                assert model.optimizer.iterations.numpy() == STEPS
            logs = runner.read_logs()
            evaluated = runner.test(dataset)
        logs.update({f"test_{name}": value for name, value in evaluated.items()})
        return {weight.path: keras.ops.convert_to_numpy(weight) for weight in model.weights}, logs

    for case, settings in CASES.items():
        runs = {"one": run(one, "fit", settings)}
        runs.update({way: run(mirrored, way, settings) for way in WAYS})
        if case == "1":
            runs["skip"] = run(mirrored, "skip", settings)
        for way, (weights, logs) in runs.items():
            np.savez(f"{output}/{case}-{way}.npz", **weights)
            Path(f"{output}/{case}-{way}.json").write_text(json.dumps(logs))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("replicas")
    subprocess.run(
        [sys.executable, "-m", "tests.test_replicas", output],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "tensorflow"},
        check=True,
    )
    return output


def read(results, case, way):
    with np.load(results / f"{case}-{way}.npz") as weights:
        return dict(weights), json.loads((results / f"{case}-{way}.json").read_text())


def test_the_halves_of_a_batch_are_uneven():
    _, _, weights = data()
    tokens = weights.reshape(STEPS, 2, -1).sum(axis=-1)
    assert np.all(tokens[:, 0] > 2 * tokens[:, 1]) and tokens[-1, 1] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_are_one_device(results, case, way):
    expected, expected_logs = read(results, case, "one")
    weights, logs = read(results, case, way)
    assert weights.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-6, err_msg=path)
    assert logs.keys() == expected_logs.keys()
    assert logs["tokens"] == data()[2].sum()
    for name, value in expected_logs.items():
        assert logs[name] == pytest.approx(value, rel=1e-5), name


def test_steps_that_are_not_finite_on_one_replica_change_nothing_on_any(results):
    expected, _ = read(results, "1", "step_runner")
    weights, logs = read(results, "1", "skip")
    for path, value in expected.items():
        np.testing.assert_array_equal(weights[path], value, err_msg=path)
    # Nor do they spoil the means.
    assert logs["tokens"] == data()[2].sum() and np.isfinite(logs["loss"])


def test_replicas_draw_masks_of_their_own_that_can_be_drawn_again(results):
    files = {
        name: [np.load(results / f"masks-{name}-{time}.npz") for time in (1, 2)]
        for name in ("one", "mirrored")
    }
    one, mirrored = (files[name][0]["masks"] for name in ("one", "mirrored"))
    assert mirrored.shape == (2, 2, 64)
    flat = mirrored.reshape(4, 64)
    assert all(np.any(flat[i] != flat[j]) for i in range(4) for j in range(i))
    # The first replica draws what one device does.
    np.testing.assert_array_equal(mirrored[:, 0], one[:, 0])
    for runs in files.values():
        np.testing.assert_array_equal(runs[0]["masks"], runs[1]["masks"])
        for run in runs:
            np.testing.assert_array_equal(run["states"], [[3, 2]] * len(run["states"]))


@pytest.mark.parametrize("case", CASES)
def test_training_moved_the_weights(results, case):
    from tf_teaforn import TeaForN, testing

    model = testing.randomize(TeaForN(testing.tiny_model(), **CASES[case]))
    trained, _ = read(results, case, "one")
    moves = [np.max(np.abs(trained[w.path] - w.numpy())) for w in model.weights]
    assert min(moves) > 1e-4


if __name__ == "__main__":
    train_all(sys.argv[1])
