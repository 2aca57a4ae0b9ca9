import collections
import itertools
import math

import numpy as np
import pytest

from tf_teaforn.data.batching import (
    Batch,
    assign_buckets,
    batch_rows,
    batches_per_epoch,
    bucket_plan,
    bucket_shapes,
    epoch_batches,
    sorted_batches,
)

SHAPES = ((8, 8), (16, 24), (40, 64))


def example_lengths(count=1000, seed=0):
    random = np.random.default_rng(seed)
    sources = random.integers(1, 41, count).astype(np.int32)
    targets = np.clip(sources + random.integers(-5, 20, count), 1, 64).astype(np.int32)
    return sources, targets


def members(batches):
    return [batch.indices.tolist() for batch in batches]


def test_bucket_shapes_of_common_maxima():
    assert bucket_shapes(8, 8) == ((8, 8),)
    assert bucket_shapes(5, 3) == ((5, 3),)
    assert bucket_shapes(50, 50) == tuple((n, n) for n in (8, 16, 24, 32, 40, 48, 50))
    assert bucket_shapes(64, 64) == tuple((n, n) for n in range(8, 65, 8))
    assert bucket_shapes(256, 256) == tuple(
        (n, n) for n in (8, 16, 24, 32, 48, 64, 88, 128, 184, 256)
    )
    assert [shape[1] for shape in bucket_shapes(1024, 128)] == [
        *(8, 8, 8, 8, 16, 16, 32, 48, 80, 128)
    ]


@pytest.mark.parametrize("maxima", [*itertools.product([1, 7, 8, 9, 60, 128, 333, 4096], repeat=2)])
def test_bucket_shapes(maxima):
    shapes = bucket_shapes(*maxima)
    assert 1 <= len(shapes) <= 10
    assert shapes[-1] == maxima
    assert len(set(shapes)) == len(shapes)
    for side, maximum in enumerate(maxima):
        sizes = [shape[side] for shape in shapes]
        assert sizes == sorted(sizes)
        for shape in shapes:
            assert shape[side] % 8 == 0 or shape[side] == maximum
            # In proportion, rounded up; in whole numbers.
            excess = shape[side] * max(maxima) - max(shape) * maximum
            assert 0 <= excess < 8 * max(maxima)


def test_examples_go_to_the_smallest_bucket_that_holds_both_sides():
    sources = np.array([1, 8, 9, 8, 16, 17, 40])
    targets = np.array([8, 8, 1, 9, 24, 1, 64])
    assert assign_buckets(sources, targets, SHAPES).tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_an_example_too_long_for_all_buckets():
    with pytest.raises(ValueError, match="length 65"):
        assign_buckets(np.array([1]), np.array([65]), SHAPES)


def test_batch_rows():
    assert batch_rows((16, 24), 480) == 20
    assert batch_rows((16, 24), 479) == 19
    assert batch_rows((16, 24), 479, batch_multiple=8) == 16
    assert batch_rows((40, 64), 60) == 1
    assert batch_rows((40, 64), 60, batch_multiple=8) == 8


@pytest.mark.parametrize("batch_tokens, batch_multiple", [(500, 1), (500, 4), (10, 1), (10**6, 8)])
def test_epoch_batches(batch_tokens, batch_multiple):
    sources, targets = example_lengths()
    plan = dict(shapes=SHAPES, batch_tokens=batch_tokens, batch_multiple=batch_multiple)
    batches = epoch_batches(sources, targets, seed=7, epoch=3, **plan)

    assert sorted(itertools.chain(*members(batches))) == list(range(1000))
    short = collections.Counter()
    examples = collections.Counter()
    for batch in batches:
        examples[batch.source_length, batch.target_length] += len(batch.indices)
    for batch in batches:
        shape = (batch.source_length, batch.target_length)
        assert shape in SHAPES
        assert batch.indices.dtype == np.int64
        full = batch_rows(shape, batch_tokens, batch_multiple)
        enough = math.ceil(examples[shape] / batch_multiple) * batch_multiple
        assert batch.rows == min(full, enough)
        assert 1 <= len(batch.indices) <= batch.rows
        short[shape] += len(batch.indices) < batch.rows
        assert sources[batch.indices].max() <= batch.source_length
        assert targets[batch.indices].max() <= batch.target_length
        smaller = [smaller for smaller in SHAPES if smaller < shape]
        for i in batch.indices:
            assert not any(sources[i] <= s and targets[i] <= t for s, t in smaller)
    assert max(short.values()) <= 1
    assert len(batches) == batches_per_epoch(sources, targets, **plan)


