"""Steps with a clipped gradient and weight decay: NumPy's, in parts, under JAX and on replicas."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tf_teaforn import TeaForN, testing
from tf_teaforn.config import TrainingConfig
from tf_teaforn.optimizers import build_optimizer

ROOT = Path(__file__).resolve().parent.parent
RATE, CLIP, DECAY = 0.03, 0.25, 0.4
BETA_1, BETA_2, EPSILON = 0.9, 0.998, 1e-9
STEPS = 3
# Of 4 rows a batch, 3 at a time, which leaves a part unfilled.
PARTS = {"micro_batch_tokens": 15}
OPTIMIZERS = {
    "adam": {"optimizer": "adam", "clip_norm": CLIP, "weight_decay": DECAY},
    "sgd": {"optimizer": "sgd", "clip_norm": CLIP},
}


def compiled(optimizer, **settings):
    """A `TeaForN` with an optimizer of `OPTIMIZERS`, and its batches."""
    model = testing.randomize(TeaForN(testing.tiny_model(), n=2, discount=0.7, **settings))
    fixed = {"learning_rate": RATE, "schedule": "constant", "warmup_steps": 0}
    model.compile(optimizer=build_optimizer(TrainingConfig(**fixed, **OPTIMIZERS[optimizer])))
    pairs = testing.random_pairs(4 * STEPS, 4, 5)
    # With the longest, which is cut off again: one shape, one program.
    batches = [testing.padded_batch([*pairs[i::STEPS], pairs[0]]) for i in range(STEPS)]
    return model, keras.tree.map_structure(lambda x: x[:-1], batches)


def is_bias_or_norm(path):
    return path.rpartition("/")[2] in ("bias", "gamma", "beta")


def check_against_numpy(optimizer, **settings):
    """Algorithm 2 of Loshchilov and Hutter 2019 on the gradient of the whole batch, clipped."""
    from keras import ops

    from tests.gradients import loss_and_gradients

    model, batches = compiled(optimizer, **settings)
    momentum, velocity, norms, far = {}, {}, [], {}
    for step, batch in enumerate(batches, start=1):
        _, gradients = loss_and_gradients(model, *batch)
        gradients = {path: value / batch[2].sum() for path, value in gradients.items()}
        norms.append(np.sqrt(sum(np.sum(value**2) for value in gradients.values())))
        start = {w.path: ops.convert_to_numpy(w) for w in model.trainable_weights}
        model.train_on_batch(*batch)
        for weight in model.trainable_weights:
            path, before = weight.path, start[weight.path]
            gradient = gradients[path] * min(1, CLIP / norms[-1])
            if optimizer == "sgd":
                update = RATE * gradient
            else:
                momentum[path] = BETA_1 * momentum.get(path, 0) + (1 - BETA_1) * gradient
                velocity[path] = BETA_2 * velocity.get(path, 0) + (1 - BETA_2) * gradient**2
                mean = momentum[path] / (1 - BETA_1**step)
                variance = velocity[path] / (1 - BETA_2**step)
                decay = 0 if is_bias_or_norm(path) else DECAY
                update = RATE * (mean / (np.sqrt(variance) + EPSILON) + decay * before)
            # Adam turns the rounding noise of a gradient of zero into steps.
            far[path] = far.get(path, True) & (np.abs(gradient) > 2e-4)
            moved = ops.convert_to_numpy(weight) - before
            np.testing.assert_allclose(
                moved[far[path]], -update[far[path]], rtol=1e-3, atol=2e-6, err_msg=path
            )
    assert np.mean(np.concatenate([value.ravel() for value in far.values()])) > 0.5
    # The first is cut in two at least, and by another factor than the last.
    assert norms[0] > 2 * CLIP and abs(norms[0] / norms[-1] - 1) > 0.05, norms


@pytest.mark.parametrize("settings", [{}, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_that_of_numpy(optimizer, settings):
    check_against_numpy(optimizer, **settings)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_a_step_under_jax_is_that_of_numpy():
    run_here("jax", "jax")


def test_replicas_step_as_one_device_does():
    run_here("tensorflow", "replicas")


def run_here(backend, what):
    """This file as a program of its own, of another backend or with more devices."""
    environment = {**os.environ, "KERAS_BACKEND": backend}
    command = [sys.executable, "-m", "tests.test_clipping_and_decay", what]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def check_replicas():
    """Weights after some steps of two replicas of uneven rows, and of one device."""
    import tensorflow as tf

    from tf_teaforn.tf_backend.step_runner import StepRunner

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    weights = []
    for strategy in (
        tf.distribute.get_strategy(),
        tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]),
    ):
        with strategy.scope():
            model, batches = compiled("adam", **PARTS)
            # So that the rounding noise of a gradient of zero makes no step.
            model.optimizer.epsilon = 1e-3
        start = {weight.path: weight.numpy() for weight in model.weights}
        inputs, targets, mask = batches[0]
        mask[: len(mask) // 2, 1:] = 0
        rows = tf.data.Dataset.from_tensors((inputs, targets, mask)).repeat()
        runner = StepRunner(strategy, model)
        runner.train(runner.iterator(lambda shard: rows), first_step=1, steps=STEPS)  # noqa: B023
        weights.append({weight.path: weight.numpy() for weight in model.weights})
    for path, value in weights[0].items():
        np.testing.assert_allclose(weights[1][path], value, rtol=0, atol=1e-6, err_msg=path)
        assert np.max(np.abs(value - start[path])) > 1e-3, path


@pytest.mark.parametrize("clip", [{}, {"clip_norm": CLIP}])
def test_a_gradient_whose_square_overflows_is_skipped(clip):
    """Adam's moment of it, and the norm to clip by, would be infinite."""
    import tensorflow as tf

    from tf_teaforn.teaforn import LossSums
    from tf_teaforn.tf_backend.nonfinite import NonfiniteGuard

    variable = keras.Variable([1.0, 2.0])
    training = TrainingConfig(learning_rate=RATE, schedule="constant", warmup_steps=0, **clip)
    optimizer = build_optimizer(training)
    optimizer.build([variable])
    guard = NonfiniteGuard(stages=1, skip=True)
    loss = tf.constant(3.0)
    sums = LossSums(loss, (loss,), tf.constant(2.0), tf.constant(1.0))
    for step, gradient in enumerate(([3.0, 1.0], [3e19, 1.0]), start=1):
        before = variable.numpy()
        guard.begin(step)
        found = guard.update(optimizer, sums, [tf.constant(gradient)], [variable])
        changed = step == 1
        assert np.array_equal(variable.numpy(), before) != changed
        assert found.stages[0].numpy() == (3.0 if changed else 0.0)
    assert int(optimizer.iterations) == 1
    assert guard.read() == (1, 2, "the gradient")


if __name__ == "__main__":
    if sys.argv[1] == "replicas":
        check_replicas()
    else:
        for settings in ({}, PARTS):
            check_against_numpy("adam", **settings)
