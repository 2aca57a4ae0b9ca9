"""Transformer encoder and decoder (Vaswani et al. 2017), pre- or post-norm.

Shapes: B batch, K hypotheses, H heads, S source length, T target length, D model width,
F feed-forward width, C width of one head.
"""

import keras
from keras import ops

from tf_teaforn.models.attention import MultiHeadAttention, project
from tf_teaforn.models.decoder import Decoder, batch_gather
from tf_teaforn.models.dropout import Dropout
from tf_teaforn.models.position import check_position_signal, position_signal
from tf_teaforn.models.recompute import recompute


@keras.saving.register_keras_serializable("tf_teaforn")
class FeedForward(keras.layers.Layer):
    """Two dense layers, D -> F -> D."""

    def __init__(self, hidden_dim, intermediate_dim, activation="relu", dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.inner = keras.layers.Dense(
            intermediate_dim, activation=activation, dtype=self.dtype_policy, name="inner"
        )
        self.outer = keras.layers.Dense(hidden_dim, dtype=self.dtype_policy, name="outer")
        self.dropout = Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape=None):
        self.inner.build((None, None, self.hidden_dim))
        self.outer.build((None, None, self.intermediate_dim))
        self.built = True

    def call(self, x, training=None):
        return project(self.outer, self.dropout(project(self.inner, x), training=training))

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": self.intermediate_dim,
            "activation": self.activation,
            "dropout": self.dropout.rate,
        }


@keras.saving.register_keras_serializable("tf_teaforn")
class Residual(keras.layers.Layer):
    """x + sublayer(norm(x)) for pre-norm, norm(x + sublayer(x)) for post-norm; with dropout."""

    def __init__(self, hidden_dim, norm, norm_epsilon, dropout, **kwargs):
        super().__init__(**kwargs)
        if norm not in ("pre", "post"):
            raise ValueError(f"norm is {norm!r}; it must be 'pre' or 'post'.")
        self.hidden_dim = hidden_dim
        self.norm = norm
        self.layer_norm = keras.layers.LayerNormalization(
            epsilon=norm_epsilon, dtype=self.dtype_policy, name="layer_norm"
        )
        self.dropout = Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape=None):
        self.layer_norm.build((None, None, self.hidden_dim))
        self.built = True

    def call(self, x, sublayer, training=None):
        """`sublayer` maps the normalised input to an output of the same shape."""
        if self.norm == "pre":
            return x + self.dropout(sublayer(self.layer_norm(x)), training=training)
        return self.layer_norm(x + self.dropout(sublayer(x), training=training))

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "norm": self.norm,
            "norm_epsilon": self.layer_norm.epsilon,
            "dropout": self.dropout.rate,
        }


class _Stack:
    """What encoder and decoder have in common: settings, layers, input, final norm."""

    # Of one layer, in order; each has a `Residual` around it.
    sublayers = ()
    # Whether training computes each layer again in the backward pass.
    remat_layers = False

    def __init__(
        self,
        *,
        num_layers,
        hidden_dim,
        intermediate_dim,
        num_heads,
        dropout=0.1,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation="relu",
        norm="pre",
        norm_epsilon=1e-5,
        attention_bias=False,
        position_signal="half_split",
        name=None,
        dtype=None,
        trainable=True,
    ):
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        check_position_signal(hidden_dim, position_signal)
        self.settings = {
            "num_layers": num_layers,
            "hidden_dim": hidden_dim,
            "intermediate_dim": intermediate_dim,
            "num_heads": num_heads,
            "dropout": dropout,
            "attention_dropout": attention_dropout,
            "activation_dropout": activation_dropout,
            "activation": activation,
            "norm": norm,
            "norm_epsilon": norm_epsilon,
            "attention_bias": attention_bias,
            "position_signal": position_signal,
        }
        self.hidden_dim = hidden_dim
        self.input_dropout = Dropout(dropout, dtype=self.dtype_policy)
        self.final_norm = (
            keras.layers.LayerNormalization(
                epsilon=norm_epsilon, dtype=self.dtype_policy, name="final_norm"
            )
            if norm == "pre"
            else None
        )
        self.blocks = [
            tuple(
                layer
                for name in self.sublayers
                for layer in (
                    self._feed_forward(f"layer_{i}_{name}")
                    if name == "feed_forward"
                    else self._attention(f"layer_{i}_{name}"),
                    self._residual(f"layer_{i}_{name}_residual"),
                )
            )
            for i in range(num_layers)
        ]

    def _attention(self, name):
        return MultiHeadAttention(
            self.hidden_dim,
            self.settings["num_heads"],
            use_bias=self.settings["attention_bias"],
            dropout=self.settings["attention_dropout"],
            dtype=self.dtype_policy,
            name=name,
        )

    def _feed_forward(self, name):
        return FeedForward(
            self.hidden_dim,
            self.settings["intermediate_dim"],
            activation=self.settings["activation"],
            dropout=self.settings["activation_dropout"],
            dtype=self.dtype_policy,
            name=name,
        )

    def _residual(self, name):
        return Residual(
            self.hidden_dim,
            self.settings["norm"],
            self.settings["norm_epsilon"],
            self.settings["dropout"],
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape=None):
        for block in self.blocks:
            for layer in block:
                layer.build(None)
        if self.final_norm is not None:
            self.final_norm.build((None, None, self.hidden_dim))
        self.built = True

    def _enter(self, x, positions, training):
        signal = position_signal(positions, self.hidden_dim, self.settings["position_signal"])
        return self.input_dropout(x + ops.cast(signal, x.dtype), training=training)

    def _block(self, block, function, training, *arguments):
        """Runs one layer, `function(*arguments)`."""
        if training and self.remat_layers:
            return recompute(block, function, *arguments)
        return function(*arguments)

    def _leave(self, x):
        return x if self.final_norm is None else self.final_norm(x)

    def get_config(self):
        return {**super().get_config(), **self.settings}


