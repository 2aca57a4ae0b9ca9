"""Multi-head attention whose keys and values can be kept: for all stages, or step by step.

Shapes: B batch, H heads, T queries, S keys, D model width, C width of one head.
"""

import functools

import keras
from keras import ops

from tf_teaforn.models.dropout import Dropout

# Finite, so that a row of padding gives a uniform distribution and not NaN.
MASKED = -1e9


def _masked(scores, mask):
    if keras.backend.standardize_dtype(mask.dtype) == "bool":
        return ops.where(mask, scores, MASKED)
    return scores + mask


@functools.cache
def _has_fused_kernel():
    """Whether Keras computes attention without its scores in memory: cuDNN's kernel, under JAX."""
    return keras.backend.backend() == "jax" and "gpu" in keras.distribution.list_devices()[0]


def _fused_attention(queries, keys, values, mask):
    """`AttentionOverKeys.attend` of Keras, which takes the kernel if types and sizes are for it."""
    # The kernel takes masks of full sizes only.
    full = ops.ones((1, 1, ops.shape(queries)[-2], ops.shape(keys)[-2]), "bool")
    queries, keys, values = (ops.swapaxes(x, 1, 2) for x in (queries, keys, values))
    heads = ops.dot_product_attention(
        queries, keys, values, mask=ops.logical_and(mask, full), scale=1.0
    )
    return ops.swapaxes(heads, 1, 2)


def project(dense, x):
    """`dense(x)` for x of any rank, as one product of two matrices.

    `Dense` leaves that to an operation which, where a size is unknown, computes shapes at run time:
    in a step of search that takes as long as the products.
    """
    *leading, width = ops.shape(x)
    y = dense(ops.reshape(x, (-1, width)))
    return ops.reshape(y, (-1, *leading[1:], ops.shape(y)[-1]))


class AttentionOverKeys:
    """What attention does with queries, keys and values that are there already; a mixin.

    Attributes:
        dropout: function of (weights, training).
    """

    def attend(self, queries, keys, values, mask, training=None):
        """Attention over given keys and values.

        Args:
            queries: [..., T, C]; keys, values: [..., S, C].
            mask: broadcastable to [..., T, S]; bool, True where attention is allowed, or float32,
                added to the scores.

        Returns:
            [..., T, C].
        """
        scores = ops.cast(ops.matmul(queries, ops.swapaxes(keys, -1, -2)), "float32")
        weights = ops.softmax(_masked(scores, mask))
        weights = self.dropout(ops.cast(weights, values.dtype), training=training)
        return ops.matmul(weights, values)

    def attend_segments(self, queries, keys, values, mask):
        """`attend`, with keys and values in pieces along S; no dropout.

        Args:
            keys, values: sequences of [..., S_i, C].
        """
        if len(keys) == 1:
            return self.attend(queries, keys[0], values[0], mask)
        scores = ops.concatenate(
            [ops.matmul(queries, ops.swapaxes(k, -1, -2)) for k in keys], axis=-1
        )
        weights = ops.softmax(_masked(ops.cast(scores, "float32"), mask))
        weights = ops.cast(weights, values[0].dtype)
        start, heads = 0, []
        for segment in values:
            end = start + ops.shape(segment)[-2]
            heads.append(ops.matmul(weights[..., start:end], segment))
            start = end
        return sum(heads[1:], heads[0])


@keras.saving.register_keras_serializable("tf_teaforn")
class MultiHeadAttention(AttentionOverKeys, keras.layers.Layer):
    """softmax(Q K' / sqrt(C)) V (Vaswani et al. 2017, section 3.2); float32 softmax.

    Args:
        hidden_dim: D.
        num_heads: H; C = D / H.
        use_bias: whether the four projections have biases.
        dropout: rate on the attention weights.
    """

    def __init__(self, hidden_dim, num_heads, use_bias=False, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        if num_heads < 1 or hidden_dim % num_heads:
            raise ValueError(f"hidden_dim {hidden_dim} is not a multiple of num_heads {num_heads}.")
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.use_bias = use_bias
        self.head_dim = hidden_dim // num_heads
        self.query, self.key, self.value, self.output_projection = (
            keras.layers.Dense(hidden_dim, use_bias=use_bias, dtype=self.dtype_policy, name=name)
            for name in ("query", "key", "value", "output")
        )
        self.dropout = Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape=None):
        for layer in (self.query, self.key, self.value, self.output_projection):
            layer.build((None, None, self.hidden_dim))
        self.built = True

    def _split(self, x):
        """[B, T, D] -> [B, H, T, C]."""
        length = ops.shape(x)[1]
        if isinstance(length, int) and length == 1:
            return ops.reshape(x, (-1, self.num_heads, 1, self.head_dim))
        return ops.moveaxis(ops.reshape(x, (-1, length, self.num_heads, self.head_dim)), 2, 1)

    def keys_and_values(self, x_BxSxD):
        """Returns two [B, H, S, C]."""
        return tuple(self._split(project(layer, x_BxSxD)) for layer in (self.key, self.value))

    def queries(self, x_BxTxD):
        """Returns [B, H, T, C], already divided by sqrt(C)."""
        return self._split(project(self.query, x_BxTxD)) * self.head_dim**-0.5

    def merge(self, heads_BxHxTxC):
        """[B, H, T, C] -> [B, T, D], through the output projection."""
        length = ops.shape(heads_BxHxTxC)[2]
        if not (isinstance(length, int) and length == 1):
            heads_BxHxTxC = ops.moveaxis(heads_BxHxTxC, 1, 2)
        x = ops.reshape(heads_BxHxTxC, (-1, length, self.hidden_dim))
        return project(self.output_projection, x)

    def attend(self, queries, keys, values, mask, training=None):
        if _has_fused_kernel() and not (training and self.dropout.rate):
            boolean = keras.backend.standardize_dtype(mask.dtype) == "bool"
            # The kernel's gradient is for even lengths only.
            even = queries.shape[-2] % 2 == keys.shape[-2] % 2 == 0
            if boolean and even and len(queries.shape) == 4:
                return _fused_attention(queries, keys, values, mask)
        return super().attend(queries, keys, values, mask, training)

    def call(self, x_BxTxD, keys_and_values, mask, training=None):
        keys, values = keys_and_values
        return self.merge(self.attend(self.queries(x_BxTxD), keys, values, mask, training))

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "num_heads": self.num_heads,
            "use_bias": self.use_bias,
            "dropout": self.dropout.rate,
        }
