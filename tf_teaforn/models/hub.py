"""Decoders and encoders made of the layers of KerasHub's BART and T5 backbones.

A backbone maps token ids to hidden states at positions that start at 0. TeaForN hands hidden
states to its decoders, at positions that start at s, so the layers are driven one by one here.

Shapes: B batch, K hypotheses, H heads, S source length, T target length, D model width, C width of
one head.
"""

import functools

import keras
import keras_nlp
from keras import ops

# KerasHub exports the backbone alone; setup.py pins the release.
from keras_hub.src.models.t5.t5_layer_norm import T5LayerNorm
from keras_hub.src.models.t5.t5_transformer_layer import T5TransformerLayer

from tf_teaforn.errors import UserError
from tf_teaforn.models.attention import MASKED, AttentionOverKeys
from tf_teaforn.models.dropout import Dropout, shorten_seeds
from tf_teaforn.models.embedding import TokenEmbedding, read_as_stored
from tf_teaforn.models.seq2seq import Seq2Seq
from tf_teaforn.models.transformer import TransformerDecoder

# A mean square in bfloat16 is off by up to 0.4%. What follows a norm casts to its own dtype.
_NORM_DTYPE = "float32"


@keras.saving.register_keras_serializable("tf_teaforn")
def gelu_new(x):
    """GELU by its tanh approximation, as T5 1.1 has it."""
    return keras.activations.gelu(x, approximate=True)


class _Attention(AttentionOverKeys):
    """`MultiHeadAttention`'s methods for an attention layer of KerasHub."""

    def __init__(self, layer):
        self.layer = layer

    def queries(self, x):
        """[B, ..., D] -> [B, H, ..., C], scaled as the scores need it."""
        raise NotImplementedError

    def keys_and_values(self, x):
        """[B, S, D] -> two [B, H, S, C]."""
        raise NotImplementedError

    def merge(self, heads_BxHxTxC):
        """[B, H, T, C] -> [B, T, D]."""
        raise NotImplementedError

    def __call__(self, x, keys_and_values, mask, training=None):
        keys, values = keys_and_values
        return self.merge(self.attend(self.queries(x), keys, values, mask, training))


class _BartAttention(_Attention):
    def queries(self, x):
        queries = ops.moveaxis(self.layer.query_dense(x), -2, 1)
        return queries * queries.shape[-1] ** -0.5

    def keys_and_values(self, x):
        layers = (self.layer.key_dense, self.layer.value_dense)
        return tuple(ops.moveaxis(layer(x), -2, 1) for layer in layers)

    def merge(self, heads):
        return self.layer.output_dense(ops.moveaxis(heads, 1, -2))

    def dropout(self, weights, training):
        return self.layer._dropout_layer(weights, training=training)


class _T5Attention(_Attention):
    """Unscaled: T5's initial weights make up for it."""

    def _heads(self, x):
        shape = tuple(ops.shape(x))[:-1]
        x = ops.reshape(x, (*shape, self.layer.num_heads, self.layer.key_value_dim))
        return ops.moveaxis(x, -2, 1)

    def queries(self, x):
        return self._heads(self.layer.query_projector(x))

    def keys_and_values(self, x):
        layers = (self.layer.key_projector, self.layer.value_projector)
        return tuple(self._heads(layer(x)) for layer in layers)

    def merge(self, heads):
        heads = ops.moveaxis(heads, 1, -2)
        shape = tuple(ops.shape(heads))[:-2]
        return self.layer.output_projector(ops.reshape(heads, (*shape, self.layer.inner_dim)))

    def dropout(self, weights, training):
        return self.layer.dropout_layer(weights, training=training)


class _Residual:
    """`Residual` around layers of KerasHub."""

    def __init__(self, norm, dropout, pre_norm):
        self.norm, self.dropout, self.pre_norm = norm, dropout, pre_norm

    def __call__(self, x, sublayer, training=None):
        if self.pre_norm:
            return x + self.dropout(sublayer(self.norm(x)), training=training)
        return self.norm(x + self.dropout(sublayer(x), training=training))


class _HubStack:
    """What all have in common: settings and a list of KerasHub's layers."""

    remat_layers = None

    def __init__(self, settings, name=None, dtype=None, trainable=True):
        keras.layers.Layer.__init__(self, name=name, dtype=dtype, trainable=trainable)
        self.settings = settings
        self.hidden_dim = settings["hidden_dim"]

    def build(self, input_shape=None):
        # Not in the constructor: T5's layers make weights in theirs, whose names depend on where.
        self.hub_layers = [self._layer(f"layer_{i}") for i in range(self.settings["num_layers"])]

    def get_config(self):
        return {**keras.layers.Layer.get_config(self), **self.settings}


