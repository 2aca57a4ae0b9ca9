"""Several replicas, parts of a batch and XLA's code are one eager device, on uneven batches.

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
    "2-shared": {"n": 2},
    "2-unshared": {"n": 2, "shared": False},
    "3-shared": {"n": 3},
    "3-unshared": {"n": 3, "shared": False},
}
STEPS, ROWS, LENGTH = 2, 8, 6
# Half a batch at a time.
PARTS = {"micro_batch_tokens": ROWS * LENGTH // 2}
# (case, name) -> number of replicas, what calls the step, settings. What is not named is eager: to
# trace a step of several replicas takes longer than a few steps do, of four the longest.
RUNS = {
    (case, f"{replicas}{name}"): (replicas, "eager", settings)
    for case in CASES
    for replicas in (2, 4)
    for name, settings in {"": {}, "-parts": PARTS}.items()
} | {
    **{(case, "1-parts"): (1, "eager", PARTS) for case in CASES},
    ("1", "2"): (2, "runner", {}),
    ("1", "4-parts"): (4, "runner", PARTS),
    ("2-unshared", "1-xla"): (1, "xla", {}),
    ("2-unshared", "2"): (2, "runner", {"remat": "layer"}),
    ("3-shared", "1-xla-parts"): (1, "xla", {**PARTS, "remat": "stage"}),
    ("3-unshared", "2-parts"): (2, "runner", {**PARTS, "remat": "stage"}),
}
# Thresholds that the gradient of the batch is above, and that of a replica alone at times below.
CLIPPINGS = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.2},
    "clipvalue": {"clipvalue": 0.01},
    "accumulated": {"global_clipnorm": 0.2, "gradient_accumulation_steps": 2},
    "scaled": {"global_clipnorm": 0.2},
}
# What leaves the second replica of a batch of `ROWS` without a row.
REMAINDER = ROWS + 1
ADAM = {
    ("1", "2"): (2, "runner", {}),
    ("2-shared", "4"): (4, "eager", PARTS),
    ("2-unshared", "2"): (2, "eager", {}),
    ("3-shared", "4"): (4, "eager", {}),
    ("3-unshared", "2"): (2, "eager", PARTS),
}


def data():
    """The first rows of each batch are long, the last ones short."""
    from tf_teaforn import testing

    half = ROWS // 2
    long, short = (testing.random_pairs(half * STEPS, 4, length, seed=9) for length in (LENGTH, 2))
    pairs = [
        pair
        for i in range(0, half * STEPS, half)
        for pair in (*long[i : i + half], *short[i : i + half])
    ]
    inputs, targets, weights = testing.padded_batch(pairs)
    weights[-half:] = 0.0  # the last batch is full on the first replicas only
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


def losses_of_equal_rows(strategy, dropout):
    """Of a train step in which each replica has the same row."""
    import keras
    import tensorflow as tf

    from tf_teaforn import TeaForN, testing

    with strategy.scope():
        model = TeaForN(testing.tiny_model(dropout=dropout), n=2)
        model.compile(optimizer=keras.optimizers.SGD())
        model.optimizer.build(model.trainable_variables)
    model.update_metrics = lambda sums: sums.total
    inputs, targets, weights = data()
    row = tf.nest.map_structure(lambda x: tf.constant(x[:1]), (inputs, targets, weights))
    losses = strategy.run(model.train_step, args=(row,))
    return [float(loss) for loss in strategy.experimental_local_results(losses)]


def on_its_rows(step, rows):
    """`step` on the rows of a batch that are the replica's."""
    import tensorflow as tf

    def run(batch):
        first = int(tf.distribute.get_replica_context().replica_id_in_sync_group) * rows
        return step(tf.nest.map_structure(lambda x: x[first : first + rows], batch))

    return run


