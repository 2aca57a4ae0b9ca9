"""Which examples form which batch: a pure function of lengths, seed and epoch.

Nothing here reads an example. The batch of any step can be named at once, which is what makes an
interrupted run continue exactly, without the state of an iterator.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Shape = tuple[int, int]

_MAX_SHAPES = 10
LENGTH_MULTIPLE = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """One batch, of static shape [rows, source_length] and [rows, target_length].

    Attributes:
      indices: int64 [b]: the examples.
      rows: number of rows, padding rows included.
      source_length: S, EOS included.
      target_length: T, EOS included.
      row_of: int64 [b], not descending: the row that holds each example; None: example i is alone
        in row i. A row that holds none is padding.
    """

    indices: np.ndarray
    rows: int
    source_length: int
    target_length: int
    row_of: np.ndarray | None = None

    def shard(self, index: int, count: int) -> "Batch":
        """The share of worker `index` of `count`: every count-th row from row `index` on.

        Raises:
          ValueError: the rows cannot be split evenly.
        """
        if self.rows % count:
            raise ValueError(f"{self.rows} rows do not split evenly over {count} workers")
        row_of = np.arange(len(self.indices)) if self.row_of is None else self.row_of
        mine = row_of % count == index
        return dataclasses.replace(
            self,
            indices=self.indices[mine],
            rows=self.rows // count,
            row_of=None if self.row_of is None else row_of[mine] // count,
        )


def bucket_shapes(max_source_length: int, max_target_length: int) -> tuple[Shape, ...]:
    """A handful (at most 10) of shapes (S, T), from small to the two maxima.

    The longer side grows by 8 or by a constant factor, whichever is more, with the smallest factor
    that leaves at most 10 shapes. The shorter side is in proportion. Both are multiples of 8, or
    their maximum.
    """
    longest = max(max_source_length, max_target_length)
    lengths = next(
        lengths
        for percent in itertools.count(110)
        if len(lengths := _growing_lengths(longest, percent / 100)) <= _MAX_SHAPES
    )
    return tuple(
        tuple(
            min(_multiple(math.ceil, length * maximum / longest), maximum)
            for maximum in (max_source_length, max_target_length)
        )
        for length in lengths
    )


def _growing_lengths(longest: int, factor: float) -> list[int]:
    lengths = []
    length = LENGTH_MULTIPLE
    while length < longest:
        lengths.append(length)
        length = max(length + LENGTH_MULTIPLE, _multiple(round, length * factor))
    return [*lengths, longest]


def _multiple(rounding: Callable[[float], int], length: float) -> int:
    return rounding(length / LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def assign_buckets(
    source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: Sequence[Shape]
) -> np.ndarray:
    """uint8 [N]: for each example the first of `shapes` that holds both of its sides.

    Raises:
      ValueError: an example is longer than the last shape.
    """
    buckets = []
    for lengths, sizes in zip(
        (source_lengths, target_lengths), zip(*shapes, strict=True), strict=True
    ):
        if len(lengths) and (longest := int(lengths.max())) > sizes[-1]:
            raise ValueError(f"an example of length {longest} does not fit the shapes {shapes}")
        bucket_of_length = np.searchsorted(sizes, np.arange(sizes[-1] + 1)).astype(np.uint8)
        buckets.append(bucket_of_length[lengths])
    return np.maximum(*buckets)


def random_generator(*key: int) -> np.random.Generator:
    """Random numbers that are the same in every release of NumPy for the same whole numbers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def batch_rows(shape: Shape, batch_tokens: int, batch_multiple: int = 1) -> int:
    """Rows of a batch whose longer side holds about `batch_tokens` ids, padding included."""
    rows = batch_tokens // max(shape)
    return max(rows // batch_multiple, 1) * batch_multiple


def batches_per_epoch(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    shapes: Sequence[Shape],
    batch_tokens: int,
    batch_multiple: int = 1,
) -> int:
    """Number of batches of `epoch_batches`, the same in every epoch."""
    buckets = assign_buckets(source_lengths, target_lengths, shapes)
    counts = np.bincount(buckets, minlength=len(shapes))
    rows = [batch_rows(shape, batch_tokens, batch_multiple) for shape in shapes]
    return int(np.sum(-(-counts // rows)))


def epoch_batches(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    shapes: Sequence[Shape],
    batch_tokens: int,
    seed: int,
    epoch: int,
    batch_multiple: int = 1,
) -> list[Batch]:
    """The batches of one training epoch, in order; each example is in exactly one.

    Both the members of a batch and the order of batches are random, drawn from (seed, epoch) alone.
    The last batch of a bucket may hold fewer examples than rows.

    Args:
      source_lengths: int [N], EOS included.
      target_lengths: int [N], EOS included.
      shapes: (S, T) of the buckets, as `bucket_shapes` gives them.
      batch_tokens: ids of a batch on its longer side, padding included.
      seed: at least 0.
      epoch: at least 0.
      batch_multiple: every batch has a multiple of this many rows, for equal shares to replicas.
    """
    random = random_generator(seed, epoch)
    buckets = assign_buckets(source_lengths, target_lengths, shapes)
    batches = []
    for bucket, shape in enumerate(shapes):
        members = random.permutation(np.flatnonzero(buckets == bucket))
        batches += _cut(members, shape, batch_tokens, batch_multiple)
    return [batches[i] for i in random.permutation(len(batches))]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The batches of all epochs, each epoch of as many.

    Attributes:
      epoch: epoch, from 0 -> its batches in order.
      batches_per_epoch: their number.
      shape: (rows, S, T) of every batch; None where batches differ.
    """

    epoch: Callable[[int], list[Batch]]
    batches_per_epoch: int
    shape: tuple[int, int, int] | None

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Endless, epoch after epoch, from that of `start_step` on, which counts from 0.

        Starting late costs no more than starting at 0.
        """
        first_epoch, skipped = divmod(start_step, self.batches_per_epoch)
        for epoch in itertools.count(first_epoch):
            yield from self.epoch(epoch)[skipped:]
            skipped = 0


def bucket_plan(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    shapes: Sequence[Shape],
    batch_tokens: int,
    seed: int,
    batch_multiple: int = 1,
) -> Plan:
    """The plan of `epoch_batches`; with a single shape, all batches are alike."""
    sizes = dict(shapes=shapes, batch_tokens=batch_tokens, batch_multiple=batch_multiple)
    plan = functools.partial(epoch_batches, source_lengths, target_lengths, seed=seed, **sizes)
    shape = None
    if len(shapes) == 1:
        first = plan(epoch=0)[0]
        shape = (first.rows, first.source_length, first.target_length)
    return Plan(
        lambda epoch: plan(epoch=epoch),
        batches_per_epoch(source_lengths, target_lengths, **sizes),
        shape,
    )


def sorted_batches(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    shapes: Sequence[Shape],
    batch_tokens: int,
    batch_multiple: int = 1,
) -> list[Batch]:
    """The batches of one pass in order of length; each example is in exactly one.

    Shapes and rows are those of `epoch_batches`, so that a compiled step serves both.
    """
    buckets = assign_buckets(source_lengths, target_lengths, shapes)
    order = np.lexsort((source_lengths, target_lengths, buckets))
    starts = np.searchsorted(buckets[order], np.arange(len(shapes) + 1))
    batches = []
    for (start, end), shape in zip(itertools.pairwise(starts), shapes, strict=True):
        batches += _cut(order[start:end], shape, batch_tokens, batch_multiple)
    return batches


def _cut(members: np.ndarray, shape: Shape, batch_tokens: int, batch_multiple: int) -> list[Batch]:
    rows = batch_rows(shape, batch_tokens, batch_multiple)
    # A bucket that fills no batch needs no more rows than it has examples.
    rows = min(rows, -(-len(members) // batch_multiple) * batch_multiple)
    return (
        [
            Batch(members[start : start + rows], rows, *shape)
            for start in range(0, len(members), rows)
        ]
        if rows
        else []
    )
