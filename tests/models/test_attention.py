"""Attention against Keras' own layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tf_teaforn import testing
from tf_teaforn.models import attention as module
from tf_teaforn.models.attention import MultiHeadAttention

WIDTH, HEADS = 8, 2


@pytest.mark.parametrize("use_bias", [False, True])
def test_attention_is_that_of_keras(use_bias):
    attention = MultiHeadAttention(WIDTH, HEADS, use_bias=use_bias)
    attention.build()
    testing.randomize(attention)
    peer = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=use_bias)
    random = np.random.default_rng(0)
    x, memory = (random.normal(size=(3, t, WIDTH)).astype("float32") for t in (4, 5))
    mask = random.random((3, 4, 5)) < 0.6
    mask[..., 0] = True
    peer.build(x.shape, memory.shape)
    shapes = [weight.shape for weight in peer.weights]
    peer.set_weights(
        [w.reshape(shape) for w, shape in zip(attention.get_weights(), shapes, strict=True)]
    )
    output = attention(x, attention.keys_and_values(ops.convert_to_tensor(memory)), mask[:, None])
    np.testing.assert_allclose(output, peer(x, memory, attention_mask=mask), rtol=1e-5, atol=1e-6)


def test_all_masked_gives_a_finite_output():
    attention = MultiHeadAttention(WIDTH, HEADS)
    attention.build()
    x = ops.ones((1, 2, WIDTH))
    output = attention(x, attention.keys_and_values(x), ops.zeros((1, 1, 2, 2), "bool"))
    assert np.all(np.isfinite(output))


def test_softmax_is_float32_under_bfloat16(monkeypatch):
    seen, softmax = [], ops.softmax

    def noted(x):
        seen.append(keras.backend.standardize_dtype(x.dtype))
        return softmax(x)

    monkeypatch.setattr(ops, "softmax", noted)
    attention = MultiHeadAttention(2, 1, dtype="mixed_bfloat16")
    queries = ops.cast([[[16.0, 1.0]]], "bfloat16")
    keys = ops.cast([[[16.0, 0.0], [16.0, 1.0]]], "bfloat16")
    values = ops.cast([[[0.0, 0.0], [1.0, 1.0]]], "bfloat16")
    attended = attention.attend(queries, keys, values, ops.ones((1, 1, 2), "bool"))
    assert keras.backend.standardize_dtype(attended.dtype) == "bfloat16"
    parts = [(x[:, :1], x[:, 1:]) for x in (keys, values)]
    in_parts = attention.attend_segments(queries, *parts, ops.ones((1, 1, 2), "bool"))
    np.testing.assert_array_equal(ops.cast(in_parts, "float32"), ops.cast(attended, "float32"))
    assert seen == ["float32", "float32"]


@pytest.mark.parametrize(
    ("lengths", "mask_shape", "dropout", "taken"),
    [
        ((4, 6), (3, 1, 1, 6), 0.0, True),
        ((4, 4), (1, 1, 4, 4), 0.0, True),
        # No gradient for odd lengths, no dropout on weights, no scores to add.
        ((4, 5), (3, 1, 4, 5), 0.0, False),
        ((5, 4), (3, 1, 5, 4), 0.0, False),
        ((4, 6), (3, 1, 4, 6), 0.1, False),
        ((4, 6), None, 0.0, False),
    ],
)
def test_the_fused_kernel_computes_the_same(monkeypatch, lengths, mask_shape, dropout, taken):
    calls, fused = [], ops.dot_product_attention

    def noted(queries, keys, values, mask, scale):
        calls.append(mask.shape[-2:])
        return fused(queries, keys, values, mask=mask, scale=scale)

    monkeypatch.setattr(ops, "dot_product_attention", noted)
    random = np.random.default_rng(0)
    queries, keys, values = (
        ops.convert_to_tensor(random.normal(size=(3, HEADS, t, WIDTH)), "float32")
        for t in (lengths[0], lengths[1], lengths[1])
    )
    mask = ops.zeros((1, 1, 1, lengths[1]))
    if mask_shape:
        mask = random.random(mask_shape) < 0.6
        mask[..., 0] = True
        # Padding of a batch: nothing to attend to.
        mask[-1, ..., -1, :] = mask_shape[0] == 1
        mask = ops.convert_to_tensor(mask)

    def attended(kernel, training):
        monkeypatch.setattr(module, "_has_fused_kernel", lambda: kernel)
        attention = MultiHeadAttention(WIDTH, HEADS, dropout=dropout)
        return attention.attend(queries, keys, values, mask, training)

    def output_and_gradients(kernel):
        arrays = queries, keys, values
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            output = attended(kernel, False)
            # No loss looks at the last row.
            total = ops.sum(ops.sin(output[:-1])) + ops.sum(ops.sin(output[-1, ..., :-1, :]))
        return [output, *tape.gradient(total, arrays)]

    for with_it, without in zip(*map(output_and_gradients, (True, False)), strict=True):
        np.testing.assert_allclose(with_it, without, rtol=1e-5, atol=1e-6)
    calls.clear()
    attended(True, training=True)
    assert calls == ([lengths] if taken else [])