def train_all(output, most_replicas):
    """Makes the runs on 4 replicas, or those on 2 and on 1; writes weights and logs.

    Strategies of different sizes cannot be in one process: their collectives would be mixed up.
    """
    import keras
    import tensorflow as tf

    from tf_teaforn import TeaForN, testing
    from tf_teaforn.optimizers import Adam
    from tf_teaforn.tf_backend.step_runner import StepRunner

    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * most_replicas
    tf.config.set_logical_device_configuration(cpu, devices)
    strategies = {
        1: tf.distribute.get_strategy(),
        most_replicas: tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(most_replicas)]),
    }
    if most_replicas == 2:
        for name, strategy in (("one", strategies[1]), ("mirrored", strategies[2])):
            for time in (1, 2):
                masks, states = replica_masks(strategy)
                np.savez(f"{output}/masks-{name}-{time}.npz", masks=masks, states=states)
        losses = {rate: losses_of_equal_rows(strategies[2], rate) for rate in (0.0, 0.5)}
        Path(f"{output}/equal-rows.json").write_text(json.dumps(losses))
    dataset, spoiled = (
        tf.data.Dataset.from_tensor_slices(arrays).batch(ROWS, drop_remainder=True)
        for arrays in (data(), spoiled_data())
    )
    remainder = tf.data.Dataset.from_tensor_slices(data()).take(REMAINDER).batch(ROWS)

    def run(case, way, optimizer, replicas, caller, settings):
        strategy = strategies[replicas]
        assert strategy.num_replicas_in_sync == replicas
        with strategy.scope():
            settings = {**CASES[case], **settings}
            model = testing.randomize(TeaForN(testing.tiny_model(), discount=0.7, **settings))
            model.compile(optimizer=optimizer())
        logs = {}
        if caller == "fit":
            model.run_eagerly = replicas == 1
            history = model.fit(remainder, epochs=1, shuffle=False, verbose=0).history
            logs = {name: values[-1] for name, values in history.items()}
            evaluated = model.evaluate(remainder, return_dict=True, verbose=0)
            logs.update({f"test_{name}": value for name, value in evaluated.items()})
        elif caller == "runner":
            skip = way == "2-skip"
            runner = StepRunner(strategy, model, skip_nonfinite=skip)
            training = dataset.concatenate(spoiled) if skip else dataset
            batches = runner.iterator(lambda shard: training.repeat())
            runner.train(batches, first_step=1, steps=STEPS)
            if skip:
                assert runner.guard.read() == (0, None, "")
                runner.train(batches, first_step=STEPS + 1, steps=STEPS)
                what = "the loss of stage 0, the gradient"
                assert runner.guard.read() == (STEPS, STEPS + 1, what)
                assert runner.guard.read() == (STEPS, None, what)
                assert model.optimizer.iterations.numpy() == STEPS
            logs = runner.read_logs()
            if (case, way) == ("1", "2"):
                logs.update({f"test_{k}": value for k, value in runner.test(dataset).items()})
        else:
            step = model.train_step
            if caller == "xla":
                step = tf.function(step, jit_compile=True)
            with strategy.scope():
                model.optimizer.build(model.trainable_variables)
            for batch in dataset:
                strategy.run(on_its_rows(step, ROWS // replicas), args=(batch,))
            logs = {metric.name: metric.result() for metric in model.metrics}
            if way == "eager":
                logs = {name: float(value) for name, value in logs.items()}
                model.reset_metrics()
                for batch in dataset:
                    tested = model.test_step(batch)
                logs.update({f"test_{name}": float(value) for name, value in tested.items()})
        weights = {weight.path: keras.ops.convert_to_numpy(weight) for weight in model.weights}
        np.savez(f"{output}/{case}-{way}.npz", **weights)
        logs = {name: float(value) for name, value in logs.items()}
        Path(f"{output}/{case}-{way}.json").write_text(json.dumps(logs))

    def sgd():
        return keras.optimizers.SGD(0.4, momentum=0.5)

    runs = {(case, "eager"): (sgd, 1, "eager", {}) for case in CASES}
    runs |= {key: (sgd, *settings) for key, settings in RUNS.items()}
    runs["1", "2-skip"] = sgd, 2, "runner", {}
    for name, clipping in CLIPPINGS.items():

        def clipped(name=name, clipping=clipping):
            optimizer = keras.optimizers.SGD(0.4, momentum=0.5, **clipping)
            if name == "scaled":
                return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
            return optimizer

        runs["1", f"eager-{name}"] = clipped, 1, "eager", {}
        caller = "runner" if name == "global_clipnorm" else "eager"
        runs["1", f"2-{name}"] = clipped, 2, caller, {}
    for replicas in (1, 2):
        runs["2-shared", f"{replicas}-remainder"] = sgd, replicas, "fit", {}
    for (case, way), settings in ADAM.items():
        # By Keras' own operations.
        runs[case, "adam-eager"] = keras.optimizers.Adam, 1, "eager", {}
        runs[case, f"adam-{way}"] = Adam, *settings
    for key, settings in runs.items():
        if settings[1] == most_replicas or settings[1] == 1 and most_replicas == 2:
            run(*key, *settings)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("replicas")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.test_replicas", output, replicas],
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": "tensorflow"},
        )
        for replicas in ("2", "4")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    return output


def read(results, case, way):
    with np.load(results / f"{case}-{way}.npz") as weights:
        return dict(weights), json.loads((results / f"{case}-{way}.json").read_text())


def test_the_parts_of_a_batch_are_uneven():
    inputs, _, weights = data()
    assert weights.shape[1] == LENGTH and inputs["encoder_token_ids"].shape[1] <= LENGTH
    tokens = weights.reshape(STEPS, 2, -1).sum(axis=-1)
    assert np.all(tokens[:, 0] >= 2 * tokens[:, 1]) and tokens[-1, 1] == 0


def test_every_case_runs_on_every_number_of_replicas_whole_and_in_parts():
    found = [(case, 1, False) for case in CASES]
    found += [(case, run[0], "micro_batch_tokens" in run[2]) for (case, _), run in RUNS.items()]
    assert {(c, r, p) for c in CASES for r in (1, 2, 4) for p in (False, True)} <= set(found)


def assert_same_logs(logs, expected, rows=None):
    assert logs.keys() <= expected.keys() and "loss" in logs
    assert logs["tokens"] == data()[2][:rows].sum()
    for name, value in logs.items():
        assert value == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize(("case", "way"), RUNS, ids=str)
def test_every_way_is_the_eager_one(results, case, way):
    expected, expected_logs = read(results, case, "eager")
    weights, logs = read(results, case, way)
    assert_same_weights(weights, expected)
    assert_same_logs(logs, expected_logs)


def assert_same_weights(weights, expected):
    assert weights.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_the_gradient_of_the_whole_batch_is_clipped(results, clipping):
    expected, expected_logs = read(results, "1", f"eager-{clipping}")
    weights, logs = read(results, "1", f"2-{clipping}")
    assert_same_weights(weights, expected)
    assert_same_logs(logs, expected_logs)
    unclipped, _ = read(results, "1", "eager")
    assert max(np.max(np.abs(unclipped[path] - value)) for path, value in expected.items()) > 1e-3


def test_a_replica_without_a_row(results):
    expected, expected_logs = read(results, "2-shared", "1-remainder")
    weights, logs = read(results, "2-shared", "2-remainder")
    assert_same_weights(weights, expected)
    assert_same_logs(logs, expected_logs, REMAINDER)


@pytest.mark.parametrize(("case", "way"), ADAM, ids=str)
def test_losses_with_adam(results, case, way):
    """Its weights differ: it turns rounding noise on gradients of zero into steps."""
    assert_same_logs(read(results, case, f"adam-{way}")[1], read(results, case, "adam-eager")[1])


def test_steps_that_are_not_finite_on_one_replica_change_nothing_on_any(results):
    expected, _ = read(results, "1", "2")
    weights, logs = read(results, "1", "2-skip")
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


def test_a_train_step_drops_out_differently_on_each_replica(results):
    losses = json.loads((results / "equal-rows.json").read_text())
    assert losses["0.0"][0] == pytest.approx(losses["0.0"][1])
    assert losses["0.5"][0] != pytest.approx(losses["0.5"][1], rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_training_moved_the_weights(results, case):
    from tf_teaforn import TeaForN, testing

    model = testing.randomize(TeaForN(testing.tiny_model(), **CASES[case]))
    trained, _ = read(results, case, "eager")
    moves = [np.max(np.abs(trained[w.path] - w.numpy())) for w in model.weights]
    assert min(moves) > 1e-4


if __name__ == "__main__":
    train_all(sys.argv[1], int(sys.argv[2]))