@keras.saving.register_keras_serializable("tf_teaforn")
class TransformerEncoder(_Stack, keras.layers.Layer):
    """Self-attention encoder.

    Args:
        num_layers, hidden_dim, intermediate_dim, num_heads: sizes.
        dropout: rate on embeddings and on each sublayer's output.
        attention_dropout, activation_dropout: rates on attention weights and inside the
            feed-forward sublayer.
        activation: of the feed-forward sublayer.
        norm: "pre" or "post".
        norm_epsilon: of every layer normalisation.
        attention_bias: whether attention projections have biases.
        position_signal: see `position_signal`.
    """

    sublayers = ("self_attention", "feed_forward")

    def call(self, x_BxSxD, mask_BxS, segment_ids=None, positions=None, training=None):
        """[B, S, D] scaled embeddings and bool [B, S] -> [B, S, D].

        `segment_ids` and `positions`, int32 [B, S], belong to packed batches.
        """
        if positions is None:
            positions = ops.arange(ops.shape(x_BxSxD)[1])
        attention_mask = mask_BxS[:, None, None, :]
        if segment_ids is not None:
            same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
            attention_mask = ops.logical_and(attention_mask, same)
        x = self._enter(x_BxSxD, positions, training)
        for block in self.blocks:

            def layer(x, block=block):
                attention, attention_residual, feed_forward, feed_forward_residual = block

                def self_attend(y):
                    return attention(
                        y, attention.keys_and_values(y), attention_mask, training=training
                    )

                def feed(y):
                    return feed_forward(y, training=training)

                x = attention_residual(x, sublayer=self_attend, training=training)
                return feed_forward_residual(x, sublayer=feed, training=training)

            x = self._block(block, layer, training, x)
        return self._leave(x)


def _causal_mask(x_BxT):
    """bool [1, 1, T, T]."""
    steps = ops.arange(ops.shape(x_BxT)[1])
    return (steps[:, None] >= steps[None, :])[None, None]


