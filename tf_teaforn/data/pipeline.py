"""Batches as the model takes them: from a token cache to tf.data, or to NumPy for decoding."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from tf_teaforn.data import batching, packing
from tf_teaforn.data.batching import Batch
from tf_teaforn.data.cache import TokenCache, TokenRows
from tf_teaforn.data.tokenizer import EOS_ID, PAD_ID


def training_dataset(
    cache: TokenCache,
    *,
    mode: str = "bucket",
    batch_tokens: int,
    seed: int,
    start_step: int = 0,
    batch_multiple: int = 1,
    shard: tuple[int, int] = (0, 1),
    start_id: int = PAD_ID,
) -> tf.data.Dataset:
    """An endless dataset of training batches; its k-th element is that of step start_step + k.

    An element depends on (cache, mode, batch_tokens, batch_multiple, seed, step) and the shard
    alone. Every example is seen exactly once an epoch.

    Each element is (inputs, targets, weights):
      inputs["encoder_token_ids"]: int32 [B, S], every source ended in EOS. A padding row is EOS
        alone, so that no row of the attention is masked as a whole.
      inputs["decoder_token_ids"]: int32 [B, T], the targets shifted right by one, the start id in
        front.
      targets: int32 [B, T], each ended in EOS; a padding row is 0.
      weights: float32 [B, T], 1 where there is a target, else 0.
    In packed batches the shift and the start id are each example's own, and there are besides
      inputs["encoder_segment_ids"], inputs["decoder_segment_ids"]: int32 [B, S], [B, T]: which
        example of its row an id belongs to, from 1; 0 is padding.
      inputs["encoder_positions"], inputs["decoder_positions"]: int32 [B, S], [B, T]: place within
        the example, from 0.

    Args:
      cache: the training split.
      mode: "bucket": batches of examples of like length, in one of the handful of shapes (S, T) of
        `batching.bucket_shapes`, which the element_spec leaves open; "fixed": all batches are
        padded to the cache's maximum lengths; "pack": rows of several examples, of the one shape
        of `packing.pack_shape`.
      batch_tokens: ids of a batch on its longer side, padding included.
      seed: of the order; at least 0.
      start_step: step of the first element. Reaching it reads no data.
      batch_multiple: every batch has a multiple of this many rows, padded as needed.
      shard: (index, count) of this worker: it gets rows index, index + count, … of every batch and
        reads no other example. `batch_multiple` must be a multiple of count.
      start_id: the model's.
    """
    plan = training_plan(
        cache, mode=mode, batch_tokens=batch_tokens, seed=seed, batch_multiple=batch_multiple
    )
    shape = plan.shape and (plan.shape[0] // shard[1], *plan.shape[1:])
    return _dataset(
        cache,
        lambda: (batch.shard(*shard) for batch in plan.batches(start_step)),
        start_id,
        packed=mode == "pack",
        shape=shape,
    )


def training_plan(
    cache: TokenCache, *, mode: str, batch_tokens: int, seed: int, batch_multiple: int = 1
) -> batching.Plan:
    """Which examples form which batch of `training_dataset`, with the same arguments."""
    lengths = (cache.source_lengths, cache.target_lengths)
    options = dict(batch_tokens=batch_tokens, seed=seed, batch_multiple=batch_multiple)
    if mode == "pack":
        return packing.pack_plan(*lengths, **options)
    shapes = _shapes(cache)
    return batching.bucket_plan(
        *lengths, shapes=shapes[-1:] if mode == "fixed" else shapes, **options
    )


def evaluation_dataset(
    cache: TokenCache,
    *,
    batch_tokens: int,
    batch_multiple: int = 1,
    start_id: int = PAD_ID,
    one_shape: bool = False,
) -> tf.data.Dataset:
    """One pass over all examples in order of length; elements as of mode "bucket" or "fixed"."""
    shapes = _shapes(cache)
    batches = batching.sorted_batches(
        cache.source_lengths,
        cache.target_lengths,
        shapes=shapes[-1:] if one_shape else shapes,
        batch_tokens=batch_tokens,
        batch_multiple=batch_multiple,
    )
    dataset = _dataset(cache, lambda: batches, start_id)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def decode_batches(
    sources: TokenRows, *, max_length: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sources from long to short, in batches of `batch_size` rows, for decoding.

    Yields (indices int64 [b], encoder_token_ids int32 [B, S]). Row i belongs to example
    `indices[i]`; the rows from b on are padding alone, which a search skips. S is one of a handful
    of lengths, B is `batch_size` or, in the last batch, a power of two.

    Args:
      sources: rows ended in EOS, as `TokenCache.sources`.
      max_length: no row is longer.
      batch_size: rows of every batch; the memory of a search grows with rows, hypotheses and
        target length, whatever the source's length.
    """
    lengths = np.array([shape[0] for shape in batching.bucket_shapes(max_length, max_length)])
    # A batch that does not fit into memory shows at once, and not after hours.
    order = np.argsort(-sources.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        length = lengths[np.searchsorted(lengths, sources.lengths[indices].max())]
        rows = min(1 << (len(indices) - 1).bit_length(), batch_size)
        ids = np.full((rows, length), PAD_ID, np.int32)
        ids[: len(indices)] = sources.gather(indices, length)
        yield indices, ids


def score_batches(
    sources: TokenRows,
    targets: TokenRows,
    *,
    max_source_length: int,
    max_target_length: int,
    batch_size: int,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pairs from long to short, in batches of up to `batch_size` rows.

    Yields (indices int64 [b], encoder_token_ids int32 [b, S], targets int32 [b, T]). (S, T) is one
    of a handful of shapes.

    Args:
      sources, targets: rows ended in EOS.
      max_source_length, max_target_length: no row is longer.
      batch_size: rows of every batch but the last.
    """
    shapes = np.array(batching.bucket_shapes(max_source_length, max_target_length))
    source_fits, target_fits = (
        np.searchsorted(shapes[:, side], rows.lengths)
        for side, rows in enumerate((sources, targets))
    )
    fits = np.maximum(source_fits, target_fits)
    order = np.argsort(-fits, kind="stable")
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        source_length, target_length = map(int, shapes[fits[indices[0]]])
        yield (
            indices,
            sources.gather(indices, source_length),
            targets.gather(indices, target_length),
        )


def _shapes(cache: TokenCache) -> tuple[batching.Shape, ...]:
    return batching.bucket_shapes(cache.max_source_length, cache.max_target_length)


def _dataset(
    cache: TokenCache,
    batches: Callable[[], Iterable[Batch]],
    start_id: int,
    packed: bool = False,
    shape: tuple[int, int, int] | None = None,
) -> tf.data.Dataset:
    """The elements of `batches()`, computed ahead; `shape` is (B, S, T) where all have it."""
    rows, *lengths = shape or (None, None, None)
    encoder, decoder = (tf.TensorSpec([rows, length], tf.int32) for length in lengths)
    names = ("token_ids", "segment_ids", "positions") if packed else ("token_ids",)
    inputs = {f"encoder_{name}": encoder for name in names}
    inputs |= {f"decoder_{name}": decoder for name in names}
    return tf.data.Dataset.from_generator(
        lambda: (_element(cache, batch, start_id, packed) for batch in batches()),
        output_signature=(inputs, decoder, tf.TensorSpec(decoder.shape, tf.float32)),
    ).prefetch(tf.data.AUTOTUNE)


def _element(cache: TokenCache, batch: Batch, start_id: int, packed: bool):
    """(inputs, targets, weights) of `training_dataset`, in NumPy."""
    source_ids, source_segments, source_positions = _rows(cache.sources, batch, batch.source_length)
    targets, segments, positions = _rows(cache.targets, batch, batch.target_length)
    empty = source_segments[:, 0] == 0
    source_ids[empty, 0] = EOS_ID
    source_segments[empty, 0] = 1
    decoder_ids = np.empty_like(targets)
    decoder_ids[:, 1:] = targets[:, :-1]
    decoder_ids[:, 0] = start_id
    inputs = {"encoder_token_ids": source_ids, "decoder_token_ids": decoder_ids}
    if packed:
        decoder_ids[(positions == 0) & (segments > 0)] = start_id
        decoder_ids[segments == 0] = PAD_ID
        inputs |= {
            "encoder_segment_ids": source_segments,
            "encoder_positions": source_positions,
            "decoder_segment_ids": segments,
            "decoder_positions": positions,
        }
    return inputs, targets, (segments > 0).astype(np.float32)


def _rows(side: TokenRows, batch: Batch, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, segment ids and positions of a batch, int32 [batch.rows, length] each, 0 on padding."""
    lengths = side.lengths[batch.indices].astype(np.int64)
    before = np.cumsum(lengths) - lengths
    count = len(lengths)
    row_of = np.arange(count) if batch.row_of is None else batch.row_of
    first = np.searchsorted(row_of, row_of)
    within = np.arange(lengths.sum()) - np.repeat(before, lengths)
    places = np.repeat(row_of * length + before - before[first], lengths) + within
    ids, segments, positions = arrays = np.zeros((3, batch.rows, length), np.int32)
    ids.ravel()[places] = side.ids[np.repeat(side.offsets[batch.indices], lengths) + within]
    segments.ravel()[places] = np.repeat(np.arange(count) - first + 1, lengths)
    positions.ravel()[places] = within
    return arrays
