"""TeaForN against NumPy, against plain training, and inside Keras."""

import itertools
import json
import subprocess
import sys
import types
from unittest import mock

import keras
import numpy as np
import pytest
from keras import ops

from tests.gradients import check_discounts_that_change, gradients_of, loss_and_gradients
from tests.numpy_transformer import NumpyTransformer
from tf_teaforn import TeaForN, accumulation, testing
from tf_teaforn.errors import UserError
from tf_teaforn.models.catalog import build_model
from tf_teaforn.models.hub import build_bart, build_t5
from tf_teaforn.models.seq2seq import Seq2Seq
from tf_teaforn.models.transformer import FeedForward, TransformerDecoder

VOCABULARY_SIZE = testing.TINY_VOCABULARY_SIZE
WIDTH = testing.TINY_TRANSFORMER["hidden_dim"]
PAIRS = testing.random_pairs(8, 4, 5)
INPUTS, TARGETS, WEIGHTS = testing.padded_batch(PAIRS)
LENGTHS = WEIGHTS.sum(axis=1)

# k · D up to V gathers rows of the table, more scatters probabilities; V masks nothing.
STAGE_INPUTS = {
    "hidden": {},
    "top_1": {"stage_input": "top_k", "top_k": 1},
    "top_4": {"stage_input": "top_k", "top_k": 4},
    "top_5_scattered": {"stage_input": "top_k", "top_k": 5},
    "top_v": {"stage_input": "top_k", "top_k": VOCABULARY_SIZE},
}


def teaforn(model=None, **settings):
    """Every weight is random, those of the clones too."""
    model = model or {}
    return testing.randomize(TeaForN(testing.tiny_model(**model), **settings))


def values_of(model):
    return {weight.path: ops.convert_to_numpy(weight) for weight in model.weights}


def batch_sums(model, batch=(INPUTS, TARGETS, WEIGHTS)):
    sums = model.loss_sums(*keras.tree.map_structure(ops.convert_to_tensor, batch))
    return np.array([float(loss) for loss in sums.stages])


def fit(model, optimizer="sgd", epochs=1, weights=WEIGHTS, **compile_settings):
    """Updates on four rows each, the same for every model; returns the history."""
    model.compile(optimizer=optimizer, **compile_settings)
    history = model.fit(
        INPUTS,
        TARGETS,
        sample_weight=weights,
        batch_size=4,
        shuffle=False,
        epochs=epochs,
        verbose=0,
    )
    return history.history


def assert_same_weights(a, b, atol):
    a, b = (dict(model) if isinstance(model, dict) else values_of(model) for model in (a, b))
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_allclose(a[path], b[path], rtol=0, atol=atol, err_msg=path)


# --- The objective -----------------------------------------------------------------------------


all_settings = pytest.mark.parametrize(
    ("n", "shared", "stage_input"),
    # The first stages of three are those of two.
    [
        (1, True, "hidden"),
        (2, True, "hidden"),
        (2, False, "hidden"),
        *itertools.product((3,), (True, False), STAGE_INPUTS),
    ],
)


@all_settings
def test_losses_and_gradients_are_those_of_the_numpy_transformer(n, shared, stage_input):
    # Both norms, with and without biases, in the course of the cases.
    settings = {"norm": "pre" if shared else "post", "attention_bias": not shared}
    discount, label_smoothing = 0.6, 0.1
    model = teaforn(
        settings,
        n=n,
        shared=shared,
        discount=discount,
        label_smoothing=label_smoothing,
        **STAGE_INPUTS[stage_input],
    )
    batch = testing.padded_batch(PAIRS[:3])
    losses, gradients = loss_and_gradients(model, *batch)

    weights = {path: value.astype("float64") for path, value in values_of(model).items()}

    def reference(weights):
        transformer = NumpyTransformer(weights, {**testing.TINY_TRANSFORMER, **settings})
        return np.array(
            transformer.losses(
                *batch,
                n=n,
                shared=shared,
                label_smoothing=label_smoothing,
                **STAGE_INPUTS[stage_input],
            )
        )

    np.testing.assert_allclose(losses, reference(weights), rtol=1e-5)
    random = np.random.default_rng(0)
    assert gradients.keys() == weights.keys()
    for path, gradient in gradients.items():
        direction = random.normal(size=gradient.shape)
        if path.endswith("embeddings"):
            assert not np.any(gradient[0])
            direction[0] = 0.0
        direction /= np.linalg.norm(direction)
        above, below = (
            reference({**weights, path: weights[path] + step * direction}) for step in (1e-5, -1e-5)
        )
        expected = np.sum((above - below) / 2e-5 * discount ** np.arange(n))
        tolerance = 2e-4 * max(float(np.linalg.norm(gradient)), 0.1)
        assert np.sum(gradient * direction) == pytest.approx(expected, abs=tolerance), path


def plain_training(seq2seq, optimizer, epochs, label_smoothing):
    """Teacher forcing by hand: one-hot targets, Keras' cross-entropy, the mean over tokens."""
    cross_entropy = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=label_smoothing, reduction="none"
    )
    for start in [0, 4] * epochs:
        rows = slice(start, start + 4)
        inputs = {name: ids[rows] for name, ids in INPUTS.items()}

        def loss(rows=rows, inputs=inputs):
            one_hot = np.eye(VOCABULARY_SIZE, dtype="float32")[TARGETS[rows]]
            losses = cross_entropy(one_hot, seq2seq(inputs, training=True))
            return ops.sum(losses * WEIGHTS[rows]) / WEIGHTS[rows].sum(), ()

        variables = seq2seq.trainable_variables
        gradients, _, _ = gradients_of(loss, variables)
        optimizer.apply([ops.convert_to_tensor(g) for g in gradients], variables)


