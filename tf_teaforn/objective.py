"""The TeaForN objective (paper, section 3): shifted targets, cross-entropy, discounted sum.

Shapes: B batch, T target length, M = B * T positions, D width, V vocabulary, N stages.
"""

from keras import ops


def shift_left(x_BxT, offset):
    """Moves every row `offset` positions to the left and fills up with zeros.

    Position t of the result is y^(t + offset), the target of Decoder-`offset`.
    """
    length = ops.shape(x_BxT)[1]
    return ops.pad(x_BxT, ((0, 0), (0, offset)))[:, offset : offset + length]


def stage_targets(targets_BxT, weights_BxT, stage, segment_ids=None):
    """Targets and weights of Decoder-`stage`.

    A target past the end of its sequence, or in another segment of a packed row, weighs 0.

    Args:
        targets_BxT: int32, 0 on padding.
        weights_BxT: float32, 0 on padding.
        stage: s.
        segment_ids: int32 [B, T] or None.

    Returns:
        (int32 [B, T], float32 [B, T]).
    """
    if stage == 0:
        return targets_BxT, weights_BxT
    weights = shift_left(weights_BxT, stage)
    if segment_ids is not None:
        same = shift_left(segment_ids, stage) == segment_ids
        weights = weights * ops.cast(same, weights.dtype)
    return shift_left(targets_BxT, stage), weights


def cross_entropy(hidden_MxD, table_VxD, targets_M, label_smoothing=0.0):
    """Label-smoothed cross-entropy of softmax(hidden · table'), with its own gradient.

    The smoothed target is (1 - ε) on the true class plus ε / V on all V classes; nothing is
    subtracted (Szegedy et al. 2016, section 7). The loss does not build it: with m the mean row of
    the table, it is logsumexp(z) - (1 - ε) z_y - ε h · m.

    Args:
        hidden_MxD: decoder outputs, compute dtype.
        table_VxD: softmax weights, compute dtype.
        targets_M: int32.
        label_smoothing: ε in [0, 1).

    Returns:
        float32 [2, M]: the loss, and 1 where the true class has the highest logit, else 0 (this
        row has no gradient).
    """
    vocabulary_size = table_VxD.shape[0]
    confidence = 1.0 - label_smoothing

    def loss_and_gradient(hidden, table):
        logits = ops.cast(ops.einsum("md,vd->mv", hidden, table), "float32")
        highest = ops.max(logits, axis=-1, keepdims=True)
        target_logits = ops.take_along_axis(logits, targets_M[:, None], axis=-1)
        exponentials = ops.exp(logits - highest)
        normalizer = ops.sum(exponentials, axis=-1, keepdims=True)
        loss = ops.log(normalizer) + highest - confidence * target_logits
        if label_smoothing:
            mean_row = ops.mean(table, axis=0)[:, None]
            smoothing_logits = ops.cast(ops.matmul(hidden, mean_row), "float32")
            loss = loss - label_smoothing * smoothing_logits
        correct = ops.cast(target_logits >= highest, "float32")

        def gradient(*args, upstream=None):
            by_row = (args[0] if upstream is None else upstream)[0][:, None]
            # In float32 down to the difference of the two distributions: the sums of each alone
            # over a batch are much larger than that difference, and bfloat16 would lose it.
            by_logit = exponentials * (by_row / normalizer)
            by_target = by_row * (ops.exp(target_logits - highest) / normalizer - confidence)
            if label_smoothing:
                evenly = by_row * (label_smoothing / vocabulary_size)
                by_logit, by_target = by_logit - evenly, by_target - evenly
            is_target = ops.arange(vocabulary_size, dtype=targets_M.dtype) == targets_M[:, None]
            by_logit = ops.cast(ops.where(is_target, by_target, by_logit), hidden.dtype)
            return ops.matmul(by_logit, table), ops.matmul(ops.transpose(by_logit), hidden)

        return ops.stack([loss[:, 0], correct[:, 0]]), gradient

    return ops.custom_gradient(loss_and_gradient)(hidden_MxD, table_VxD)


def discounted_sum(stage_losses, discount):
    """Σ_s λ^s L_s.

    The paper prints λ^(s-1) and states λ^0 = 1 for N = 1; only λ^s satisfies both that and
    "λ = 0 is teacher forcing". 0^0 is 1.
    """
    return sum(loss * float(discount) ** stage for stage, loss in enumerate(stage_losses))