@keras.saving.register_keras_serializable("tf_teaforn")
class TransformerDecoder(_Stack, Decoder):
    """Causal self-attention, attention to the encoder, feed-forward.

    Takes the arguments of `TransformerEncoder`.
    """

    sublayers = ("self_attention", "cross_attention", "feed_forward")
    supports_packing = True

    def prepare(
        self,
        memory_BxSxD,
        memory_mask_BxS,
        memory_segment_ids=None,
        segment_ids=None,
        positions=None,
    ):
        cross_mask = memory_mask_BxS[:, None, None, :]
        prepared = {
            "memory": [block[2].keys_and_values(memory_BxSxD) for block in self.blocks],
        }
        if segment_ids is not None:
            same = segment_ids[:, None, :, None] == memory_segment_ids[:, None, None, :]
            cross_mask = ops.logical_and(cross_mask, same)
            same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
            prepared["self_mask"] = ops.logical_and(same, _causal_mask(segment_ids))
            prepared["positions"] = positions
        prepared["cross_mask"] = cross_mask
        return prepared

    def _self_mask(self, mask, queries, keys, first_query=0, copies=1):
        """What self-attention takes for `mask`: a place for a bias that depends on distances.

        Args:
            mask: bool, True where attention is allowed.
            queries, keys: numbers of positions; the first query's is `first_query`.
            copies: how many keys a position has.
        """
        return mask

    def _run(self, x, prepared, self_attentions, cross_attend, training):
        for block, memory, self_attend in zip(
            self.blocks, prepared["memory"], self_attentions, strict=True
        ):

            def layer(x, memory, block=block, self_attend=self_attend):
                _, self_residual, cross, cross_residual, feed_forward, last_residual = block

                def attend_memory(y):
                    return cross_attend(cross, y, memory)

                def feed(y):
                    return feed_forward(y, training=training)

                x = self_residual(x, sublayer=self_attend, training=training)
                x = cross_residual(x, sublayer=attend_memory, training=training)
                return last_residual(x, sublayer=feed, training=training)

            x = self._block(block, layer, training, x, memory)
        return self._leave(x)

    def call(self, x_BxTxD, prepared, start_position=0, training=None):
        if "self_mask" in prepared:
            self_mask, positions = prepared["self_mask"], prepared["positions"]
        else:
            self_mask = _causal_mask(x_BxTxD)
            positions = ops.arange(ops.shape(x_BxTxD)[1])
        length = ops.shape(x_BxTxD)[1]
        self_mask = self._self_mask(self_mask, length, length)
        positions = positions + start_position

        def self_attend(attention):
            return lambda y: attention(
                y, attention.keys_and_values(y), self_mask, training=training
            )

        def cross_attend(cross, y, memory):
            return cross(y, memory, prepared["cross_mask"], training=training)

        x = self._enter(x_BxTxD, positions, training)
        self_attentions = [self_attend(block[0]) for block in self.blocks]
        return self._run(x, prepared, self_attentions, cross_attend, training)

    # The state: keys and values by position and slot, [B, H, L, K, C], where a hypothesis writes
    # into the slot of its number. It is never reordered; a hypothesis remembers in which slot its
    # own past lies, "slots" [B, K, L], attends to all slots of its sentence and masks the others.
    # A growing state keeps full segments apart, [B, H, L K, C], so that a step copies the newest
    # one alone.

    def initial_state(self, prepared, num_hypotheses, max_length):
        keys = prepared["memory"][0][0]
        batch, heads, _, head_dim = ops.shape(keys)
        cache = ops.zeros((batch, heads, max_length, num_hypotheses, head_dim), dtype=keys.dtype)
        return {
            "newest": [(cache, cache) for _ in self.blocks],
            "slots": ops.zeros((batch, num_hypotheses, max_length), "int32"),
        }

    def growing_state(self, prepared, num_hypotheses):
        none = ops.shape(prepared["memory"][0][0])[2] * 0
        state = self.initial_state(prepared, num_hypotheses, none)
        return {**state, "full": self._flat(state)}

    def grow_state(self, state, steps):
        def appended(x, more, axis):
            return ops.concatenate([x, more], axis=axis)

        def zeros(x, axis):
            shape = list(ops.shape(x))
            shape[axis] = steps
            return ops.zeros(shape, x.dtype)

        pairs = zip(state["full"], self._flat(state), strict=True)
        return {
            "full": [
                tuple(appended(a, b, 2) for a, b in zip(full, newest, strict=True))
                for full, newest in pairs
            ],
            "newest": [tuple(zeros(cache, 2) for cache in pair) for pair in state["newest"]],
            "slots": appended(state["slots"], zeros(state["slots"], 2), 2),
        }

    def _flat(self, state):
        batch = ops.shape(state["slots"])[0]
        return [tuple(_merge_axes(cache, batch) for cache in pair) for pair in state["newest"]]

    def reorder_state(self, state, parents_BxK):
        return {**state, "slots": batch_gather(state["slots"], parents_BxK)}

    def step(self, x_BxKxD, state, prepared, position):
        slots = state["slots"]
        width, length = ops.shape(slots)[1:]
        own = ops.arange(width, dtype="int32")
        places = ops.arange(length, dtype="int32")
        slots = ops.where(places == position, own[:, None], slots)
        visible = ops.logical_and(slots[..., None] == own, (places <= position)[:, None])
        visible = ops.reshape(visible, (-1, 1, width, length * width))
        visible = self._self_mask(visible, 1, length, position, copies=width)
        # TensorFlow's slice update is an XLA operator, which no serving binary needs to have, and
        # slower than a selection on the CPU.
        room = ops.shape(state["newest"][0][0])[2]
        here = ops.arange(room, dtype="int32") == position - (length - room)
        here = here[:, None, None]
        newest = []

        def self_attend(attention, cache, full):
            def attend(y):
                segments = [] if full is None else [full]
                pairs = zip(attention.keys_and_values(y), cache, strict=True)
                newest.append(tuple(ops.where(here, n[:, :, None], c) for n, c in pairs))
                segments.append(tuple(_merge_axes(cache) for cache in newest[-1]))
                keys, values = zip(*segments, strict=True)
                return attention.merge(
                    attention.attend_segments(attention.queries(y), keys, values, visible)
                )

            return attend

        def cross_attend(cross, y, memory):
            return cross(y, memory, prepared["cross_mask"])

        x = self._enter(x_BxKxD, position, False)
        full = state.get("full", [None] * len(self.blocks))
        self_attentions = [
            self_attend(block[0], *caches)
            for block, *caches in zip(self.blocks, state["newest"], full, strict=True)
        ]
        x = self._run(x, prepared, self_attentions, cross_attend, False)
        return x, {**state, "newest": newest, "slots": slots}


def _merge_axes(cache, batch=-1):
    """[B, H, L, K, C] -> [B, H, L K, C]; `batch` is needed where L is 0."""
    _, heads, length, width, head_dim = ops.shape(cache)
    return ops.reshape(cache, (batch, heads, length * width, head_dim))
