"""Token embedding, tied with the output projection."""

import keras
import keras_nlp
from keras import ops


@keras.saving.register_keras_serializable("tf_teaforn")
class ZeroRowNormal(keras.initializers.RandomNormal):
    """Normal distribution; row 0, padding and start, is zero."""

    def __call__(self, shape, dtype=None):
        values = super().__call__(shape, dtype=dtype)
        return values * ops.cast(ops.arange(shape[0]) != 0, values.dtype)[:, None]


def read_as_stored(*weights):
    """Keeps mixed precision from casting Keras variables where they are read.

    What is cast is a whole table, where a few rows are gathered; and the gradients of a row, of a
    frequent token thousands, would be summed in bfloat16, which loses most of them (JAX).
    """
    for weight in weights:
        weight._autocast = False


@ops.custom_gradient
def _freeze_row_zero(table_VxD):
    def grad(*args, upstream=None):
        gradient = args[0] if upstream is None else upstream
        return gradient * ops.cast(ops.arange(ops.shape(gradient)[0]) != 0, gradient.dtype)[:, None]

    return table_VxD, grad


@keras.saving.register_keras_serializable("tf_teaforn")
class TokenEmbedding(keras_nlp.layers.ReversibleEmbedding):
    """E of the paper, [V, D]: input embedding times sqrt(D) (if `scaled`) and softmax weights.

    Row 0 belongs to padding and to the start of decoding. As an input it is the zero vector
    (Tensor2Tensor and PEGASUS feed zeros for GO as well). It is made zero and no gradient reaches
    it; a row that is assigned, as that of Google's PEGASUS, counts in the softmax.

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        scaled: whether input embeddings are multiplied by sqrt(D).
        logits_bias: whether a constant is added to the logits of each token, as Marian and BART
            have it (`final_logits_bias`). It is not trained.
        zero_row: False: row 0 is a vector as the others are, which imported models need whose
            padding is not zero.
        **kwargs: of `keras_nlp.layers.ReversibleEmbedding`, `tie_weights=False` for softmax weights
            of their own among them; `reverse_dtype` and `logit_soft_cap` have to be None.

    Raises:
        ValueError: one of the two is not.
    """

    def __init__(
        self,
        vocabulary_size,
        hidden_dim,
        scaled=True,
        logits_bias=False,
        zero_row=True,
        **kwargs,
    ):
        kwargs.setdefault("embeddings_initializer", ZeroRowNormal(stddev=hidden_dim**-0.5))
        for name in ("reverse_dtype", "logit_soft_cap"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name}: the loss does not have it. Leave it out.")
        super().__init__(vocabulary_size, hidden_dim, **kwargs)
        self.scaled = scaled
        self.logits_bias = logits_bias
        self.zero_row = zero_row

    def build(self, inputs_shape=None):
        super().build(inputs_shape)
        # `embeddings` is no variable where there are others beside it (LoRA).
        read_as_stored(self._embeddings)
        if self.logits_bias:
            self.bias_weights = self.add_weight(
                name="logits_bias",
                shape=(self.input_dim,),
                initializer="zeros",
                dtype="float32",
                trainable=False,
            )

    @property
    def scale(self):
        return self.output_dim**0.5 if self.scaled else 1.0

    def table(self, dtype=None):
        """Softmax weights, [V, D] in `dtype`, by default the compute dtype."""
        if self.tie_weights:
            table = ops.convert_to_tensor(self.embeddings)
            table = _freeze_row_zero(table) if self.zero_row else table
        else:
            table = ops.transpose(ops.convert_to_tensor(self.reverse_embeddings))
        return ops.cast(table, dtype or self.compute_dtype)

    def input_table(self):
        """Input embeddings before scaling, [V, D] in the compute dtype."""
        table = ops.convert_to_tensor(self.embeddings)
        if self.zero_row:
            table = table * ops.cast(ops.arange(self.input_dim) != 0, table.dtype)[:, None]
        return ops.cast(table, self.compute_dtype)

    def bias(self):
        """float32 [V], added to the logits, or None."""
        return ops.convert_to_tensor(self.bias_weights) if self.logits_bias else None

    def call(self, token_ids):
        """int32 [...] -> [..., D], scaled."""
        token_ids = ops.cast(token_ids, "int32")
        vectors = ops.take(ops.convert_to_tensor(self.embeddings), token_ids, axis=0)
        if self.zero_row:
            vectors = vectors * ops.cast(token_ids != 0, vectors.dtype)[..., None]
        return ops.cast(vectors, self.compute_dtype) * self.scale

    def expectation(self, logits, k):
        """Expected embedding under the k most probable tokens (paper, eq. 3).

        Args:
            logits: float32 [..., V].
            k: 1 to V; 1 gives E[argmax] (paper, eq. 2), V the expectation over all tokens.

        Returns:
            [..., D], scaled like an input embedding.
        """
        vocabulary_size, width = self.input_dim, self.output_dim
        dtype = self.compute_dtype
        if k == vocabulary_size:
            probabilities = ops.cast(ops.softmax(logits), dtype)
            return ops.matmul(probabilities, self.input_table()) * self.scale
        top_logits, top_ids = ops.top_k(logits, k)
        # Keras' own softmax warns where k is 1.
        log_sum = ops.logsumexp(top_logits, axis=-1, keepdims=True)
        probabilities = ops.cast(ops.exp(top_logits - log_sum), dtype)
        # Gathered vectors take k * D numbers a position, a scattered distribution V.
        if k * width <= vocabulary_size:
            vectors = self.call(top_ids)
            return ops.squeeze(ops.matmul(probabilities[..., None, :], vectors), -2)
        rows = ops.reshape(top_ids, (-1, k))
        row_index = ops.broadcast_to(
            ops.arange(ops.shape(rows)[0], dtype=rows.dtype)[:, None], ops.shape(rows)
        )
        scattered = ops.scatter(
            ops.reshape(ops.stack([row_index, rows], axis=-1), (-1, 2)),
            ops.reshape(probabilities, (-1,)),
            (ops.shape(rows)[0], vocabulary_size),
        )
        vectors = ops.matmul(scattered, self.input_table()) * self.scale
        return ops.reshape(vectors, tuple(ops.shape(logits)[:-1]) + (width,))

    def logits(self, hidden):
        """[..., D] -> float32 [..., V]."""
        # As a sum over indices: TensorFlow's plain product is slow on a transposed right side. Of
        # two dimensions: the gradient of one over more takes a hundred times as long on a CPU.
        table = self.table()
        rows = ops.einsum("md,vd->mv", ops.reshape(hidden, (-1, self.output_dim)), table)
        shape = (*ops.shape(hidden)[:-1], self.input_dim)
        return self._biased(ops.reshape(rows, shape))

    def logits_function(self):
        """`logits` for search, in float32 throughout: bfloat16 is too coarse to rank tokens by.

        Faster when called often: the transposed table is made here, once.
        """
        table_DxV = ops.transpose(self.table("float32"))
        return lambda hidden: self._biased(ops.matmul(ops.cast(hidden, "float32"), table_DxV))

    def _biased(self, logits):
        logits = ops.cast(logits, "float32")
        bias = self.bias()
        return logits if bias is None else logits + bias

    def get_config(self):
        config = super().get_config()
        return {
            "vocabulary_size": config.pop("input_dim"),
            "hidden_dim": config.pop("output_dim"),
            "scaled": self.scaled,
            "logits_bias": self.logits_bias,
            "zero_row": self.zero_row,
            **config,
        }