@pytest.mark.parametrize(
    "optimizer",
    [keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.01, epsilon=1e-4)],
    ids=["sgd", "adam"],
)
def test_one_stage_is_plain_cross_entropy_training(optimizer):
    plain = testing.tiny_model()
    before = values_of(plain)
    config = optimizer.get_config()
    plain_training(plain, type(optimizer).from_config(config), 3, label_smoothing=0.1)
    model = teaforn(n=1, label_smoothing=0.1)
    model.seq2seq.set_weights(list(before.values()))
    fit(model, optimizer, epochs=3)
    assert_same_weights(model, plain, atol=3e-6)
    assert max(np.max(np.abs(v - before[p])) for p, v in values_of(plain).items()) > 0.04


@pytest.mark.parametrize("shared", [True, False])
def test_discount_zero_is_one_stage(shared):
    one, two = teaforn(n=1), teaforn(n=2, discount=0.0, shared=shared)
    two.seq2seq.set_weights(one.seq2seq.get_weights())
    clones = [values_of(clone) for clone in two.clones]
    history_one, history_two = (
        fit(model, "sgd", epochs=2, run_eagerly=True) for model in (one, two)
    )
    assert_same_weights(one.seq2seq, two.seq2seq, atol=1e-6)
    np.testing.assert_allclose(history_two["loss"], history_one["loss"], rtol=1e-5)
    assert history_two["loss_1"] != history_two["loss_0"]
    for clone, before in zip(two.clones, clones, strict=True):
        assert_same_weights(clone, before, atol=0)


