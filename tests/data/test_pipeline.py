import collections
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tf_teaforn.data import batching, pipeline
from tf_teaforn.data.cache import TokenCache, TokenRows
from tf_teaforn.data.pipeline import (
    decode_batches,
    evaluation_dataset,
    score_batches,
    training_dataset,
    training_plan,
)

COUNT = 200
MAX_SOURCE, MAX_TARGET = 30, 20


def token_rows(rows):
    offsets = np.cumsum([0] + [len(row) for row in rows])
    return TokenRows(np.concatenate(rows).astype(np.uint16), offsets)


@pytest.fixture(scope="module")
def examples():
    """(source, target) ids ended in EOS; no two alike, as the first id of a source counts them."""
    random = np.random.default_rng(0)

    def row(first, maximum):
        return [*first, *random.integers(2, 1000, random.integers(0, maximum - 1)).tolist(), 1]

    return [(row([1000 + i], MAX_SOURCE - 1), row([], MAX_TARGET)) for i in range(COUNT)]


@pytest.fixture(scope="module")
def cache(examples):
    sides = map(token_rows, zip(*examples, strict=True))
    return TokenCache(*sides, MAX_SOURCE, MAX_TARGET, too_long=0)


def unbatched(element):
    """The examples of a batch as lists of ids, after checking all that is padding."""
    inputs, targets, weights = element
    sources = inputs["encoder_token_ids"].numpy()
    decoder_inputs = inputs["decoder_token_ids"].numpy()
    targets, weights = targets.numpy(), weights.numpy()
    assert sources.dtype == decoder_inputs.dtype == targets.dtype == np.int32
    assert weights.dtype == np.float32
    assert decoder_inputs.shape == targets.shape == weights.shape
    assert len(sources) == len(targets)
    found = []
    for source, decoder_input, target, weight in zip(
        sources, decoder_inputs, targets, weights, strict=True
    ):
        source_end = source.tolist().index(1) + 1
        assert not source[source_end:].any()
        assert decoder_input.tolist() == [0, *target[:-1].tolist()]
        if not target.any():
            assert source_end == 1
            assert not weight.any()
            continue
        target_end = target.tolist().index(1) + 1
        assert weight.tolist() == [1.0] * target_end + [0.0] * (len(target) - target_end)
        found.append((source[:source_end].tolist(), target[:target_end].tolist()))
    return found


def as_lists(dataset, count):
    return [
        tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), element)
        for element in dataset.take(count)
    ]


def test_element_spec(cache):
    ids = tf.TensorSpec([None, None], tf.int32)
    spec = (
        {"encoder_token_ids": ids, "decoder_token_ids": ids},
        ids,
        tf.TensorSpec([None, None], tf.float32),
    )
    assert training_dataset(cache, batch_tokens=100, seed=0).element_spec == spec
    assert evaluation_dataset(cache, batch_tokens=100).element_spec == spec


def steps_per_epoch(cache, batch_tokens, batch_multiple=1):
    return batching.batches_per_epoch(
        cache.source_lengths,
        cache.target_lengths,
        shapes=batching.bucket_shapes(MAX_SOURCE, MAX_TARGET),
        batch_tokens=batch_tokens,
        batch_multiple=batch_multiple,
    )


