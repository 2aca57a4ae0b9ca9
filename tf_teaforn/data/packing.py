"""Several short examples in one row, so that next to nothing of a batch is padding.

Which examples share a row is drawn from the seed alone; which rows share a batch, and in which
order batches come, from (seed, epoch). All epochs thus have as many batches, and the batch of any
step can be named at once.
"""

import math

import numpy as np

from tf_teaforn.data import batching
from tf_teaforn.data.batching import LENGTH_MULTIPLE, Batch, Plan, Shape

# Rows are made longer until no more of either side is padding.
_PADDING = 0.04
# A row may be as long as this, or as two of the longest examples, for the cost of attention.
_LONGEST_ROW = 256
_MAX_SHAPES = 32
# Examples that the padding is estimated from.
_SAMPLE = 4096
# Examples that are packed together: many enough to fill rows well, few enough to stay mixed.
_WINDOW = 1024
# Windows that are packed at a time; bounds the memory.
_WINDOWS = 4096


def pack_shape(source_lengths: np.ndarray, target_lengths: np.ndarray, seed: int) -> Shape:
    """(S, T) of a packed row: multiples of 8 that hold the longest example.

    Sources and targets of a language pair are not equally long: rows of equal sides would be full
    of targets and have room left for sources, or the other way round. So the sides are in the
    proportion of all sources to all targets. Of such rows it is the shortest that leaves 4% of
    padding or less on both sides, when a sample is packed; where none of up to 256 ids, or up to
    twice the longest example, does, it is the one that leaves least.
    """
    sources, targets = (
        _side_lengths(int(lengths.max())) for lengths in (source_lengths, target_lengths)
    )
    proportion = int(source_lengths.sum(dtype=np.int64)) / int(target_lengths.sum(dtype=np.int64))
    sample = batching.random_generator(seed).permutation(len(source_lengths))[:_SAMPLE]
    sample_lengths = (source_lengths[sample], target_lengths[sample])
    best, least_padding = None, math.inf
    for target in targets[:: math.ceil(len(targets) / _MAX_SHAPES)]:
        source = sources[np.argmin(np.abs(sources - target * proportion))]
        shape = int(source), int(target)
        rows = len(pack_rows(*sample_lengths, shape, seed)[1]) - 1
        padding = max(
            1 - int(lengths.sum()) / (rows * side)
            for lengths, side in zip(sample_lengths, shape, strict=True)
        )
        if padding < least_padding:
            best, least_padding = shape, padding
        if padding <= _PADDING:
            break
    return best