class SpyDecoder(TransformerDecoder):
    """Notes what it is called with."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def prepare(self, *args, **kwargs):
        self.seen.append({"prepare": self.name})
        return super().prepare(*args, **kwargs)

    def call(self, x, prepared, start_position=0, training=None):
        outputs = super().call(x, prepared, start_position, training)
        self.seen.append(
            {
                "x": ops.convert_to_numpy(x),
                "start_position": start_position,
                "outputs": ops.convert_to_numpy(outputs),
            }
        )
        return outputs


def spied(model=None, training=False, inputs=INPUTS, **settings):
    """The calls of all decoders of a `TeaForN` on one batch, and the `TeaForN`."""
    tiny = testing.tiny_model(**(model or {}))
    decoder = SpyDecoder.from_config(tiny.decoder.get_config())
    spy = testing.randomize(TeaForN(Seq2Seq(tiny.embedding, tiny.encoder, decoder), **settings))
    inputs = keras.tree.map_structure(ops.convert_to_tensor, inputs)
    spy.hidden_states(inputs, training=training)
    # In the order of the stages; a shared decoder has noted all of them.
    notes = [note for decoder in dict.fromkeys(spy.decoders) for note in decoder.seen]
    calls = [note for note in notes if "x" in note]
    return spy, calls, len(notes) - len(calls)


@pytest.mark.parametrize("shared", [True, False])
def test_stage_s_starts_at_position_s(shared):
    model, calls, preparations = spied(n=4, shared=shared)
    assert [call["start_position"] for call in calls] == [0, 1, 2, 3]
    assert preparations == (1 if shared else 4)
    table = ops.convert_to_numpy(model.seq2seq.embedding.embeddings)
    expected = table[INPUTS["decoder_token_ids"]] * WIDTH**0.5
    np.testing.assert_allclose(calls[0]["x"], expected, rtol=1e-6)
    assert not np.any(calls[0]["x"][:, 0])
    for previous, call in itertools.pairwise(calls):
        np.testing.assert_array_equal(call["x"], previous["outputs"])


def test_top_1_reads_the_embedding_of_the_best_token():
    model, calls, _ = spied(n=3, stage_input="top_k", top_k=1)
    table = ops.convert_to_numpy(model.seq2seq.embedding.embeddings)
    for previous, call in itertools.pairwise(calls):
        best = np.argmax(previous["outputs"] @ table.T, axis=-1)
        np.testing.assert_allclose(call["x"], table[best] * WIDTH**0.5, rtol=1e-5)


def test_top_v_reads_the_expected_embedding():
    model, calls, _ = spied(n=3, stage_input="top_k", top_k=VOCABULARY_SIZE)
    table = ops.convert_to_numpy(model.seq2seq.embedding.embeddings)
    for previous, call in itertools.pairwise(calls):
        odds = np.exp(previous["outputs"] @ table.T)
        expected = odds / odds.sum(axis=-1, keepdims=True) @ table * WIDTH**0.5
        np.testing.assert_allclose(call["x"], expected, rtol=1e-4, atol=1e-6)


def test_call_gives_the_logits_of_all_stages():
    model = teaforn(n=3, shared=False)
    logits = model(INPUTS)
    hidden = model.hidden_states(keras.tree.map_structure(ops.convert_to_tensor, INPUTS))
    assert len(logits) == 3
    for stage in range(3):
        assert tuple(logits[stage].shape) == (*TARGETS.shape, VOCABULARY_SIZE)
        np.testing.assert_allclose(logits[stage], model.seq2seq.logits(hidden[stage]), atol=1e-6)
    np.testing.assert_allclose(logits[0], model.seq2seq(INPUTS), atol=1e-6)
    predicted = model.predict(INPUTS, verbose=0)
    for stage in range(3):
        np.testing.assert_allclose(predicted[stage], logits[stage], atol=1e-5)
    symbolic = {name: keras.KerasTensor((None, 7), "int32") for name in INPUTS}
    assert [(spec.shape, spec.dtype) for spec in model.compute_output_spec(symbolic)] == [
        ((None, 7, VOCABULARY_SIZE), "float32")
    ] * 3
    symbols = {name: keras.Input((None,), dtype="int32", name=name) for name in INPUTS}
    functional = keras.Model(symbols, model(symbols)[1])
    np.testing.assert_allclose(functional.predict(INPUTS, verbose=0), logits[1], atol=1e-5)


def test_what_would_have_no_effect_is_refused():
    model = teaforn(n=2)
    with pytest.raises(UserError, match="discount is fixed when the model is made"):
        model.discount = 0.9
    for settings in ({"loss": "mse"}, {"metrics": ["accuracy"]}):
        model = teaforn(n=2)
        model.compile(optimizer="sgd", **settings)
        with pytest.raises(UserError, match="compile: loss and metrics are TeaForN's own"):
            model.fit(INPUTS, TARGETS, verbose=0)
    model.compile(optimizer="sgd")
    history = model.fit(INPUTS, TARGETS, verbose=0).history
    assert history.keys() == {"loss", "loss_0", "loss_1", "accuracy", "tokens"}
    seq2seq = teaforn(n=1).seq2seq
    seq2seq.embedding.embeddings.regularizer = keras.regularizers.L2(0.1)
    with pytest.raises(UserError, match="embeddings has a regularizer, which .* not count"):
        TeaForN(seq2seq)
    with pytest.raises(UserError, match="float16: small gradients would be lost"):
        teaforn({"dtype": "mixed_float16"})


def test_metrics_of_a_subclass_are_metrics():
    class Counting(TeaForN):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.batches = keras.metrics.Sum(name="batches")

        def update_metrics(self, sums):
            self.batches.update_state(1.0)
            return super().update_metrics(sums)

    model = Counting(teaforn().seq2seq, n=2)
    model.compile(optimizer="sgd")
    history = model.fit(INPUTS, TARGETS, batch_size=1, epochs=2, verbose=0).history
    assert history["batches"] == [len(TARGETS)] * 2
    assert {"loss", "loss_0", "loss_1", "accuracy", "tokens"} < history.keys()


def test_a_saved_model_is_loaded_in_a_process_of_its_own(tmp_path):
    model = teaforn(n=2)
    model.save(tmp_path / "model.keras")
    code = "import keras, sys; from tf_teaforn import TeaForN; keras.saving.load_model(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.keras"], check=True)


def test_targets_past_the_end_weigh_nothing():
    model = teaforn(n=7, label_smoothing=0.0)  # more stages than positions
    # All tokens equally probable: every target that counts costs log V.
    model.seq2seq.embedding.embeddings.assign(np.zeros((VOCABULARY_SIZE, WIDTH)))
    expected = [np.sum(np.maximum(LENGTHS - stage, 0)) for stage in range(7)]
    np.testing.assert_allclose(batch_sums(model), np.log(VOCABULARY_SIZE) * np.array(expected))
    assert expected[0] == WEIGHTS.sum() and expected[-2:] == [0, 0]


def test_padding_changes_no_loss():
    model = teaforn(n=3)
    expected = batch_sums(model)
    longer = keras.tree.map_structure(lambda x: np.pad(x, ((0, 2), (0, 3))), (INPUTS, TARGETS))
    longer = (*longer, np.pad(WEIGHTS, ((0, 2), (0, 3))))
    np.testing.assert_allclose(batch_sums(model, longer), expected, rtol=1e-5)
    garbage = np.where(WEIGHTS > 0, TARGETS, 5)
    np.testing.assert_allclose(batch_sums(model, (INPUTS, garbage, WEIGHTS)), expected, rtol=1e-5)
    alone = sum(batch_sums(model, testing.padded_batch([pair])) for pair in PAIRS)
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("n", "shared", "stage_input"),
    [
        (1, True, "hidden"),
        *itertools.product((2,), (True, False), ("top_1", "top_5_scattered", "top_v")),
        *itertools.product((4,), (True, False), ("hidden", "top_4")),
    ],
)
def test_packed_sentences_are_separate_sentences(n, shared, stage_input):
    model = teaforn(n=n, shared=shared, **STAGE_INPUTS[stage_input])
    packed = testing.packed_batch([PAIRS[:3], PAIRS[3:4], PAIRS[4:]])
    losses, gradients = loss_and_gradients(model, *packed)
    expected_losses, expected = loss_and_gradients(model, *testing.padded_batch(PAIRS))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-3, atol=2e-4, err_msg=path)


PACKED = testing.packed_batch([PAIRS[:3], PAIRS[3:4], PAIRS[4:]])


@pytest.mark.parametrize("missing", sorted(PACKED[0].keys() - INPUTS.keys()))
def test_half_a_packed_batch_is_refused(missing):
    inputs, *rest = PACKED
    inputs = {name: ids for name, ids in inputs.items() if name != missing}
    model = teaforn(n=2)
    with pytest.raises(UserError, match=f"^A packed batch without {missing}: give all of "):
        batch_sums(model, (inputs, *rest))
    with pytest.raises(UserError, match=f"A packed batch without {missing}: give all of "):
        model.seq2seq(inputs)


@pytest.mark.parametrize("n", [1, 4])
def test_packed_sentences_with_the_same_words_dropped(n, monkeypatch):
    model = teaforn(n=n, word_drop=0.4)
    draws = np.random.default_rng(0).uniform(size=(len(PAIRS), 12)).astype("float32")
    of_pair = [row[: len(target)] for row, (_, target) in zip(draws, PAIRS, strict=True)]

    def summed(batch, rows):
        def uniform(shape, seed):
            drawn = np.ones(shape, "float32")
            for i, row in enumerate(rows):
                drawn[i, : len(row), 0] = row
            return ops.convert_to_tensor(drawn)

        monkeypatch.setattr(keras.random, "uniform", uniform)
        return loss_and_gradients(model, *batch)[0]

    alone = summed(testing.padded_batch(PAIRS), of_pair)
    rows = [slice(3), slice(3, 4), slice(4, None)]
    packed = testing.packed_batch([PAIRS[row] for row in rows])
    together = summed(packed, [np.concatenate(of_pair[row]) for row in rows])
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    nothing_dropped = summed(packed, [])
    assert abs(np.sum(nothing_dropped) / np.sum(alone) - 1) > 1e-3


# --- Clones, word drop, dropout ----------------------------------------------------------------


def test_only_decoders_have_clones():
    model = TeaForN(testing.tiny_model(), n=3, shared=False)
    served = len(model.seq2seq.weights)
    per_decoder = len(model.seq2seq.decoder.weights)
    assert len(model.weights) == served + 2 * per_decoder
    assert len(TeaForN(testing.tiny_model(), n=3).weights) == served
    assert len({id(decoder) for decoder in model.decoders}) == 3
    names = [weight.path.split("/")[0] for weight in model.weights]
    assert set(names) == {"seq2seq", "decoder_1", "decoder_2"}


def test_clones_start_equal_and_diverge():
    model = TeaForN(testing.tiny_model(), n=3, shared=False, discount=1.0)
    first, *clones = [decoder.get_weights() for decoder in model.decoders]
    for clone in clones:
        assert all(np.array_equal(a, b) for a, b in zip(clone, first, strict=True))
    fit(model, keras.optimizers.SGD(0.1), run_eagerly=True)
    after = [decoder.get_weights() for decoder in model.decoders]
    for a, b in itertools.combinations(after, 2):
        assert all(np.max(np.abs(x - y)) > 1e-6 for x, y in zip(a, b, strict=True))


def test_clones_start_independent():
    model = TeaForN(testing.tiny_model(), n=3, shared=False, clone_init="independent")
    kernels = [[w for w in decoder.get_weights() if w.ndim > 1] for decoder in model.decoders]
    for a, b in itertools.combinations(kernels, 2):
        assert all(np.mean(np.abs(x - y)) > 0.05 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("parts", "shared"), [(["decoder"], False), (["encoder", "embedding"], True)]
)
def test_frozen_parts_stay(parts, shared):
    model = teaforn(n=2, shared=shared)
    model.freeze(parts)
    before = values_of(model)
    # The step itself makes the optimizer's variables: they are those of what is trained.
    fit(model, "adam", run_eagerly=True)
    after = values_of(model)
    frozen = [path.removeprefix("seq2seq/").startswith(tuple(parts)) for path in before]
    stayed = [np.array_equal(after[path], value) for path, value in before.items()]
    assert stayed == frozen
    trained = sum(v.size for v, stays in zip(before.values(), frozen, strict=True) if not stays)
    # Two moments of each, the rate and the step.
    assert sum(np.size(variable) for variable in model.optimizer.variables) == 2 * trained + 2


@pytest.mark.parametrize("shared", [True, False])
def test_frozen_parts_stay_frozen_in_a_saved_model(shared, tmp_path):
    model = teaforn(n=2, shared=shared)
    model.freeze(["encoder", "decoder"])
    fit(model, "adam", run_eagerly=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    trained = [weight.path for weight in model.trainable_weights]
    assert [weight.path for weight in loaded.trainable_weights] == trained
    assert len(trained) < len(model.weights) and len(trained) > 0
    for each in (model, loaded):
        each.fit(INPUTS, TARGETS, sample_weight=WEIGHTS, batch_size=4, shuffle=False, verbose=0)
    assert_same_weights(loaded, model, atol=1e-6)


def test_word_drop_zeroes_whole_embeddings_at_its_rate():
    ids = np.random.default_rng(0).integers(2, VOCABULARY_SIZE, size=(64, 50))
    inputs = {"encoder_token_ids": ids[:, :3], "decoder_token_ids": ids}
    model, calls, _ = spied(training=True, inputs=inputs, n=2, word_drop=0.3)
    table = ops.convert_to_numpy(model.seq2seq.embedding.embeddings)
    dropped = np.all(calls[0]["x"] == 0.0, axis=-1)
    expected = np.where(dropped[..., None], 0.0, table[ids] * WIDTH**0.5)
    np.testing.assert_allclose(calls[0]["x"], expected, rtol=1e-6)
    # 3200 draws: five standard deviations are 0.04.
    assert np.mean(dropped) == pytest.approx(0.3, abs=0.04)
    assert np.std(np.mean(dropped, axis=1)) < 0.15 and np.std(np.mean(dropped, axis=0)) < 0.15
    # Ground truth alone: the later stages read all outputs, the encoder all words.
    np.testing.assert_array_equal(calls[1]["x"], calls[0]["outputs"])
    model.hidden_states(keras.tree.map_structure(ops.convert_to_tensor, inputs), training=True)
    again = [note for note in model.seq2seq.decoder.seen if "x" in note][2]
    assert np.any(np.all(again["x"] == 0.0, axis=-1) != dropped)


def test_word_drop_keeps_the_position_signal():
    model, calls, _ = spied(training=True, n=1, word_drop=0.999999)
    assert not np.any(calls[0]["x"])
    signals = calls[0]["outputs"]
    # Equal inputs would give equal outputs at all positions, up to what attention sees.
    assert np.min(np.ptp(signals, axis=1)) > 1e-3
    nothing = np.zeros_like(calls[0]["x"])
    memory, mask = model.seq2seq.encode(keras.tree.map_structure(ops.convert_to_tensor, INPUTS))
    prepared = model.seq2seq.decoder.prepare(memory, mask)
    np.testing.assert_allclose(model.seq2seq.decoder(nothing, prepared), signals, atol=1e-6)


def test_word_drop_is_for_training():
    model = teaforn(n=2, word_drop=0.5)
    np.testing.assert_array_equal(batch_sums(model), batch_sums(teaforn(n=2)))
    model.compile(optimizer="sgd")
    arguments = {"sample_weight": WEIGHTS, "batch_size": 4, "verbose": 0}
    evaluated = model.evaluate(INPUTS, TARGETS, return_dict=True, **arguments)
    assert evaluated["loss_0"] == pytest.approx(batch_sums(model)[0] / WEIGHTS.sum(), rel=1e-5)
    trained = batch_sums_in_training(model)
    assert abs(trained - batch_sums(model)[0]) > 0.1


def batch_sums_in_training(model):
    batch = keras.tree.map_structure(ops.convert_to_tensor, (INPUTS, TARGETS, WEIGHTS))
    return float(model.loss_sums(*batch, training=True).stages[0])


def test_discounts_that_change():
    check_discounts_that_change()


def test_every_stage_draws_its_own_dropout():
    model = teaforn({"dropout": 0.5}, n=3)
    dropout = model.seq2seq.decoder.input_dropout
    masks = []
    call = type(dropout).call

    def spy(self, x, training=False):
        outputs = call(self, x, training=training)
        if self is dropout:
            masks.append(ops.convert_to_numpy(outputs) == 0.0)
        return outputs

    with mock.patch.object(type(dropout), "call", spy):
        model.hidden_states(keras.tree.map_structure(ops.convert_to_tensor, INPUTS), training=True)
    assert len(masks) == 3
    for a, b in itertools.combinations(masks, 2):
        assert 0.3 < np.mean(a != b) < 0.7


# --- Memory for time ---------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"shared": False, **STAGE_INPUTS["top_4"]}])
def test_recomputed_gradients_are_the_same(settings):
    """With dropout, whose masks must be drawn again as they were."""
    batch = testing.packed_batch([PAIRS[:3], PAIRS[3:4], PAIRS[4:]])
    runs = {}
    for remat in ("none", "stage", "layer"):
        keras.utils.set_random_seed(0)
        dropout = {"dropout": 0.3, "attention_dropout": 0.1, "activation_dropout": 0.2}
        model = teaforn(dropout, n=2, word_drop=0.2, remat=remat, **settings)
        with mock.patch.object(
            FeedForward, "call", autospec=True, side_effect=FeedForward.call
        ) as ff:
            runs[remat] = [loss_and_gradients(model, *batch) for _ in range(2)], ff.call_count
    expected, calls = runs["none"]
    for remat in ("stage", "layer"):
        for (losses, gradients), (same_losses, same) in zip(runs[remat][0], expected, strict=True):
            np.testing.assert_allclose(losses, same_losses, rtol=1e-6)
            for path, gradient in gradients.items():
                scale = max(float(np.max(np.abs(same[path]))), 1.0)
                np.testing.assert_allclose(gradient, same[path], atol=1e-6 * scale, err_msg=path)
        if keras.backend.backend() == "tensorflow":
            assert runs[remat][1] == 2 * calls
    if keras.backend.backend() == "tensorflow":
        assert np.max(np.abs(expected[0][0] - expected[1][0])) > 0.1, "no dropout"


_HUB = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 12, "num_heads": 2, "dropout": 0.3}


@pytest.mark.parametrize("decoder", ["bart", "t5", "rnn"])
def test_other_decoders_recomputed(decoder):
    batch = testing.padded_batch(PAIRS)
    runs = {}
    for remat in ("none", "stage"):
        keras.utils.set_random_seed(0)
        if decoder == "rnn":
            settings = {name: _HUB[name] for name in ("num_layers", "hidden_dim", "dropout")}
            seq2seq = build_model("rnn_base", VOCABULARY_SIZE, **settings)
        else:
            own = {"max_positions": 16} if decoder == "bart" else {"head_dim": 4}
            build = build_bart if decoder == "bart" else build_t5
            seq2seq = build(VOCABULARY_SIZE, *[{**_HUB, **own}] * 2)
        model = testing.randomize(TeaForN(seq2seq, n=2, remat=remat))
        runs[remat] = [loss_and_gradients(model, *batch) for _ in range(2)]
    for (losses, gradients), (same_losses, same) in zip(runs["stage"], runs["none"], strict=True):
        np.testing.assert_allclose(losses, same_losses, rtol=1e-6)
        assert gradients.keys() == same.keys()
        for path, gradient in gradients.items():
            scale = max(float(np.max(np.abs(same[path]))), 1.0)
            np.testing.assert_allclose(gradient, same[path], atol=1e-6 * scale, err_msg=path)


# A row at a time, and two; four rows of at most five tokens make a batch.
def test_parts_of_a_batch_are_the_batch():
    whole = teaforn(n=2)
    history = fit(whole, keras.optimizers.SGD(0.1), epochs=3, run_eagerly=True)
    for micro_batch_tokens in (1, 19):
        parts = teaforn(n=2, micro_batch_tokens=micro_batch_tokens)
        other = fit(parts, keras.optimizers.SGD(0.1), epochs=3)
        assert_same_weights(whole, parts, atol=1e-6)
        for name, values in history.items():
            np.testing.assert_allclose(other[name], values, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"shared": False, **STAGE_INPUTS["top_4"]}])
def test_parts_of_batches_of_any_shape(settings):
    """As length buckets make them: one program for all, whose sizes it learns when it runs."""
    tf = pytest.importorskip("tensorflow")
    batches = [testing.padded_batch(pairs) for pairs in (PAIRS[:3], PAIRS[3:4], PAIRS[2:])]
    spec = keras.tree.map_structure(lambda x: tf.TensorSpec([None, None], x.dtype), batches[0])
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    runs = []
    for micro_batch_tokens in (10, None):
        model = teaforn(n=2, micro_batch_tokens=micro_batch_tokens, **settings)
        # Whole batches, whose gradients the parts are to have, have no need of a program.
        eager = micro_batch_tokens is None
        model.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=eager)
        logs = model.fit(dataset, verbose=0).history
        runs.append((values_of(model), logs))
    (weights, logs), (expected, expected_logs) = runs
    assert_same_weights(weights, expected, atol=1e-6)
    for name, values in expected_logs.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)


def test_parts_of_a_batch_have_equal_shapes(monkeypatch):
    inputs, targets, weights = testing.padded_batch(PAIRS[:7])
    rows = []

    def step(part, state):
        rows.append(part[1].shape[0])
        return ops.sum(part[2]), state + 1

    # Sixteen rows of four tokens, four at a time, or one for each device.
    for devices, expected in ((1, 4), (4, 4), (8, 2), (16, 1)):
        mesh = types.SimpleNamespace(shape=(devices, 1), axis_names=("batch", "model"))
        known = types.SimpleNamespace(device_mesh=mesh, batch_dim_name="batch")
        monkeypatch.setattr(keras.distribution, "distribution", lambda known=known: known)
        batch = testing.padded_batch(testing.random_pairs(16, 4, 4))
        assert batch[1].shape == (16, 4)
        assert accumulation.number_of_parts(batch, 16) == expected
    monkeypatch.undo()

    for micro_batch_tokens, replicas, expected in (
        (None, 1, [7]),
        (35, 1, [7]),
        (34, 1, [4, 4]),
        (34, 2, [3, 3, 3]),
        (10, 1, [2, 2, 2, 2]),
        (7, 1, [1] * 7),
        (2, 1, [1] * 7),
    ):
        batch = (inputs, targets, weights)
        parts = accumulation.number_of_parts(batch, micro_batch_tokens, replicas)
        assert parts == len(expected)
        rows.clear()
        total, count = accumulation.accumulate(step, batch, parts, ops.zeros(()), 0)
        assert float(total) == weights.sum()
        if keras.backend.backend() == "tensorflow":
            assert (rows, int(count)) == (expected, parts)


@pytest.mark.parametrize("micro_batch_tokens", [None, 10])
def test_a_batch_without_a_row_changes_nothing(micro_batch_tokens):
    """Which a replica gets of a batch with fewer rows than replicas."""
    tf = pytest.importorskip("tensorflow")
    full = tf.data.Dataset.from_tensors((INPUTS, TARGETS, WEIGHTS))
    empty = full.map(lambda *batch: keras.tree.map_structure(lambda x: x[:0], batch))
    both = empty.concatenate(full)
    settings = {"micro_batch_tokens": micro_batch_tokens, **STAGE_INPUTS["top_5_scattered"]}
    # One for both runs: batches of either kind go through one program.
    model = teaforn(n=2, **settings)
    start = model.get_weights()
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    runs = {}
    for name, dataset in (("full", both.skip(1)), ("both", both)):
        model.set_weights(start)
        logs = model.fit(dataset, verbose=0).history
        runs[name] = values_of(model), logs, model.evaluate(dataset, return_dict=True, verbose=0)
    (weights, logs, tested), (expected, *expected_logs) = runs["both"], runs["full"]
    assert_same_weights(weights, expected, atol=0 if micro_batch_tokens is None else 1e-7)
    assert logs["tokens"] == [WEIGHTS.sum()] and tested["tokens"] == WEIGHTS.sum()
    for actual, same in zip((logs, tested), expected_logs, strict=True):
        for name, value in same.items():
            np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)


# --- Inside Keras ------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.03, momentum=0.9, nesterov=True, clipnorm=5.0),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_train_every_weight_but_row_zero(optimizer):
    model = teaforn(n=2, discount=0.5)
    before = values_of(model)
    losses = fit(model, OPTIMIZERS[optimizer](), epochs=8)["loss"]
    assert losses[-1] < losses[0] - 0.1 and np.all(np.isfinite(losses))
    after = values_of(model)
    assert all(np.any(after[path] != before[path]) for path in before)
    table = after["seq2seq/embedding/embeddings"]
    np.testing.assert_array_equal(table[0], np.zeros(WIDTH))
    assert np.all(np.any(table[1:] != before["seq2seq/embedding/embeddings"][1:], axis=1))


def test_loss_scaling_changes_nothing():
    plain, scaled = teaforn(n=2), teaforn(n=2)
    fit(plain, keras.optimizers.SGD(0.1), run_eagerly=True)
    fit(scaled, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0))
    assert_same_weights(plain, scaled, atol=1e-6)


def test_several_steps_an_execution_change_nothing():
    one, several = teaforn(n=2), teaforn(n=2)
    history = fit(one, "sgd", epochs=2, run_eagerly=True)
    other = fit(several, "sgd", epochs=2, steps_per_execution=2)
    assert_same_weights(one, several, atol=1e-6)
    for name, values in history.items():
        np.testing.assert_allclose(other[name], values, rtol=1e-5)


def test_only_the_proportions_of_weights_count():
    one, small = teaforn(n=2), teaforn(n=2)
    before = values_of(one)
    history, other = (
        fit(model, weights=weights, run_eagerly=True)
        for model, weights in ((one, WEIGHTS), (small, 1e-3 * WEIGHTS))
    )
    assert_same_weights(small, one, atol=1e-6)
    assert max(np.max(np.abs(v - before[path])) for path, v in values_of(one).items()) > 1e-3
    assert 1e3 * other.pop("tokens")[0] == pytest.approx(history.pop("tokens")[0])
    for name, values in history.items():
        np.testing.assert_allclose(other[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "float64"])
def test_weights_of_any_type(dtype):
    expected, model = teaforn(n=2), teaforn(n=2)
    history = fit(expected, run_eagerly=True)
    other = fit(model, weights=WEIGHTS.astype(dtype), run_eagerly=True)
    assert_same_weights(model, expected, atol=0)
    assert other == history and history["tokens"] == [WEIGHTS.sum()]


LONGER = np.pad(TARGETS, ((0, 0), (0, 1)))


@pytest.mark.parametrize(
    ("targets", "weights", "message"),
    [
        (None, None, "There are no targets to learn: give y"),
        (TARGETS, WEIGHTS[:, 0], "sample_weight has the shape .* one weight for each target"),
        (TARGETS, WEIGHTS[:, 1:], "sample_weight has the shape .* one weight for each target"),
        (LONGER, None, "y has the shape .* decoder_token_ids .* give both as"),
    ],
    ids=["none", "weights", "short", "long"],
)
def test_shapes_that_do_not_agree_are_refused(targets, weights, message):
    model = teaforn()
    model.compile(optimizer="sgd", run_eagerly=False)
    arrays = {"y": targets, "sample_weight": weights, "verbose": 0}
    runs = [lambda: model.fit(INPUTS, **arrays), lambda: model.evaluate(INPUTS, **arrays)]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        parts = [part for part in (INPUTS, targets, weights) if part is not None]
        dataset = tf.data.Dataset.from_tensors(tuple(parts) if len(parts) > 1 else INPUTS)
        runs.append(lambda: model.fit(dataset, verbose=0))
    for run in runs:
        with pytest.raises(UserError, match=f"^{message}") as caught:
            run()
        assert "\n" not in str(caught.value)


def test_class_weights_are_refused():
    model = teaforn()
    model.compile(optimizer="sgd")
    with pytest.raises(UserError, match=r"^class_weight: .*sample_weight, \[B, T\]\.$"):
        model.fit(INPUTS, TARGETS, class_weight={1: 2.0}, verbose=0)


class UnevenBatches(keras.utils.PyDataset):
    """Batches of other lengths and other token counts, one without a token."""

    def __init__(self):
        super().__init__()
        parts = [slice(0, 3), slice(3, 4), slice(4, 8)]
        self.batches = [testing.padded_batch(PAIRS[part]) for part in parts]
        inputs, targets, weights = self.batches[1]
        self.batches.append((inputs, targets, np.zeros_like(weights)))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@pytest.mark.parametrize("shared", [True, False])
def test_logs_are_means_over_tokens(shared):
    discount, label_smoothing = 0.3, 0.2
    settings = {"n": 3, "discount": discount, "label_smoothing": label_smoothing}
    model = teaforn(shared=shared, **settings)
    reference = NumpyTransformer(values_of(model), testing.TINY_TRANSFORMER)
    batches = UnevenBatches().batches
    losses = sum(
        np.array(reference.losses(*batch, n=3, shared=shared, label_smoothing=label_smoothing))
        for batch in batches
    )
    correct = sum(
        np.sum((np.argmax(ops.convert_to_numpy(model.seq2seq(x)), axis=-1) == y) * w)
        for x, y, w in batches
    )
    tokens = sum(weights.sum() for _, _, weights in batches)
    means = losses / tokens
    expected = {f"loss_{stage}": mean for stage, mean in enumerate(means)}
    expected["loss"] = means @ discount ** np.arange(3)
    expected["accuracy"] = correct / tokens
    expected["tokens"] = tokens
    # A learning rate of 0 keeps the weights: training logs are those of evaluation.
    model.compile(optimizer=keras.optimizers.SGD(0.0))
    history = model.fit(UnevenBatches(), shuffle=False, epochs=2, verbose=0).history
    evaluated = model.evaluate(UnevenBatches(), return_dict=True, verbose=0)
    for logs in (evaluated, *({name: h[i] for name, h in history.items()} for i in (0, 1))):
        assert logs.keys() == expected.keys()
        for name, value in expected.items():
            assert logs[name] == pytest.approx(value, rel=1e-5), name


def test_a_step_is_traced_once(monkeypatch):
    """Also the first, for which optimizers make their variables."""
    traces, real = [], TeaForN.loss_sums

    def loss_sums(model, *args, **kwargs):
        traces.append(kwargs["training"])
        return real(model, *args, **kwargs)

    monkeypatch.setattr(TeaForN, "loss_sums", loss_sums)
    fit(teaforn(n=2), keras.optimizers.Adam(0.01), epochs=2)
    assert traces == [True]


def test_callbacks(tmp_path):
    model = teaforn(n=2)
    model.compile(optimizer=keras.optimizers.Adam(0.05))
    rates = [0.05, 0.03, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0]
    history = model.fit(
        INPUTS,
        TARGETS,
        sample_weight=WEIGHTS,
        batch_size=4,
        shuffle=False,
        epochs=len(rates),
        verbose=0,
        validation_data=(INPUTS, TARGETS, WEIGHTS),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]),
            keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "{epoch}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.TensorBoard(tmp_path / "tensorboard"),
        ],
    ).history
    np.testing.assert_allclose(history["learning_rate"], rates[: len(history["loss"])])
    # With a rate of 0 nothing improves: two epochs of patience after the third.
    assert len(history["loss"]) == 5
    validation = history["val_loss"]
    assert validation[2] < validation[0]
    assert list((tmp_path / "tensorboard" / "train").glob("events*"))
    assert list((tmp_path / "tensorboard" / "validation").glob("events*"))

    loaded = keras.saving.load_model(tmp_path / "best.keras")
    loaded.run_eagerly = True
    arguments = {"sample_weight": WEIGHTS, "return_dict": True, "verbose": 0}
    evaluated = loaded.evaluate(INPUTS, TARGETS, **arguments)
    assert evaluated["loss"] == pytest.approx(min(validation), rel=1e-5)
    other = TeaForN(testing.tiny_model(seed=3), n=2)
    other.load_weights(tmp_path / "1.weights.h5")
    other.compile(run_eagerly=True)
    evaluated = other.evaluate(INPUTS, TARGETS, **arguments)
    assert evaluated["loss"] == pytest.approx(validation[0], rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 1, "remat": "stage", "micro_batch_tokens": 12},
        {"n": 3, "shared": False, "discount": 0.7, "clone_init": "independent"},
        {"n": 2, "shared": True, "label_smoothing": 0.0, "word_drop": 0.2, **STAGE_INPUTS["top_4"]},
    ],
    ids=["one", "unshared", "top_k"],
)
def test_round_trips(settings, tmp_path):
    model = teaforn({"norm": "post"}, name="trainer", **settings)
    config = json.loads(json.dumps(model.get_config()))
    assert {name: config[name] for name in settings} == settings
    copy = TeaForN.from_config(config)
    assert copy.get_config() == model.get_config()
    assert [w.path for w in copy.weights] == [w.path for w in model.weights]
    copy.set_weights(model.get_weights())
    for a, b in zip(copy(INPUTS), model(INPUTS), strict=True):
        np.testing.assert_array_equal(a, b)

    fit(model, "adam", run_eagerly=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_config() == model.get_config()
    assert_same_weights(loaded, model, atol=0)
    for a, b in zip(loaded(INPUTS), model(INPUTS), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_saved_model_trains_on_where_it_stopped(tmp_path):
    model = teaforn(n=2, shared=False)
    fit(model, "adam", run_eagerly=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    arguments = {"sample_weight": WEIGHTS, "batch_size": 4, "shuffle": False, "verbose": 0}
    for each in (model, loaded):
        each.fit(INPUTS, TARGETS, **arguments)
    # The same only if Adam's moments were kept.
    assert_same_weights(loaded, model, atol=1e-6)


def test_bfloat16_trains_near_float32():
    full, half = teaforn(n=2), teaforn({"dtype": "mixed_bfloat16"}, n=2)
    # That the weights are rounded is no error of the arithmetic.
    full.set_weights([ops.cast(weight, "bfloat16") for weight in half.weights])
    losses, gradients = loss_and_gradients(full, INPUTS, TARGETS, WEIGHTS)
    half_losses, half_gradients = loss_and_gradients(half, INPUTS, TARGETS, WEIGHTS)
    assert half_losses.dtype == np.float32
    np.testing.assert_allclose(half_losses, losses, rtol=0.02)
    flat, half_flat = (
        np.concatenate([g.astype("float32").ravel() for g in gradients.values()])
        for gradients in (gradients, half_gradients)
    )
    assert np.linalg.norm(half_flat - flat) < 0.05 * np.linalg.norm(flat)
    histories = [fit(model, keras.optimizers.Adam(0.01), epochs=5) for model in (full, half)]
    np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=0.02)
    assert histories[1]["loss"][-1] < histories[1]["loss"][0] - 0.1
    assert {keras.backend.standardize_dtype(w.dtype) for w in half.weights} == {"float32"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "--n=0"),
        ({"n": 1.5}, "--n=1.5"),
        ({"discount": 1.1}, "--discount=1.1"),
        ({"discount": -0.1}, "--discount=-0.1"),
        ({"stage_input": "logits"}, "--stage_input=logits: write one of hidden, top_k"),
        ({"stage_input": "top_k"}, "--top_k=None"),
        ({"stage_input": "top_k", "top_k": 0}, "--top_k=0"),
        ({"stage_input": "top_k", "top_k": VOCABULARY_SIZE + 1}, "from 1 to the vocabulary"),
        ({"top_k": 4}, "has no effect: add --stage_input=top_k"),
        ({"word_drop": 1.0}, "--word_drop=1.0"),
        ({"label_smoothing": 1.0}, "--label_smoothing=1.0"),
        ({"clone_init": "zero"}, "--clone_init=zero: write one of copy, independent"),
        ({"remat": "all"}, "--remat=all: write one of none, stage, layer"),
        ({"micro_batch_tokens": 0}, "--micro_batch_tokens=0: write 1 or more"),
        ({"n": True}, "--n=True: write a whole number"),
        ({"n": 2.0}, "--n=2.0: write a whole number"),
        ({"discount": "0.5"}, "--discount=0.5: write a number"),
        ({"discount": None}, "--discount=None: write a number"),
        ({"word_drop": False}, "--word_drop=False: write a number"),
        ({"shared": "no"}, "--shared=no: write True or False"),
        ({"stage_input": "top_k", "top_k": 2.5}, "--top_k=2.5: write a whole number"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        TeaForN(testing.tiny_model(), **settings)


def test_numbers_of_numpy_are_numbers():
    model = TeaForN(testing.tiny_model(), n=np.int64(3), discount=np.float32(0.5))
    assert json.dumps(model.n) == "3" and len(model.decoders) == 3
    model = TeaForN(testing.tiny_model(), micro_batch_tokens=np.int64(64))
    assert json.dumps(model.micro_batch_tokens) == "64"


@pytest.mark.parametrize("bad", [-1, VOCABULARY_SIZE])
@pytest.mark.parametrize("name", ["encoder_token_ids", "decoder_token_ids", "targets"])
def test_ids_outside_of_the_vocabulary_are_refused(name, bad):
    arrays = {**INPUTS, "targets": TARGETS}
    arrays[name] = arrays[name].copy()
    arrays[name][1, 2] = bad
    targets = arrays.pop("targets")
    model = teaforn(n=1)
    model.compile(optimizer="sgd")
    before = values_of(model)
    message = f"{name} has the id {bad}: the vocabulary has those from 0 to {VOCABULARY_SIZE - 1}"
    for run in (
        lambda: model.fit(arrays, targets, sample_weight=WEIGHTS, verbose=0),
        lambda: model.evaluate(arrays, targets, verbose=0),
        lambda: batch_sums(model, (arrays, targets, WEIGHTS)),
    ):
        with pytest.raises(UserError, match=message):
            run()
    if name != "targets":
        for called in (model, model.seq2seq):
            with pytest.raises(UserError, match=message):
                called(arrays)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Datasets are looked at on the way to the step, whatever that is.
        model.compile(optimizer="sgd", run_eagerly=bad < 0)
        dataset = tf.data.Dataset.from_tensors((arrays, targets, WEIGHTS))
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{name}: an id is outside of"):
            model.fit(dataset, verbose=0)
    for path, value in values_of(model).items():
        np.testing.assert_array_equal(value, before[path])
    if keras.backend.backend() == "tensorflow":
        good = tf.data.Dataset.from_tensors((INPUTS, TARGETS, WEIGHTS))
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{name}: an id is outside of"):
            model.fit(good, validation_data=dataset, verbose=0)
