"""The core on JAX, in a process without TensorFlow: losses, gradients and training are the same."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests import train_steps
from tf_teaforn import TeaForN, testing
from tf_teaforn.config import TrainingConfig
from tf_teaforn.optimizers import build_optimizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)

_WITHOUT_TENSORFLOW = """
import sys
sys.modules.update(dict.fromkeys(["tensorflow", "tensorflow_text", "tensorflow_datasets"]))
from tests.test_jax import run_on_jax
run_on_jax(sys.argv[1])
"""
ROOT = Path(__file__).resolve().parent.parent
TOP_K = {"stage_input": "top_k"}
CASES = {
    "1": {"n": 1},
    "3-shared": {"n": 3},
    "3-unshared": {"n": 3, "shared": False},
    "2-top_1": {"n": 2, "top_k": 1, **TOP_K},
    "2-top_5": {"n": 2, "top_k": 5, **TOP_K},
    "2-top_v": {"n": 2, "top_k": testing.TINY_VOCABULARY_SIZE, **TOP_K},
}
PACKED = ("3-shared",)
# Computed again in the backward pass under JAX alone, on packed batches.
REMATS = [
    ("3-shared", "stage"),
    ("3-unshared", "layer"),
    ("2-top_5", "stage"),
]
TRAINED = ("3-unshared",)
# Under JAX alone: two rows of a batch of four at a time, and three, which leaves a part unfilled.
PARTS = {
    "2": {"micro_batch_tokens": 10},
    "3": {"micro_batch_tokens": 15, "remat": "stage"},
}
# Gradients and activations of N = 2, batch 64, S = T = 20.
TEMPORARY_BYTES = 3.16e6


def teaforn(case, seed=0, **settings):
    settings = {**CASES[case], **settings}
    return testing.randomize(TeaForN(testing.tiny_model(), discount=0.7, **settings), seed)


def with_weights(model, folder, case):
    with np.load(f"{folder}/{case}-start.npz") as start:
        for weight in model.weights:
            weight.assign(start[weight.path])
    return model


def batch_of(case, packed=False):
    pairs = testing.random_pairs(8, 4, 5)
    if packed or case in PACKED:
        return testing.packed_batch([pairs[:3], pairs[3:4], pairs[4:]])
    return testing.padded_batch(pairs)


def weights_of(model):
    from keras import ops

    return {weight.path: ops.convert_to_numpy(weight) for weight in model.weights}


def train(model, optimizer, epochs=1, evaluate=True):
    import keras

    inputs, targets, weights = testing.padded_batch(testing.random_pairs(8, 4, 5))
    # What JAX is compared with: to trace its steps takes longer than to take them.
    model.compile(optimizer=optimizer, run_eagerly=keras.backend.backend() == "tensorflow")
    arguments = {"sample_weight": weights, "batch_size": 4, "verbose": 0}
    history = model.fit(inputs, targets, shuffle=False, epochs=epochs, **arguments).history
    if evaluate:
        history["evaluated"] = model.evaluate(inputs, targets, return_dict=True, **arguments)
    return history


def run(folder, read_weights):
    """Losses and gradients of all cases, and training of some; writes them into `folder`.

    Args:
        read_weights: whether start weights come from there or are written there.
    """
    import keras

    from tests.gradients import loss_and_gradients

    backend = keras.backend.backend()
    for case in CASES:
        model = teaforn(case, seed=1 if read_weights else 0)
        if read_weights:
            with_weights(model, folder, case)
        else:
            np.savez(f"{folder}/{case}-start.npz", **weights_of(model))
        losses, gradients = loss_and_gradients(model, *batch_of(case))
        np.savez(f"{folder}/{case}-{backend}.npz", losses=losses, **gradients)
        if not read_weights and case in dict(REMATS):
            losses, gradients = loss_and_gradients(model, *batch_of(case, packed=True))
            np.savez(f"{folder}/{case}-{backend}-packed.npz", losses=losses, **gradients)
        if case in TRAINED:
            train_and_write(model, f"{folder}/{case}-{backend}")


def train_and_write(model, name):
    import keras

    # An evaluation has no parts.
    whole = model.micro_batch_tokens is None
    logs = train(model, keras.optimizers.SGD(0.3, momentum=0.5), epochs=2, evaluate=whole)
    np.savez(f"{name}-trained.npz", **weights_of(model))
    Path(f"{name}.json").write_text(json.dumps(logs))


def run_in_parts(folder):
    """Losses and gradients computed again, training in parts of a batch, products of a step."""
    from tests.gradients import loss_and_gradients

    for case, remat in REMATS:
        model = with_weights(teaforn(case, seed=1, remat=remat), folder, case)
        losses, gradients = loss_and_gradients(model, *batch_of(case, packed=True))
        np.savez(f"{folder}/{case}-jax-{remat}.npz", losses=losses, **gradients)
    for case in TRAINED:
        for name, settings in PARTS.items():
            model = with_weights(teaforn(case, seed=1, **settings), folder, case)
            train_and_write(model, f"{folder}/{case}-jax-parts-{name}")
    flops = {name: train_step_flops(**each) for name, each in train_steps.SETTINGS.items()}
    flops |= {remat: train_step_flops(n=3, remat=remat) for remat in ("stage", "layer")}
    Path(f"{folder}/flops.json").write_text(json.dumps(flops))


def train_step_flops(**settings):
    import jax

    from tf_teaforn.hlo import matmul_flops
    from tf_teaforn.jax_backend.strategy import training_variables

    model, batch = train_steps.model_and_batch(**settings)
    state = jax.tree.map(lambda variable: variable.value, training_variables(model))
    with train_steps.loss_in_turns():
        lowered = jax.jit(model.train_step).lower(state, batch)
    return matmul_flops(lowered.as_text("hlo"))


def run_on_jax(folder):
    """What the process without TensorFlow does."""
    import keras

    from tests.gradients import check_discounts_that_change, check_frequent_rows
    from tf_teaforn.jax_backend.strategy import Strategy

    assert keras.backend.backend() == "jax"
    run(folder, read_weights=True)
    run_in_parts(folder)

    keras.utils.set_random_seed(0)
    # A model with all that draws random numbers learns, and is saved and loaded.
    model = TeaForN(testing.tiny_model(dropout=0.1), n=2, word_drop=0.1)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.03), initial_scale=8.0)
    losses = train(model, scaled, epochs=8, evaluate=False)["loss"]
    assert losses[-1] < losses[0] - 0.2, losses
    model.save(f"{folder}/jax.keras")
    loaded = keras.saving.load_model(f"{folder}/jax.keras")
    inputs, _, _ = batch_of("1")
    for a, b in zip(loaded(inputs), model(inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    other = keras.saving.load_model(f"{folder}/other.keras")
    # Saved is what TensorFlow chose on a CPU.
    other.jit_compile = True
    np.savez(f"{folder}/other-on-jax.npz", *map(np.asarray, other(inputs)))
    assert other.optimizer.get_config()["beta_2"] == 0.998 and other.optimizer.iterations == 2
    Path(f"{folder}/other-jax.json").write_text(json.dumps(loss_after_a_step(other)))
    assert compilations(steps=3) == [True, False, False]
    check_scores(loaded.seq2seq)
    check_frequent_rows()
    check_discounts_that_change()
    check_split(Strategy(1, 2))
    check_chunks(Strategy(2, 1))
    assert sys.modules["tensorflow"] is None
    del sys.modules["tensorflow"]
    check_datasets()


def check_datasets():
    """Ids of `tf.data` datasets are looked at here too."""
    import tensorflow as tf

    inputs, targets, weights = batch_of("1")
    good = tf.data.Dataset.from_tensors((inputs, targets, weights))
    bad = tf.data.Dataset.from_tensors((inputs, targets + testing.TINY_VOCABULARY_SIZE, weights))

    def compiled():
        # One a run: Keras takes a model's weights for the time of a call, also of one that fails.
        model = TeaForN(testing.tiny_model(), n=1)
        model.compile(optimizer="sgd")
        return model

    evaluated = compiled().evaluate(good, return_dict=True, verbose=0)
    assert evaluated["tokens"] == weights.sum()
    for run in (
        lambda model: model.fit(bad, verbose=0),
        lambda model: model.fit(good, validation_data=bad, verbose=0),
        lambda model: model.evaluate(bad, verbose=0),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="targets: an id is outside of"):
            run(compiled())


def loss_after_a_step(model):
    batch = batch_of("1")
    model.train_on_batch(*batch)
    return float(model.test_on_batch(*batch, return_dict=True)["loss"])


def check_scores(seq2seq):
    """The compiled function of bin/score is the one that it compiles."""
    from tf_teaforn.decoding import score
    from tf_teaforn.jax_backend.inference import score_function

    inputs, targets, _ = batch_of("1")
    ids = inputs["encoder_token_ids"]
    expected = score(seq2seq, {"encoder_token_ids": ids}, targets)
    assert np.all(np.asarray(expected) < 0)
    np.testing.assert_allclose(score_function(seq2seq)(ids, targets), expected, rtol=1e-5)


def check_split(strategy):
    """Heads, feed-forward units and subwords, or else their width, are split."""
    from tf_teaforn.models.hub import build_bart, build_t5

    def axes_of(build, *arguments, **settings):
        with strategy.scope():
            model = build(*arguments, **settings)
            model.build(None)
        return {
            "/".join(weight.path.split("/")[-2:]): tuple(
                strategy.distribution.get_variable_layout(weight).axes
            )
            for weight in model.weights
        }

    axes = axes_of(testing.tiny_model)
    assert axes["query/kernel"] == axes["inner/kernel"] == (None, "model")
    assert axes["output/kernel"] == axes["outer/kernel"] == ("model", None)
    assert axes["inner/bias"] == ("model",) and axes["outer/bias"] == (None,)
    # 17 subwords.
    assert axes["embedding/embeddings"] == (None, "model")
    sizes = {
        "num_layers": 1,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_heads": 2,
        "dropout": 0.0,
    }
    axes = axes_of(build_bart, 18, *[{**sizes, "max_positions": 16}] * 2)
    assert axes["query/kernel"] == (None, "model", None)
    assert axes["attention_output/kernel"] == ("model", None, None)
    assert axes["feedforward_intermediate_dense/kernel"] == (None, "model")
    assert axes["feedforward_intermediate_dense/bias"] == ("model",)
    assert axes["feedforward_output_dense/kernel"] == ("model", None)
    for vocabulary_size, axis in ((17, 0), (18, 1)):
        axes = axes_of(
            build_t5, vocabulary_size, *[{**sizes, "head_dim": 4, "gated": True}] * 2, tied=False
        )
        for name in ("query", "key", "value", "input", "gate"):
            assert axes[f"{name}_projector/kernel"] == (None, "model")
        assert axes["output_projector/kernel"] == ("model", None)
        assert axes["embedding/reverse_embeddings"][axis] == "model"


def check_chunks(strategy):
    """A device computes as many logits at a time as if it were alone."""
    import jax

    from tf_teaforn.jax_backend.strategy import distributed
    from tf_teaforn.objective import _CHUNK_LOGITS, _number_of_chunks

    def chunks(rows):
        return _number_of_chunks(rows, _CHUNK_LOGITS // 64)

    traced = []
    step = distributed(lambda rows, _: traced.append(chunks(rows)), strategy.distribution)
    jax.jit(step, static_argnums=0)(512, 0)
    assert (chunks(256), traced, chunks(512)) == (4, [4], 8)


def compilations(steps):
    """Whether anything was compiled in each of so many steps of `StepRunner`."""
    import jax
    import keras

    from tf_teaforn.jax_backend.strategy import StepRunner, guarded, make_strategy

    strategy, known = make_strategy("one"), []

    class Asking(TeaForN):
        def loss_sums(self, *args, **kwargs):
            known.append(keras.distribution.distribution())
            return super().loss_sums(*args, **kwargs)

    with strategy.scope():
        model = Asking(testing.tiny_model(dropout=0.1), n=2)
        model.compile(optimizer=keras.optimizers.Adam(0.03))
    runner = StepRunner(strategy, model, skip_nonfinite=True)
    batch = runner.put(testing.padded_batch(testing.random_pairs(8, 4, 5)))
    events, compiled = [], []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    for step in range(steps):
        events.clear()
        runner.train(iter([batch]), step + 1)
        compiled.append(any(name.endswith("backend_compile_duration") for name in events))
    jax.monitoring.clear_event_listeners()
    state = [*model.trainable_variables, *model.optimizer.variables]
    before = [np.array(variable.value) for variable in state]
    inputs, targets, weights = batch
    runner.train(iter([(inputs, targets, weights * np.nan)]), steps + 1)
    assert runner.guard.read()[:2] == (1, steps + 1)
    for variable, value in zip(state, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)
    # A gradient whose square overflows moves no weight, and spoils the optimizer.
    spoilt = ([np.ones(2)], [], [np.array([np.inf])], [])
    finite, kept = guarded(lambda *_: (0.0, spoilt), skip=True)(
        ([np.ones(2)], [], [np.zeros(1)], []), 0
    )
    assert not finite and kept[2][0] == 0
    # Validation, which may be left at any moment, leaves the weights where they are.
    weights = [variable.value for variable in model.trainable_variables]
    batch = testing.padded_batch(testing.random_pairs(8, 4, 5))
    assert runner.test(types.SimpleNamespace(as_numpy_iterator=lambda: iter([batch])))["loss"] > 0
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        assert variable.value is value and not value.is_deleted()
    # Steps and validation know over how many devices the rows are.
    assert len(known) > 1 and all(one is strategy.distribution for one in known)
    # As much as TensorFlow's estimate of the same step, within a factor of 2.
    assert 0.5 < runner.temporary_bytes(64, 20, 20) / TEMPORARY_BYTES < 2
    return compiled


def test_memory_of_a_step():
    import tensorflow as tf

    from tf_teaforn.tf_backend.step_runner import StepRunner

    model = TeaForN(testing.tiny_model(dropout=0.1), n=2)
    model.compile(optimizer="adam")
    runner = StepRunner(tf.distribute.get_strategy(), model)
    assert runner.temporary_bytes(64, 20, 20) == pytest.approx(TEMPORARY_BYTES, rel=0.1)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax")
    run(folder, read_weights=False)
    other = teaforn("3-unshared")
    other.compile(optimizer=build_optimizer(TrainingConfig(learning_rate=0.01, warmup_steps=0)))
    # Not of compile, whose arguments are saved.
    other.run_eagerly = True
    for _ in range(2):
        loss_after_a_step(other)
    other.save(folder / "other.keras")
    np.savez(folder / "other.npz", *map(np.asarray, other(batch_of("1")[0])))
    (folder / "other-tensorflow.json").write_text(json.dumps(loss_after_a_step(other)))
    subprocess.run(
        [sys.executable, "-c", _WITHOUT_TENSORFLOW, folder],
        cwd=ROOT,
        env={
            **os.environ,
            "KERAS_BACKEND": "jax",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        check=True,
    )
    return folder


def read(results, name):
    with np.load(results / f"{name}.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(results, case):
    assert_same(read(results, f"{case}-jax"), read(results, f"{case}-tensorflow"))


@pytest.mark.parametrize(("case", "remat"), REMATS)
def test_losses_and_gradients_computed_again(results, case, remat):
    expected = read(results, f"{case}-tensorflow-packed")
    assert_same(read(results, f"{case}-jax-{remat}"), expected)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.max(np.abs(value))), 1.0)
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("way", ["jax", *(f"jax-parts-{name}" for name in PARTS)])
@pytest.mark.parametrize("case", TRAINED)
def test_training(results, case, way):
    expected = read(results, f"{case}-tensorflow-trained")
    actual = read(results, f"{case}-{way}-trained")
    start = read(results, f"{case}-start")
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, rtol=0, atol=1e-5, err_msg=path)
        assert np.max(np.abs(value - start[path])) > 1e-4
    logs, expected_logs = (
        json.loads((results / f"{case}-{each}.json").read_text()) for each in (way, "tensorflow")
    )
    evaluated = expected_logs.pop("evaluated")
    if way == "jax":
        assert logs.pop("evaluated") == pytest.approx(evaluated, rel=1e-5)
    assert logs.keys() == expected_logs.keys()
    for name, values in expected_logs.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)


def test_products_of_a_train_step(results):
    flops = json.loads((results / "flops.json").read_text())
    for name in train_steps.SETTINGS:
        assert flops[name] == pytest.approx(train_steps.flops(name), rel=0.02), name
    total, others = train_steps.flops("3"), train_steps.flops("3", vocabulary_size=0)
    # All but the loss forwards once more, less what the backward pass does not look at.
    most = total + others / 3
    for remat in ("stage", "layer"):
        assert 0.9 * most < flops[remat] < 1.02 * most, remat


def test_a_saved_model_changes_backends_and_trains_on(results):
    expected = read(results, "other")
    assert read(results, "other-on-jax").keys() == expected.keys()
    for name, logits in read(results, "other-on-jax").items():
        np.testing.assert_allclose(logits, expected[name], rtol=1e-4, atol=1e-5)
    losses = [json.loads((results / f"other-{b}.json").read_text()) for b in ("jax", "tensorflow")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
