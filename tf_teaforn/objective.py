"""The TeaForN objective (paper, section 3): shifted targets, cross-entropy, discounted sum.

Shapes: B batch, T target length, N stages, M rows (positions of all stages), D width,
V vocabulary, K chunks of R rows.
"""

import math

import keras
from keras import ops

# Logits that exist at a time on a device.
_CHUNK_LOGITS = 2**26


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


def all_stage_targets(targets_BxT, weights_BxT, n, segment_ids=None):
    """`stage_targets` of stages 0 to n - 1: int32 [B, N, T] and float32 [B, N, T]."""
    stages = [stage_targets(targets_BxT, weights_BxT, stage, segment_ids) for stage in range(n)]
    targets, weights = zip(*stages, strict=True)
    return ops.stack(targets, axis=1), ops.stack(weights, axis=1)


def cross_entropy(
    hidden_MxD,
    table_VxD,
    targets_M,
    coefficients_M,
    label_smoothing=0.0,
    training=True,
    bias_V=None,
):
    """Label-smoothed cross-entropy of softmax(hidden · table' + bias), with its own gradient.

    The smoothed target is (1 - ε) on the true class plus ε / V on all V classes; nothing is
    subtracted (Szegedy et al. 2016, section 7). The loss does not build it: with m the mean row of
    the table, it is logsumexp(z) - (1 - ε) z_y - ε h · m, less ε times the mean bias.

    Logits exist for a chunk of rows at a time. The total is linear in the coefficients, so its
    gradient is known, up to one factor, together with the loss: no logits are computed twice.

    Args:
        hidden_MxD: decoder outputs, compute dtype.
        table_VxD: softmax weights, compute dtype or float32.
        targets_M: int32.
        coefficients_M: float32, what the loss of each row counts in the total.
        label_smoothing: ε in [0, 1).
        training: whether the gradient is computed too; without it the total has none.
        bias_V: float32, a constant of the logits, or None.

    Returns:
        (total, float32, the sum of coefficient times loss; losses, float32 [M]; correct, float32
        [M], 1 where the true class has the highest logit, else 0). Only the total has a gradient,
        and only by hidden and table.
    """
    vocabulary_size, width = table_VxD.shape
    rows = ops.shape(hidden_MxD)[0]
    num_chunks = _number_of_chunks(rows, vocabulary_size)
    confidence = 1.0 - label_smoothing
    targets, coefficients = (chunked(x, num_chunks) for x in (targets_M, coefficients_M))

    def total_and_gradient(hidden_MxD, table_VxD):
        dtype = hidden_MxD.dtype
        hidden_KxRxD = chunked(hidden_MxD, num_chunks)
        table = ops.cast(table_VxD, dtype)
        mean_row = ops.cast(ops.mean(table_VxD, axis=0), dtype)[:, None]

        def chunk(k, results):
            hidden, target, coefficient = hidden_KxRxD[k], targets[k][:, None], coefficients[k]
            logits = ops.cast(ops.einsum("md,vd->mv", hidden, table), "float32")
            if bias_V is not None:
                logits = logits + bias_V
            highest = ops.max(logits, axis=-1, keepdims=True)
            target_logits = ops.take_along_axis(logits, target, axis=-1)
            exponentials = ops.exp(logits - highest)
            normalizer = ops.sum(exponentials, axis=-1, keepdims=True)
            loss = ops.log(normalizer) + highest - confidence * target_logits
            if label_smoothing:
                smoothing_logits = ops.cast(ops.matmul(hidden, mean_row), "float32")
                if bias_V is not None:
                    smoothing_logits = smoothing_logits + ops.mean(bias_V)
                loss = loss - label_smoothing * smoothing_logits
            correct = ops.cast(target_logits >= highest, "float32")
            rows = {"losses": loss[:, 0], "correct": correct[:, 0]}
            if training:
                # In float32 down to the difference of the two distributions: the sums of each
                # alone over a batch are much larger than that difference, and bfloat16 would lose
                # it.
                by_row = coefficient[:, None]
                by_logit = exponentials * (by_row / normalizer)
                by_target = by_row * (ops.exp(target_logits - highest) / normalizer - confidence)
                if label_smoothing:
                    evenly = by_row * (label_smoothing / vocabulary_size)
                    by_logit, by_target = by_logit - evenly, by_target - evenly
                is_target = ops.arange(vocabulary_size, dtype=target.dtype) == target
                by_logit = ops.cast(ops.where(is_target, by_target, by_logit), dtype)
                rows["by_hidden"] = ops.matmul(by_logit, table)
                by_table = ops.cast(ops.matmul(ops.transpose(by_logit), hidden), "float32")
                results = {**results, "by_table": results["by_table"] + by_table}
            for name, value in rows.items():
                # A scatter of one slice: TensorFlow's slice update is slow outside of XLA.
                row = ops.scatter_update(results[name], ops.reshape(k, (1, 1)), value[None])
                results = {**results, name: row}
            return results

        scalars = ops.zeros_like(coefficients)
        results = {"losses": scalars, "correct": scalars}
        if training:
            results["by_hidden"] = ops.zeros_like(hidden_KxRxD)
            results["by_table"] = ops.zeros((vocabulary_size, width), dtype="float32")
        results = one_by_one(num_chunks, chunk, results)
        total = ops.sum(results["losses"] * coefficients)
        losses, correct = (_unchunked(results[name], rows) for name in ("losses", "correct"))

        def gradient(*upstreams):
            if not training:
                raise ValueError("cross_entropy has a gradient with training=True only.")
            upstream = keras.tree.flatten(upstreams)[0]
            by_hidden = _unchunked(results["by_hidden"], rows) * ops.cast(upstream, dtype)
            return by_hidden, ops.cast(results["by_table"] * upstream, table_VxD.dtype)

        return (total, losses, correct), gradient

    return ops.custom_gradient(total_and_gradient)(hidden_MxD, table_VxD)


