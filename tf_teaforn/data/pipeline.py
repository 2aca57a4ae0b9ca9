"""Batches as the model takes them: from a token cache to tf.data, or to NumPy for decoding."""

from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from tf_teaforn.data import batching
from tf_teaforn.data.batching import Batch
from tf_teaforn.data.cache import TokenCache, TokenRows
from tf_teaforn.data.tokenizer import EOS_ID, PAD_ID


def training_dataset(
    cache: TokenCache,
    *,
    batch_tokens: int,
    seed: int,
    start_step: int = 0,
    batch_multiple: int = 1,
) -> tf.data.Dataset:
    """An endless dataset of training batches; its k-th element is that of step start_step + k.

    An element depends on (cache, batch_tokens, batch_multiple, seed, step) alone. Every example is
    seen exactly once an epoch.

    Each element is (inputs, targets, weights), with one of the handful of shapes (B, S, T) of
    `batching.bucket_shapes`; the element_spec leaves them open.
      inputs["encoder_token_ids"]: int32 [B, S], every row ended in EOS. A padding row is EOS alone,
        so that no row of the attention is masked as a whole.
      inputs["decoder_token_ids"]: int32 [B, T], the targets shifted right by one, 0 in front.
      targets: int32 [B, T], ended in EOS; a padding row is 0.
      weights: float32 [B, T], 1 where there is a target, else 0.

    Args:
      cache: the training split.
      batch_tokens: ids of a batch on its longer side, padding included.
      seed: of the order; at least 0.
      start_step: step of the first element. Reaching it reads no data.
      batch_multiple: every batch has a multiple of this many rows, padded as needed.
    """

    def batches() -> Iterator[Batch]:
        steps = batching.iterate_batches(
            cache.source_lengths,
            cache.target_lengths,
            shapes=_shapes(cache),
            batch_tokens=batch_tokens,
            seed=seed,
            start_step=start_step,
            batch_multiple=batch_multiple,
        )
        return (batch for _, batch in steps)

    return _dataset(cache, batches)


def evaluation_dataset(
    cache: TokenCache, *, batch_tokens: int, batch_multiple: int = 1
) -> tf.data.Dataset:
    """One pass over all examples in order of length; elements as in `training_dataset`."""
    batches = batching.sorted_batches(
        cache.source_lengths,
        cache.target_lengths,
        shapes=_shapes(cache),
        batch_tokens=batch_tokens,
        batch_multiple=batch_multiple,
    )
    dataset = _dataset(cache, lambda: batches)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def decode_batches(
    sources: TokenRows, *, max_length: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sources in order of length, in batches of `batch_size` rows, for decoding.

    Yields (indices int64 [b], encoder_token_ids int32 [batch_size, S]). Row i belongs to example
    `indices[i]`; the rows from b on are padding, EOS alone. S is one of a handful of lengths.

    Args:
      sources: rows ended in EOS, as `TokenCache.sources`.
      max_length: no row is longer.
      batch_size: rows of every batch; the memory of a search grows with rows, hypotheses and
        target length, whatever the source's length.
    """
    lengths = np.array([shape[0] for shape in batching.bucket_shapes(max_length, max_length)])
    order = np.argsort(sources.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        length = lengths[np.searchsorted(lengths, sources.lengths[indices].max())]
        yield indices, _source_ids(sources, indices, batch_size, length)


def _shapes(cache: TokenCache) -> tuple[batching.Shape, ...]:
    return batching.bucket_shapes(cache.max_source_length, cache.max_target_length)


def _dataset(cache: TokenCache, batches) -> tf.data.Dataset:
    """The elements of the `Iterable[Batch]` that `batches()` returns, computed ahead."""

    def arrays() -> Iterable[tuple[np.ndarray, np.ndarray]]:
        for batch in batches():
            targets = np.full((batch.rows, batch.target_length), PAD_ID, np.int32)
            targets[: len(batch.indices)] = cache.targets.gather(batch.indices, batch.target_length)
            yield (
                _source_ids(cache.sources, batch.indices, batch.rows, batch.source_length),
                targets,
            )

    def element(source_ids, target_ids):
        inputs = {
            "encoder_token_ids": source_ids,
            "decoder_token_ids": tf.pad(target_ids[:, :-1], [[0, 0], [1, 0]]),
        }
        return inputs, target_ids, tf.cast(target_ids != PAD_ID, tf.float32)

    ids = tf.TensorSpec([None, None], tf.int32)
    dataset = tf.data.Dataset.from_generator(arrays, output_signature=(ids, ids))
    return dataset.map(element).prefetch(tf.data.AUTOTUNE)


def _source_ids(sources: TokenRows, indices: np.ndarray, rows: int, length: int) -> np.ndarray:
    ids = np.full((rows, length), PAD_ID, np.int32)
    ids[: len(indices)] = sources.gather(indices, length)
    ids[len(indices) :, 0] = EOS_ID
    return ids
