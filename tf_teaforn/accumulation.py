"""Sums over the parts of a batch: an update on more sentences than fit in memory at once."""

import keras

from tf_teaforn import objective
from tf_teaforn.errors import UserError


def batch_of(data):
    """(inputs, targets, weights) of what Keras hands to a step; by default padding weighs 0.

    Args:
        data: inputs, see `TeaForN.hidden_states`; targets [B, T]; weights [B, T] of any type, or
            None.

    Returns:
        The same, with weights as float32 [B, T].

    Raises:
        UserError: there are no targets, or shapes, where they are known, do not agree.
    """
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(data)
    if targets is None:
        raise UserError("There are no targets to learn: give y, token ids [B, T].")
    if weights is None:
        weights = targets != 0
    decoder_shape = inputs["decoder_token_ids"].shape
    if not _agree(targets.shape, decoder_shape):
        raise UserError(
            f"y has the shape {tuple(targets.shape)}, decoder_token_ids {tuple(decoder_shape)}: "
            "give both as [B, T], y shifted right by one as decoder_token_ids."
        )
    if not _agree(weights.shape, targets.shape):
        raise UserError(
            f"sample_weight has the shape {tuple(weights.shape)}, y {tuple(targets.shape)}: give "
            "one weight for each target, [B, T]."
        )
    return inputs, targets, keras.ops.cast(weights, "float32")


def _agree(shape, other):
    return len(shape) == len(other) and all(
        a == b or None in (a, b) for a, b in zip(shape, other, strict=True)
    )


def accumulate(step, batch, num_parts, zeros, state=()):
    """Sums what `step` returns over the parts of a batch; one compiled body for all of them.

    Args:
        step: takes a part and the state, returns (nested structure of sums, new state).
        batch: nested structure of tensors with leading dimension B. Parts have ceil(B / K) rows,
            every K-th of the batch; rows of zeros fill up the last ones.
        num_parts: K, 1 to B, or 1 where B is 0.
        zeros: the sums of no part.
        state: what `step` hands on from part to part.

    Returns:
        (sums, state).
    """
    if isinstance(num_parts, int) and num_parts == 1:
        return step(batch, state)
    parts = keras.tree.map_structure(lambda x: objective.chunked(x, num_parts), batch)

    def body(k, carry):
        totals, state = carry
        sums, state = step(keras.tree.map_structure(lambda x: x[k], parts), state)
        return keras.tree.map_structure(lambda a, b: a + b, totals, sums), state

    return objective.one_by_one(num_parts, body, (zeros, state))


def number_of_parts(batch, micro_batch_tokens, num_replicas=1):
    """K, so that a part of all devices together has at most so many tokens, or a row each.

    Args:
        batch: (inputs, targets, weights) of one replica.
        micro_batch_tokens: padded tokens of the longer side, or None for no limit.
    """
    if micro_batch_tokens is None:
        return 1
    inputs, targets, _ = batch
    rows, source_length = keras.ops.shape(inputs["encoder_token_ids"])
    length = objective.larger(source_length, keras.ops.shape(targets)[1])
    devices = objective.devices_of_a_batch()
    rows_of_each = -(-rows // devices)
    rows_at_a_time = objective.larger(micro_batch_tokens // (length * num_replicas * devices), 1)
    return objective.larger(-(-rows_of_each // rows_at_a_time), 1)