def larger(a, b):
    """Of two sizes the larger; a Python number if both are, so that shapes stay static."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else ops.maximum(a, b)


def one_by_one(count, body, carry):
    """`keras.ops.fori_loop` from 0, of which only one iteration takes memory at a time.

    TensorFlow's executor begins up to ten iterations as soon as their inputs are known. JAX runs
    one after the other anyway, and what makes them wait would keep XLA from adding up over devices
    once, after the loop, what each iteration adds to a sum.

    Args:
        count: number of iterations, int or scalar tensor.
        body: takes an index, int32, and what the last iteration returned; returns the same.
        carry: nested structure of tensors, the first iteration's.
    """
    waits = keras.backend.backend() == "tensorflow"
    return ops.fori_loop(
        0, count, lambda k, carry: body(_after(carry, k) if waits else k, carry), carry
    )


def _after(tensors, index):
    """`index`, int32, known only when all of the tensors are."""
    leaves = [ops.convert_to_tensor(x) for x in keras.tree.flatten(tensors)]
    firsts = [x[(0,) * len(x.shape)] if len(x.shape) else x for x in leaves]
    total = sum(ops.cast(first, "float32") for first in firsts)
    index = ops.convert_to_tensor(index, "int32")
    # The smaller is the index itself, but the runtime cannot know.
    return ops.minimum(index, index + ops.cast(total != total, "int32"))


def _number_of_chunks(rows, vocabulary_size):
    # A power of two, which divides most batches evenly.
    chunk = 2 ** int(math.log2(max(_CHUNK_LOGITS / vocabulary_size, 1)))
    return larger(-(-rows // (chunk * devices_of_a_batch())), 1)


def devices_of_a_batch():
    """Over how many devices Keras splits the rows; a replica of TensorFlow's sees its own only."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return 1
    mesh = distribution.device_mesh
    return mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)]


def chunked(x, num_chunks):
    """[M, ...] -> [K, R, ...], filled up with zeros; R is at least 1, also where M is 0.

    Chunk k has every K-th row: some of all sentences, and so, where these are spread over several
    devices, an equal share of each device's.
    """
    rows, *rest = ops.shape(x)
    # A row of zeros a chunk where there is no other: loops read the first of what they carry.
    missing = larger(-rows % num_chunks, num_chunks - rows)
    # Known not to be zero, or not known when the program is made.
    if not isinstance(missing, int) or missing:
        x = ops.concatenate([x, ops.zeros((missing, *rest), dtype=x.dtype)])
    return ops.swapaxes(ops.reshape(x, (-1, num_chunks, *rest)), 0, 1)


def _unchunked(x_KxR, rows):
    x = ops.swapaxes(x_KxR, 0, 1)
    return ops.reshape(x, (-1, *x.shape[2:]))[:rows]


def divisor(tokens):
    """What sums over so many target tokens, float32, are divided by; 1 where there are none."""
    return ops.where(tokens > 0, tokens, 1.0)


def discounts(n, discount):
    """What each stage's loss counts: λ^s for s = 0 … n - 1, a list of floats.

    The paper prints λ^(s-1) and states λ^0 = 1 for N = 1; only λ^s satisfies both that and
    "λ = 0 is teacher forcing". 0^0 is 1.
    """
    return [float(discount) ** stage for stage in range(n)]