class _Bart(_HubStack):
    """Learned positions, a layer norm of the embeddings, post-norm layers.

    Args:
        num_layers, hidden_dim, intermediate_dim, num_heads: sizes.
        dropout: rate on embeddings, attention weights and each sublayer's output.
        max_positions: number of positions there are vectors for.
    """

    def __init__(
        self,
        *,
        num_layers,
        hidden_dim,
        intermediate_dim,
        num_heads,
        dropout=0.1,
        max_positions=1024,
        **layer,
    ):
        settings = {
            "num_layers": num_layers,
            "hidden_dim": hidden_dim,
            "intermediate_dim": intermediate_dim,
            "num_heads": num_heads,
            "dropout": dropout,
            "max_positions": max_positions,
        }
        super().__init__(settings, **layer)
        self.max_positions = max_positions
        self.position_embedding = keras_nlp.layers.PositionEmbedding(
            max_positions,
            initializer=_bart_initializer(),
            dtype=self.dtype_policy,
            name="position_embedding",
        )
        self.embedding_norm = keras.layers.LayerNormalization(
            epsilon=1e-5, dtype=self.dtype_policy, name="embedding_norm"
        )
        self.embedding_dropout = Dropout(dropout, dtype=self.dtype_policy)

    def _layer(self, name):
        return self.layer_class(
            intermediate_dim=self.settings["intermediate_dim"],
            num_heads=self.settings["num_heads"],
            dropout=self.settings["dropout"],
            activation="gelu",
            layer_norm_epsilon=1e-5,
            kernel_initializer=_bart_initializer(),
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape=None):
        super().build()
        shape = (None, None, self.hidden_dim)
        self.position_embedding.build(shape)
        read_as_stored(self.position_embedding.position_embeddings)
        self.embedding_norm.build(shape)
        for layer in self.hub_layers:
            layer.build(*[shape] * self.streams)
        shorten_seeds(self)

    def _enter(self, x, positions, training):
        table = ops.convert_to_tensor(self.position_embedding.position_embeddings)
        positions = ops.minimum(positions, self.max_positions - 1)
        x = x + ops.cast(ops.take(table, positions, axis=0), x.dtype)
        return self.embedding_dropout(self.embedding_norm(x), training=training)

    def pieces(self):
        """(number of layer, sublayer, piece, Keras layer) of all layers.

        `sublayer` is "self_attention", "cross_attention" or "feed_forward"; `piece` is "norm", or
        one of "query", "key", "value", "output", "inner", "outer".
        """
        for number, layer in enumerate(self.hub_layers):
            for sublayer in ("self_attention", "cross_attention"):
                attention = getattr(layer, f"_{sublayer}_layer", None)
                if attention is not None:
                    yield number, sublayer, "norm", getattr(layer, f"_{sublayer}_layer_norm")
                    for piece in ("query", "key", "value", "output"):
                        yield number, sublayer, piece, getattr(attention, f"{piece}_dense")
            yield number, "feed_forward", "norm", layer._feedforward_layer_norm
            yield number, "feed_forward", "inner", layer._feedforward_intermediate_dense
            yield number, "feed_forward", "outer", layer._feedforward_output_dense

    def _check_length(self, length, start_position=0):
        if isinstance(length, int) and length + start_position > self.max_positions:
            raise UserError(
                f"{length} tokens at positions from {start_position} on exceed the "
                f"{self.max_positions} positions of the model: lower --max_source_length, "
                "--max_target_length, --n or, of an export, --static_length."
            )


def _bart_initializer():
    return keras.initializers.TruncatedNormal(stddev=0.02)


@keras.saving.register_keras_serializable("tf_teaforn")
class BartEncoder(_Bart, keras.layers.Layer):
    __doc__ = f"""BART's encoder.\n\n{_Bart.__doc__}"""

    layer_class, streams = keras_nlp.layers.TransformerEncoder, 1

    def call(self, x_BxSxD, mask_BxS, segment_ids=None, positions=None, training=None):
        """As `TransformerEncoder.call`.

        Raises:
            UserError: the source is longer than the table of positions, in a batch that is not
                packed and whose S is known when the program is made; else a position past the table
                has its last vector.
        """
        if positions is None:
            length = ops.shape(x_BxSxD)[1]
            self._check_length(length)
            positions = ops.arange(length)
        x = self._enter(x_BxSxD, positions, training)
        mask = _encoder_mask(mask_BxS, segment_ids)
        for layer in self.hub_layers:
            x = layer(x, attention_mask=mask, training=training)
        return x


def _encoder_mask(mask_BxS, segment_ids):
    """bool [B, S, S]."""
    mask = ops.logical_and(mask_BxS[:, None, :], ops.ones_like(mask_BxS, "bool")[:, :, None])
    if segment_ids is None:
        return mask
    return ops.logical_and(mask, segment_ids[:, :, None] == segment_ids[:, None, :])