@pytest.mark.parametrize("batch_multiple", [1, 4])
def test_training_sees_every_example_once_an_epoch(cache, examples, batch_multiple):
    steps = steps_per_epoch(cache, 160, batch_multiple)
    dataset = training_dataset(cache, batch_tokens=160, seed=3, batch_multiple=batch_multiple)
    iterator = iter(dataset)
    epochs = [[unbatched(next(iterator)) for _ in range(steps)] for _ in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == sorted(examples)
    assert epochs[0] != epochs[1]


def test_training_shapes_are_few_and_static(cache):
    rows = {}
    seen = collections.Counter()
    for inputs, targets, _ in training_dataset(
        cache, batch_tokens=160, seed=3, batch_multiple=4
    ).take(2 * steps_per_epoch(cache, 160, 4)):
        shape = (inputs["encoder_token_ids"].shape[1], targets.shape[1])
        assert shape in batching.bucket_shapes(MAX_SOURCE, MAX_TARGET)
        assert rows.setdefault(shape, len(targets)) == len(targets)
        assert len(targets) <= batching.batch_rows(shape, 160, 4)
        assert len(targets) % 4 == 0
        seen[shape] += 1
    assert len(seen) >= 3


def test_training_starts_at_any_step_and_again(cache):
    dataset = training_dataset(cache, batch_tokens=160, seed=3)
    steps = steps_per_epoch(cache, 160)
    reference = as_lists(dataset, 2 * steps + 5)
    assert as_lists(dataset, 10) == reference[:10]
    for start in (1, steps - 1, steps, 2 * steps - 3):
        later = training_dataset(cache, batch_tokens=160, seed=3, start_step=start)
        assert as_lists(later, 5) == reference[start : start + 5]
    other = training_dataset(cache, batch_tokens=160, seed=4)
    assert as_lists(other, 10) != reference[:10]


def test_starting_late_reads_no_data(cache, monkeypatch):
    read, rows = [], pipeline._rows

    def counted(side, batch, length):
        read.append(len(batch.indices))
        return rows(side, batch, length)

    monkeypatch.setattr(pipeline, "_rows", counted)
    dataset = training_dataset(cache, batch_tokens=160, seed=3, start_step=10**6 + 1)
    next(iter(dataset))
    # As many as prefetching takes, not those of the steps before.
    assert 0 < len(read) < 100


@pytest.mark.parametrize("batch_multiple", [1, 8])
def test_evaluation_sees_every_example_in_order_of_length(cache, examples, batch_multiple):
    dataset = evaluation_dataset(cache, batch_tokens=160, batch_multiple=batch_multiple)
    elements = list(dataset)
    assert int(dataset.cardinality()) == len(elements)
    found = [unbatched(element) for element in elements]
    assert sorted(itertools.chain(*found)) == sorted(examples)
    assert len(list(dataset)) == len(elements)
    assert all(len(element[1]) % batch_multiple == 0 for element in elements)
    shapes = [(e[0]["encoder_token_ids"].shape[1], e[1].shape[1]) for e in elements]
    assert shapes == sorted(shapes)


def test_evaluation_in_one_shape(cache, examples):
    elements = list(evaluation_dataset(cache, batch_tokens=160, one_shape=True))
    found = [unbatched(element) for element in elements]
    assert sorted(itertools.chain(*found)) == sorted(examples)
    lengths = {(e[0]["encoder_token_ids"].shape[1], e[1].shape[1]) for e in elements}
    assert lengths == {(MAX_SOURCE, MAX_TARGET)}


@pytest.mark.parametrize("batch_size", [1, 7, COUNT, 1000])
def test_decode_batches(cache, examples, batch_size):
    seen = []
    lengths = set()
    for indices, ids in decode_batches(cache.sources, max_length=MAX_SOURCE, batch_size=batch_size):
        assert ids.dtype == np.int32
        last = len(seen) + len(indices) == COUNT
        assert len(ids) == batch_size or last and len(indices) <= len(ids) < 2 * len(indices)
        lengths.add(ids.shape[1])
        assert 1 <= len(indices) <= batch_size
        for i, row in zip(indices, ids[: len(indices)], strict=True):
            source = examples[i][0]
            assert row.tolist() == source + [0] * (len(row) - len(source))
        assert not ids[len(indices) :].any()
        seen += indices.tolist()
    assert lengths <= {8, 16, 24, 30}
    assert sorted(seen) == list(range(COUNT))
    assert [len(examples[i][0]) for i in seen] == sorted(
        (len(source) for source, _ in examples), reverse=True
    )


def test_score_batches(cache, examples):
    seen, shapes = [], []
    for indices, *sides in score_batches(
        cache.sources,
        cache.targets,
        max_source_length=MAX_SOURCE,
        max_target_length=MAX_TARGET,
        batch_size=32,
    ):
        assert 1 <= len(indices) <= 32
        shapes.append(tuple(ids.shape[1] for ids in sides))
        for side, ids in enumerate(sides):
            for i, row in zip(indices, ids, strict=True):
                text = examples[i][side]
                assert row.tolist() == text + [0] * (len(row) - len(text))
        seen += indices.tolist()
    assert {*shapes} <= {*batching.bucket_shapes(MAX_SOURCE, MAX_TARGET)}
    assert shapes == sorted(shapes, reverse=True)
    assert sorted(seen) == list(range(COUNT))


def unpacked(element, start_id):
    """The examples of a packed batch, after checking every id, segment and position."""
    inputs, targets, weights = tf.nest.map_structure(lambda tensor: tensor.numpy(), element)
    assert {array.dtype for array in (*inputs.values(), targets)} == {np.dtype(np.int32)}
    found = []
    for row in range(len(targets)):
        sides = []
        for side, ids in (("encoder", inputs["encoder_token_ids"]), ("decoder", targets)):
            segments, positions = [], []
            parts = []
            rest = ids[row].tolist()
            while any(rest):
                end = rest.index(1) + 1
                parts.append(rest[:end])
                segments += [len(parts)] * end
                positions += range(end)
                rest = rest[end:]
            padding = [0] * len(rest)
            assert inputs[f"{side}_segment_ids"][row].tolist() == segments + padding
            assert inputs[f"{side}_positions"][row].tolist() == positions + padding
            sides.append(parts)
        shifted = [token for target in sides[1] for token in (start_id, *target[:-1])]
        length = targets.shape[1]
        assert inputs["decoder_token_ids"][row].tolist() == shifted + [0] * (length - len(shifted))
        assert weights[row].tolist() == [1.0] * len(shifted) + [0.0] * (length - len(shifted))
        if not sides[1]:
            assert sides[0] == [[1]]
            continue
        found += zip(*sides, strict=True)
    return found


@pytest.mark.parametrize(("batch_multiple", "start_id"), [(1, 0), (4, 7)])
def test_packed_batches_hold_every_example_once_an_epoch(cache, examples, batch_multiple, start_id):
    options = dict(mode="pack", batch_tokens=160, seed=3, batch_multiple=batch_multiple)
    plan = training_plan(cache, **options)
    dataset = training_dataset(cache, start_id=start_id, **options)
    assert tuple(dataset.element_spec[1].shape) == (plan.shape[0], plan.shape[2])
    assert tuple(dataset.element_spec[0]["encoder_positions"].shape) == plan.shape[:2]
    iterator = iter(dataset)
    for _ in range(2):
        epoch = [unpacked(next(iterator), start_id) for _ in range(plan.batches_per_epoch)]
        assert sorted(itertools.chain(*epoch)) == sorted(examples)


def test_fixed_batches_have_the_maximum_lengths(cache, examples):
    dataset = training_dataset(cache, mode="fixed", batch_tokens=600, seed=3, batch_multiple=2)
    assert tuple(dataset.element_spec[1].shape) == (20, MAX_TARGET)
    assert tuple(dataset.element_spec[0]["encoder_token_ids"].shape) == (20, MAX_SOURCE)
    found = [unbatched(element) for element in dataset.take(COUNT // 20)]
    assert sorted(itertools.chain(*found)) == sorted(examples)


@pytest.mark.parametrize("mode", ["bucket", "fixed", "pack"])
def test_shards_are_the_rows_of_the_whole_batch(cache, mode):
    options = dict(mode=mode, batch_tokens=160, seed=3, batch_multiple=4, start_step=2)
    whole = as_lists(training_dataset(cache, **options), 6)
    shards = [
        as_lists(training_dataset(cache, shard=(index, 2), **options), 6) for index in range(2)
    ]
    for batch, *parts in zip(whole, *shards, strict=True):
        for index, part in enumerate(parts):
            assert part[1] == batch[1][index::2]
            assert part[2] == batch[2][index::2]
            assert part[0].keys() == batch[0].keys()
            assert all(part[0][name] == rows[index::2] for name, rows in batch[0].items())


def test_start_id(cache):
    for dataset in (
        training_dataset(cache, batch_tokens=160, seed=3, start_id=9),
        evaluation_dataset(cache, batch_tokens=160, start_id=9),
    ):
        inputs, targets, _ = next(iter(dataset))
        assert set(inputs["decoder_token_ids"].numpy()[:, 0]) == {9}
        assert (inputs["decoder_token_ids"][:, 1:] == targets[:, :-1]).numpy().all()


def test_the_loss_of_an_epoch_does_not_depend_on_how_it_is_batched(cache):
    from tf_teaforn.models.catalog import build_model
    from tf_teaforn.teaforn import TeaForN

    seq2seq = build_model("transformer_tiny", 1300, num_layers=1, hidden_dim=16, dropout=0.0)
    model = TeaForN(seq2seq, n=3)
    losses = []
    for mode in ("bucket", "fixed", "pack"):
        options = dict(mode=mode, batch_tokens=1500, seed=3)
        steps = training_plan(cache, **options).batches_per_epoch
        sums = [
            model.loss_sums(inputs, targets, weights)
            for inputs, targets, weights in training_dataset(cache, **options).take(steps)
        ]
        losses.append(np.sum([[*s.stages, s.correct, s.tokens] for s in sums], axis=0))
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)


def test_training_in_keras_fit(cache):
    """An infinite dataset of open shapes is what `fit` takes."""
    import keras

    encoder = keras.Input([None], dtype="int32", name="encoder_token_ids")
    decoder = keras.Input([None], dtype="int32", name="decoder_token_ids")
    hidden = keras.layers.Embedding(1300, 4)(decoder)
    outputs = keras.layers.Dense(1300)(hidden)
    model = keras.Model({"encoder_token_ids": encoder, "decoder_token_ids": decoder}, outputs)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    dataset = training_dataset(cache, batch_tokens=160, seed=0)
    history = model.fit(dataset, steps_per_epoch=4, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    evaluated = model.evaluate(evaluation_dataset(cache, batch_tokens=160), verbose=0)
    assert np.isfinite(evaluated)