def test_order_is_a_function_of_seed_and_epoch():
    sources, targets = example_lengths()
    plan = dict(shapes=SHAPES, batch_tokens=500)

    def order(seed, epoch):
        return members(epoch_batches(sources, targets, seed=seed, epoch=epoch, **plan))

    first = order(1, 0)
    np.random.seed(5)
    assert order(1, 0) == first
    others = [order(1, 1), order(2, 0), order(0, 1)]
    for other in others:
        assert other != first
        # Not the batches alone move: their members change company too.
        assert len({tuple(sorted(m)) for m in other} & {tuple(sorted(m)) for m in first}) <= 1
    assert others[0] != others[2]


def test_order_stays_the_same_between_releases():
    # A run that goes on after an update must see what it would have seen.
    sources = np.array([3, 12, 5, 8, 30, 16, 2, 9, 33, 7])
    targets = np.array([4, 10, 6, 9, 31, 20, 2, 8, 60, 8])
    batches = epoch_batches(sources, targets, shapes=SHAPES, batch_tokens=48, seed=1, epoch=2)
    assert members(batches) == [[8], [4], [5, 3], [7, 1], [0, 9, 6, 2]]


def test_buckets_are_mixed_within_the_epoch():
    sources, targets = example_lengths(5000)
    batches = epoch_batches(sources, targets, shapes=SHAPES, batch_tokens=500, seed=0, epoch=0)
    lengths = np.array([batch.source_length for batch in batches])
    for half in np.array_split(lengths, 2):
        assert set(half) == {8, 16, 40}
    assert abs(np.corrcoef(lengths, np.arange(len(lengths)))[0, 1]) < 0.2


def test_plan_starts_anywhere():
    sources, targets = example_lengths(100)
    sizes = dict(shapes=SHAPES, batch_tokens=200)
    plan = bucket_plan(sources, targets, seed=9, **sizes)
    per_epoch = plan.batches_per_epoch
    assert per_epoch == batches_per_epoch(sources, targets, **sizes)
    assert plan.shape is None
    reference = [
        batch.indices.tolist()
        for epoch in range(4)
        for batch in epoch_batches(sources, targets, seed=9, epoch=epoch, **sizes)
    ]
    assert len(reference) == 4 * per_epoch
    for start in [0, 1, per_epoch - 1, per_epoch, per_epoch + 1, 3 * per_epoch - 1]:
        found = [batch.indices.tolist() for batch in itertools.islice(plan.batches(start), 20)]
        assert found == reference[start : start + 20]


def test_one_shape_makes_all_batches_alike():
    sources, targets = example_lengths(101)
    plan = bucket_plan(
        sources, targets, shapes=SHAPES[-1:], batch_tokens=640, seed=9, batch_multiple=4
    )
    assert plan.shape == (8, 40, 64)
    batches = plan.epoch(0)
    assert {(b.rows, b.source_length, b.target_length) for b in batches} == {plan.shape}
    assert sorted(itertools.chain(*members(batches))) == list(range(101))
    assert [len(batch.indices) for batch in batches].count(8) == 12


def test_one_example():
    one = np.array([3])
    plan = bucket_plan(one, one, shapes=SHAPES, batch_tokens=64, seed=0)
    found = [batch.indices.tolist() for batch in itertools.islice(plan.batches(10**9), 3)]
    assert found == [[0]] * 3


def test_shards_are_every_other_row():
    batch = Batch(np.array([7, 8, 9, 5, 6]), 6, 16, 24)
    shards = [batch.shard(i, 3) for i in range(3)]
    assert members(shards) == [[7, 5], [8, 6], [9]]
    assert {(s.rows, s.source_length, s.target_length, s.row_of) for s in shards} == {
        (2, 16, 24, None)
    }
    packed = Batch(np.array([7, 8, 9, 5, 6]), 6, 16, 24, row_of=np.array([0, 0, 2, 3, 3]))
    halves = [packed.shard(i, 2) for i in range(2)]
    assert [(h.indices.tolist(), h.row_of.tolist(), h.rows) for h in halves] == [
        ([7, 8, 9], [0, 0, 1], 3),
        ([5, 6], [1, 1], 3),
    ]
    assert batch.shard(0, 1).indices.tolist() == batch.indices.tolist()
    with pytest.raises(ValueError, match="6 rows do not split evenly over 4 workers"):
        batch.shard(0, 4)


def test_sorted_batches():
    sources, targets = example_lengths()
    plan = dict(shapes=SHAPES, batch_tokens=500, batch_multiple=4)
    batches = sorted_batches(sources, targets, **plan)
    order = list(itertools.chain(*members(batches)))
    assert sorted(order) == list(range(1000))
    buckets = assign_buckets(sources, targets, SHAPES)
    keys = [(buckets[i], targets[i], sources[i], i) for i in order]
    assert keys == sorted(keys)
    assert len(batches) == batches_per_epoch(sources, targets, **plan)
    for batch in batches:
        assert batch.rows == batch_rows((batch.source_length, batch.target_length), 500, 4)
        assert set(buckets[batch.indices]) == {
            SHAPES.index((batch.source_length, batch.target_length))
        }