@keras.saving.register_keras_serializable("tf_teaforn")
class BartDecoder(_Bart, TransformerDecoder):
    __doc__ = f"""BART's decoder; position t of Decoder-s is t + s, as everywhere.

    In search, and where T is not known when the program is made, a position past the table has its
    last vector.

    {_Bart.__doc__}"""

    layer_class, streams = keras_nlp.layers.TransformerDecoder, 2

    def build(self, input_shape=None):
        super().build()
        self.blocks = [
            (
                _BartAttention(layer._self_attention_layer),
                _Residual(layer._self_attention_layer_norm, layer._self_attention_dropout, False),
                _BartAttention(layer._cross_attention_layer),
                _Residual(layer._cross_attention_layer_norm, layer._cross_attention_dropout, False),
                _feed(layer._feedforward_intermediate_dense, layer._feedforward_output_dense),
                _Residual(layer._feedforward_layer_norm, layer._feedforward_dropout, False),
            )
            for layer in self.hub_layers
        ]

    def _leave(self, x):
        return x

    def call(self, x_BxTxD, prepared, start_position=0, training=None):
        """As `Decoder.call`.

        Raises:
            UserError: T + start_position exceeds the table of positions, in a batch that is not
                packed and whose T is known when the program is made.
        """
        if "positions" not in prepared:
            self._check_length(ops.shape(x_BxTxD)[1], start_position)
        return super().call(x_BxTxD, prepared, start_position, training)


def _feed(inner, outer):
    return lambda x, training=None: outer(inner(x))


class _T5(_HubStack):
    """Relative positions, pre-norm by root mean square, no biases.

    Args:
        num_layers, hidden_dim, intermediate_dim, num_heads, head_dim: sizes.
        dropout: rate on embeddings, attention weights, inside the feed-forward sublayer, on each
            sublayer's output and on the last one.
        activation: "relu", or "gelu_new" for the tanh approximation of GELU.
        gated: whether the feed-forward sublayer is gated (T5 1.1).
        norm_epsilon: of every norm.
    """

    def __init__(
        self,
        *,
        num_layers,
        hidden_dim,
        intermediate_dim,
        num_heads,
        head_dim,
        dropout=0.1,
        activation="relu",
        gated=False,
        norm_epsilon=1e-6,
        **layer,
    ):
        settings = {
            "num_layers": num_layers,
            "hidden_dim": hidden_dim,
            "intermediate_dim": intermediate_dim,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "dropout": dropout,
            "activation": activation,
            "gated": gated,
            "norm_epsilon": norm_epsilon,
        }
        super().__init__(settings, **layer)
        self.final_norm = T5LayerNorm(norm_epsilon, dtype=_NORM_DTYPE, name="final_norm")
        self.input_dropout, self.output_dropout = (
            Dropout(dropout, dtype=self.dtype_policy) for _ in range(2)
        )

    def _layer(self, name):
        activation = self.settings["activation"]
        layer = T5TransformerLayer(
            is_decoder=self.is_decoder,
            hidden_dim=self.hidden_dim,
            intermediate_dim=self.settings["intermediate_dim"],
            key_value_dim=self.settings["head_dim"],
            dropout=self.settings["dropout"],
            activation=gelu_new if activation == "gelu_new" else activation,
            layer_norm_epsilon=self.settings["norm_epsilon"],
            num_heads=self.settings["num_heads"],
            use_gated_activation=self.settings["gated"],
            use_relative_attention_bias=name == "layer_0",
            dtype=self.dtype_policy,
            name=name,
        )
        # By default a counter of the process is in their names, and so in a checkpoint's.
        layer.self_attention_layer_norm.name = "self_attention_layer_norm"
        layer.layer_norm.name = "feed_forward_layer_norm"
        attentions = [layer.self_attention]
        norms = [layer.self_attention_layer_norm, layer.layer_norm]
        if self.is_decoder:
            layer.cross_attention_layer_norm.name = "cross_attention_layer_norm"
            attentions.append(layer.cross_attention)
            norms.append(layer.cross_attention_layer_norm)
        for norm in norms:
            norm.dtype_policy = _NORM_DTYPE
        for attention in attentions:
            # It takes its mask as an argument; Keras warns of others.
            attention.supports_masking = True
        return layer

    def build(self, input_shape=None):
        super().build()
        x = keras.KerasTensor((None, None, self.hidden_dim), self.compute_dtype)
        mask = keras.KerasTensor((None, None, None), "bool")
        memory = {"encoder_hidden_states": x, "encoder_attention_mask": mask}
        for layer in self.hub_layers:
            # They have no `build`: a symbolic call makes their weights.
            layer(x, attention_mask=mask, **(memory if self.is_decoder else {}))
        read_as_stored(self.hub_layers[0].self_attention.relative_attention_bias)
        self.final_norm.build((None, None, self.hidden_dim))
        shorten_seeds(self)

    def _leave(self, x):
        return self.output_dropout(self.final_norm(x))