def _side_lengths(longest: int) -> np.ndarray:
    """Lengths that a row's side may have, ascending."""
    least = math.ceil(longest / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return np.arange(least, max(2 * least, _LONGEST_ROW) + 1, LENGTH_MULTIPLE)


def pack_rows(
    source_lengths: np.ndarray, target_lengths: np.ndarray, shape: Shape, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts every example into one row.

    Shuffled windows of 1,024 examples are packed apart from each other. A window begins with as
    many rows as its ids need at least. Its examples come longest first, each to the row, of those
    with room on both sides, whose rest is then nearest to the proportion of the sides, or to a new
    row. All windows advance together, one example each, which makes it a loop over 1,024 and not
    over all examples.

    Args:
      source_lengths: int [N], EOS included.
      target_lengths: int [N], EOS included.
      shape: (S, T) of a row.
      seed: at least 0.

    Returns:
      (examples int64 [N], offsets int64 [R + 1]): row r holds `examples[offsets[r]:offsets[r+1]]`.

    Raises:
      ValueError: an example is longer than a row.
    """
    count = len(source_lengths)
    for lengths, size in zip((source_lengths, target_lengths), shape, strict=True):
        if (longest := int(lengths.max())) > size:
            raise ValueError(f"an example of length {longest} does not fit rows of {shape}")
    windows = math.ceil(count / _WINDOW)
    # -1 fills up the windows that are one short.
    members = np.full(windows * math.ceil(count / windows), -1, np.int64)
    members[:count] = batching.random_generator(seed).permutation(count)
    members = members.reshape(-1, windows).T
    packed, rows, first_row = [], [], 0
    for start in range(0, windows, _WINDOWS):
        window = members[start : start + _WINDOWS]
        sides = [
            np.where(window < 0, 0, lengths[window]).astype(np.int64)
            for lengths in (source_lengths, target_lengths)
        ]
        order = np.argsort(
            -np.maximum(*(side / size for side, size in zip(sides, shape, strict=True))),
            axis=1,
            kind="stable",
        )
        window, *sides = (np.take_along_axis(array, order, axis=1) for array in (window, *sides))
        row_of, used = _balanced_fit(*sides, shape)
        row_of += first_row + (np.cumsum(used) - used)[:, None]
        first_row += int(used.sum())
        packed.append(window[window >= 0])
        rows.append(row_of[window >= 0])
    packed, rows = np.concatenate(packed), np.concatenate(rows)
    offsets = np.zeros(first_row + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=first_row), out=offsets[1:])
    return packed[np.argsort(rows, kind="stable")], offsets


def _balanced_fit(
    sources_WxK: np.ndarray, targets_WxK: np.ndarray, shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the examples of W windows, counted from 0 in each, and how many each window used."""
    windows, count = sources_WxK.shape
    lengths = np.stack([sources_WxK, targets_WxK])
    sizes = np.reshape(shape, (2, 1)).astype(np.int64)
    used = (-(-lengths.sum(axis=2) // sizes)).max(axis=0)
    room = np.empty((2, windows, 0), np.int64)
    row_of = np.empty((windows, count), np.int64)
    every = np.arange(windows)
    for i in range(count):
        if used.max() >= room.shape[2]:
            unused = np.empty((2, windows, used.max() + 1 - room.shape[2]), np.int64)
            unused[:] = sizes[:, :, None]
            room = np.concatenate([room, unused], axis=2)
        left = room - lengths[:, :, i, None]
        fits = (left >= 0).all(axis=0) & (np.arange(room.shape[2]) < used[:, None])
        imbalance = np.abs(left[0] * shape[1] - left[1] * shape[0])
        row = np.argmin(np.where(fits, imbalance, np.iinfo(np.int64).max), axis=1)
        full = ~fits.any(axis=1)
        row_of[:, i] = row = np.where(full, used, row)
        used += full
        room[:, every, row] -= lengths[:, :, i]
    return row_of, used


def pack_plan(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    batch_tokens: int,
    seed: int,
    batch_multiple: int = 1,
) -> Plan:
    """The plan of batches of packed rows, all of one shape; each example is in exactly one.

    The last batch of an epoch may hold fewer rows than the others; the rest of it is padding.

    Args:
      source_lengths: int [N], EOS included.
      target_lengths: int [N], EOS included.
      batch_tokens: ids of a batch on its longer side, padding included.
      seed: at least 0.
      batch_multiple: every batch has a multiple of this many rows, for equal shares to replicas.
    """
    shape = pack_shape(source_lengths, target_lengths, seed)
    examples, offsets = pack_rows(source_lengths, target_lengths, shape, seed)
    sizes = np.diff(offsets)
    packed = len(sizes)
    rows = batching.batch_rows(shape, batch_tokens, batch_multiple)
    rows = min(rows, math.ceil(packed / batch_multiple) * batch_multiple)
    starts = range(0, packed, rows)

    def batch(members: np.ndarray) -> Batch:
        row_of = np.repeat(np.arange(len(members)), sizes[members])
        within = np.arange(len(row_of)) - np.repeat(
            np.cumsum(sizes[members]) - sizes[members], sizes[members]
        )
        return Batch(examples[offsets[members][row_of] + within], rows, *shape, row_of)

    def epoch(number: int) -> list[Batch]:
        order = batching.random_generator(seed, number).permutation(packed)
        return [batch(order[start : start + rows]) for start in starts]

    return Plan(epoch, len(starts), (rows, *shape))
