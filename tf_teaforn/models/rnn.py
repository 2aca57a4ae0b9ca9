"""Recurrent encoder and decoder with attention (Bahdanau et al. 2015, Luong et al. 2015).

Shapes: B batch, K hypotheses, S source length, T target length, D model width.
"""

import keras
from keras import ops

from tf_teaforn.errors import UserError
from tf_teaforn.models.attention import MultiHeadAttention
from tf_teaforn.models.decoder import Decoder
from tf_teaforn.models.dropout import Dropout

CELLS = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU}


def _refuse_packing(segment_ids):
    if segment_ids is not None:
        raise UserError(
            "--batching=pack: a recurrent model would carry its state from one sentence of a row "
            "into the next. Write --batching=bucket."
        )


class _Stack:
    """What encoder and decoder have in common: settings, recurrent layers, residuals."""

    def __init__(
        self,
        *,
        num_layers,
        hidden_dim,
        cell="lstm",
        dropout=0.1,
        name=None,
        dtype=None,
        trainable=True,
    ):
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        if cell not in CELLS:
            raise ValueError(f"cell is {cell!r}; it must be one of {', '.join(CELLS)}.")
        self.settings = {
            "num_layers": num_layers,
            "hidden_dim": hidden_dim,
            "cell": cell,
            "dropout": dropout,
        }
        self.hidden_dim = hidden_dim
        self.dropout = Dropout(dropout, dtype=self.dtype_policy)
        self.layers = [self._layer(f"layer_{i}") for i in range(num_layers)]

    def _recurrent(self, units, name):
        # float32: a sum over time loses its small terms in bfloat16.
        return CELLS[self.settings["cell"]](
            units, return_sequences=True, dtype="float32", name=name
        )

    def build(self, input_shape=None):
        for layer in self.layers:
            layer.build((None, None, self.hidden_dim))
        self.built = True

    def _recur(self, x, run, training):
        """Runs all layers: `run(layer, x)` one of them; residuals from the second on."""
        for i, layer in enumerate(self.layers):
            y = ops.cast(run(layer, self.dropout(x, training=training)), self.compute_dtype)
            x = x + y if i else y
        return self.dropout(x, training=training)

    def get_config(self):
        return {**super().get_config(), **self.settings}


@keras.saving.register_keras_serializable("tf_teaforn")
class RnnEncoder(_Stack, keras.layers.Layer):
    """Bidirectional recurrent encoder; each direction has half the width.

    Args:
        num_layers, hidden_dim: sizes; hidden_dim is even.
        cell: "lstm" or "gru".
        dropout: rate on the input of each layer and on the output.
    """

    def _layer(self, name):
        if self.hidden_dim % 2:
            raise ValueError(f"hidden_dim {self.hidden_dim} is odd; two directions share it.")
        return keras.layers.Bidirectional(
            self._recurrent(self.hidden_dim // 2, name), dtype="float32", name=name
        )

    def call(self, x_BxSxD, mask_BxS, segment_ids=None, positions=None, training=None):
        """[B, S, D] scaled embeddings and bool [B, S] -> [B, S, D].

        Raises:
            UserError: the batch is packed.
        """
        _refuse_packing(segment_ids)
        # cuDNN refuses a row without any input.
        first = ops.arange(ops.shape(x_BxSxD)[1]) == 0
        mask = ops.logical_or(mask_BxS, first)
        return self._recur(x_BxSxD, lambda layer, x: layer(x, mask=mask), training)


@keras.saving.register_keras_serializable("tf_teaforn")
class RnnDecoder(_Stack, Decoder):
    """Recurrent layers from a zero state, then attention to the encoder.

    The output is norm(tanh(W [h; c])), with h that of the last layer and c what it attends to:
    global attention with the score h' W m (Luong et al. 2015, sections 3 and 3.1), scaled by
    1 / sqrt(D). It has no position signal: start_position has no effect.

    Takes the arguments of `RnnEncoder`.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.attention = MultiHeadAttention(
            self.hidden_dim, num_heads=1, dtype=self.dtype_policy, name="attention"
        )
        self.combine = keras.layers.Dense(
            self.hidden_dim, activation="tanh", dtype=self.dtype_policy, name="combine"
        )
        self.final_norm = keras.layers.LayerNormalization(
            epsilon=1e-5, dtype=self.dtype_policy, name="final_norm"
        )

    def _layer(self, name):
        return self._recurrent(self.hidden_dim, name)

    def build(self, input_shape=None):
        super().build()
        self.attention.build(None)
        self.combine.build((None, None, 2 * self.hidden_dim))
        self.final_norm.build((None, None, self.hidden_dim))

    def prepare(
        self,
        memory_BxSxD,
        memory_mask_BxS,
        memory_segment_ids=None,
        segment_ids=None,
        positions=None,
    ):
        _refuse_packing(segment_ids)
        return {
            "memory": self.attention.keys_and_values(memory_BxSxD),
            "mask": memory_mask_BxS[:, None, None, :],
        }

    def call(self, x_BxTxD, prepared, start_position=0, training=None):
        return self._run(x_BxTxD, prepared, lambda layer, x: layer(x), training)

    def _run(self, x, prepared, run, training):
        x = self._recur(x, run, training)
        context = self.attention(x, prepared["memory"], prepared["mask"], training=training)
        return self.final_norm(self.combine(ops.concatenate([x, context], axis=-1)))

    def initial_state(self, prepared, num_hypotheses, max_length):
        batch = ops.shape(prepared["mask"])[0]
        zeros = ops.zeros((batch, num_hypotheses, self.hidden_dim), "float32")
        states = 2 if self.settings["cell"] == "lstm" else 1
        return [[zeros] * states for _ in self.layers]

    def step(self, x_BxKxD, state, prepared, position):
        batch, hypotheses, width = ops.shape(x_BxKxD)
        old, new = iter(state), []

        def run(layer, x):
            rows = [ops.reshape(y, (batch * hypotheses, width)) for y in (x, *next(old))]
            output, states = layer.cell(rows[0], rows[1:], training=False)
            output, *states = (
                ops.reshape(y, (batch, hypotheses, width)) for y in (output, *states)
            )
            new.append(states)
            return output

        return self._run(x_BxKxD, prepared, run, False), new