@keras.saving.register_keras_serializable("tf_teaforn")
class T5Encoder(_T5, keras.layers.Layer):
    __doc__ = f"""T5's encoder.\n\n{_T5.__doc__}"""

    is_decoder = False

    def call(self, x_BxSxD, mask_BxS, segment_ids=None, positions=None, training=None):
        """As `TransformerEncoder.call`; distances within a packed segment need no positions."""
        x = self.input_dropout(x_BxSxD, training=training)
        mask, bias = _encoder_mask(mask_BxS, segment_ids), None
        for layer in self.hub_layers:
            x, bias = layer(x, attention_mask=mask, position_bias=bias, training=training)
        return self._leave(x)


@keras.saving.register_keras_serializable("tf_teaforn")
class T5Decoder(_T5, TransformerDecoder):
    __doc__ = f"""T5's decoder. It adds no position signal: start_position has no effect.

    {_T5.__doc__}"""

    is_decoder = True

    def build(self, input_shape=None):
        super().build()
        self.blocks = [
            (
                _T5Attention(layer.self_attention),
                _Residual(layer.self_attention_layer_norm, layer.self_attention_dropout, True),
                _T5Attention(layer.cross_attention),
                _Residual(layer.cross_attention_layer_norm, layer.cross_attention_dropout, True),
                functools.partial(_t5_feed, layer),
                _Residual(layer.layer_norm, layer.dropout_layer, True),
            )
            for layer in self.hub_layers
        ]

    def _enter(self, x, positions, training):
        return self.input_dropout(x, training=training)

    def _self_mask(self, mask, queries, keys, first_query=0, copies=1):
        attention = self.hub_layers[0].self_attention
        bias = ops.cast(attention.compute_bias(queries, keys, first_query)[0], "float32")
        return ops.repeat(bias, copies, axis=-1) + ops.where(mask, 0.0, MASKED)


def _t5_feed(layer, x, training=None):
    inner = layer.input_projector(x)
    if layer.use_gated_activation:
        inner = inner * layer.gate_projector(x)
    return layer.output_projector(layer.dropout_layer(inner, training=training))


@keras.saving.register_keras_serializable("tf_teaforn")
class T5Embedding(TokenEmbedding):
    """T5's: unscaled inputs; id 0, from which decoding starts, has a vector as the others have.

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        tied: whether the softmax weights are this table (T5 1.0) or their own (1.1).
        divided: whether they are divided by sqrt(D) (1.0).
    """

    def __init__(self, vocabulary_size, hidden_dim, tied=True, divided=True, **kwargs):
        kwargs = {
            "embeddings_initializer": keras.initializers.TruncatedNormal(stddev=1.0),
            **kwargs,
        }
        super().__init__(
            vocabulary_size, hidden_dim, scaled=False, zero_row=False, tie_weights=tied, **kwargs
        )
        self.divided = divided

    def table(self, dtype=None):
        table = super().table(dtype)
        return table * self.output_dim**-0.5 if self.divided else table

    def get_config(self):
        config = super().get_config()
        for fixed in ("scaled", "zero_row"):
            config.pop(fixed)
        return {"tied": config.pop("tie_weights"), "divided": self.divided, **config}


def build_bart(
    vocabulary_size, encoder, decoder, *, dtype=None, scaled=False, logits_bias=False, start_id=1
):
    """A `Seq2Seq`; `encoder` and `decoder` are the settings of each.

    Decoding starts from the end of sentence. The row of padding is trained by the softmax.
    """
    embedding = TokenEmbedding(
        vocabulary_size,
        encoder["hidden_dim"],
        scaled=scaled,
        logits_bias=logits_bias,
        zero_row=False,
        embeddings_initializer=_bart_initializer(),
        dtype=dtype,
        name="embedding",
    )
    return Seq2Seq(
        embedding,
        BartEncoder(**encoder, dtype=dtype, name="encoder"),
        BartDecoder(**decoder, dtype=dtype, name="decoder"),
        start_id=start_id,
    )


def build_t5(vocabulary_size, encoder, decoder, *, dtype=None, tied=True, divided=True):
    """A `Seq2Seq`; `encoder` and `decoder` are the settings of each."""
    return Seq2Seq(
        T5Embedding(
            vocabulary_size,
            encoder["hidden_dim"],
            tied=tied,
            divided=divided,
            dtype=dtype,
            name="embedding",
        ),
        T5Encoder(**encoder, dtype=dtype, name="encoder"),
        T5Decoder(**decoder, dtype=dtype, name="decoder"),
    )
