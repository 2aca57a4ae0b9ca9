"""The model one serves: embedding, encoder and Decoder-0."""

import keras
import numpy as np

from tf_teaforn.errors import UserError
from tf_teaforn.models.recompute import recompute

PARTS = ("embedding", "encoder", "decoder")
# What a packed batch has besides its token ids.
_PACKED_INPUTS = tuple(
    f"{side}_{kind}" for side in ("encoder", "decoder") for kind in ("segment_ids", "positions")
)


def keep_frozen(layer):
    """Freezes the layers in one that was made from the configuration of a frozen one."""
    if not layer.trainable:
        # Setting what is set already would reach none of them.
        layer.trainable = True
        layer.trainable = False


@keras.saving.register_keras_serializable("tf_teaforn")
class Seq2Seq(keras.Model):
    """Encoder-decoder with one embedding for source, target and softmax.

    All weights exist once the constructor returns.

    Args:
        embedding: `TokenEmbedding`.
        encoder: layer called as `encoder(x, mask, segment_ids, positions, training)`; may have
            `max_positions`, as a decoder has.
        decoder: a `Decoder`.
        start_id: what decoding starts from; 0 is the zero vector.
    """

    eos_id = 1

    def __init__(self, embedding, encoder, decoder, start_id=0, **kwargs):
        kwargs.setdefault("name", "seq2seq")
        super().__init__(**kwargs)
        self.start_id = start_id
        self.embedding = embedding
        self.encoder = encoder
        self.decoder = decoder
        self.build()

    def build(self, input_shape=None):
        for layer in (getattr(self, part) for part in PARTS):
            if not layer.built:
                layer.build(None)
            keep_frozen(layer)
        self.built = True

    @property
    def vocabulary_size(self):
        return self.embedding.input_dim

    @property
    def max_positions(self):
        """(source, target): how many positions there are vectors for; None: any number."""
        return getattr(self.encoder, "max_positions", None), self.decoder.max_positions

    def check_ids(self, **ids):
        """Looks at arrays of token ids, by name, whose values are known: not in compiled functions.

        There an id outside of the vocabulary is an error of TensorFlow's on a CPU; on accelerators
        it is the zero vector or that of another subword, under JAX not a number or another's.

        Raises:
            UserError: there is such an id.
        """
        for name, values in ids.items():
            try:
                values = np.asarray(values)
            # What TensorFlow, JAX and Keras say of a tensor that is yet to be computed.
            except (NotImplementedError, TypeError, ValueError):
                continue
            bad = values[(values < 0) | (values >= self.vocabulary_size)]
            if bad.size:
                raise UserError(
                    f"{name} has the id {bad[0]}: the vocabulary has those from 0 to "
                    f"{self.vocabulary_size - 1}. Is the tokenizer another model's?"
                )

    def embed(self, token_ids):
        """int32 [...] -> scaled [..., D]; id 0 gives the zero vector if its row is kept zero."""
        return self.embedding(token_ids)

    def logits(self, hidden):
        """[..., D] -> float32 [..., V]."""
        return self.embedding.logits(hidden)

    def logits_function(self):
        """`logits` as a function that does once what all its calls need."""
        return self.embedding.logits_function()

    def encode(self, inputs, training=False, remat=False):
        """Runs the encoder.

        Args:
            inputs: dictionary with "encoder_token_ids" int32 [B, S], 0 on padding, and for packed
                batches "encoder_segment_ids" and "encoder_positions", int32 [B, S], and the same
                of the decoder, int32 [B, T].
            remat: whether the backward pass computes the encoder again.

        Returns:
            (memory [B, S, D], memory mask bool [B, S]).

        Raises:
            UserError: an id is outside of the vocabulary, or some inputs of a packed batch are
                missing.
        """
        missing = [name for name in _PACKED_INPUTS if inputs.get(name) is None]
        if 0 < len(missing) < len(_PACKED_INPUTS):
            raise UserError(
                f"A packed batch without {', '.join(missing)}: give all of "
                f"{', '.join(_PACKED_INPUTS)}, or none of them."
            )
        token_ids = inputs["encoder_token_ids"]
        self.check_ids(encoder_token_ids=token_ids)
        mask = token_ids != 0

        def encoder(x):
            return self.encoder(
                x,
                mask,
                segment_ids=inputs.get("encoder_segment_ids"),
                positions=inputs.get("encoder_positions"),
                training=training,
            )

        x = self.embed(token_ids)
        memory = recompute([self.encoder], encoder, x) if remat else encoder(x)
        return memory, mask

    def prepare(self, decoder, inputs, memory, memory_mask):
        """`decoder.prepare` with what a packed batch brings along."""
        return decoder.prepare(
            memory,
            memory_mask,
            memory_segment_ids=inputs.get("encoder_segment_ids"),
            segment_ids=inputs.get("decoder_segment_ids"),
            positions=inputs.get("decoder_positions"),
        )

    def call(self, inputs, training=False):
        """Teacher-forced logits of Decoder-0, float32 [B, T, V]."""
        memory, mask = self.encode(inputs, training=training)
        self.check_ids(decoder_token_ids=inputs["decoder_token_ids"])
        prepared = self.prepare(self.decoder, inputs, memory, mask)
        x = self.embed(inputs["decoder_token_ids"])
        return self.logits(self.decoder(x, prepared, training=training))

    def compute_output_spec(self, inputs, training=False):
        shape = tuple(inputs["decoder_token_ids"].shape) + (self.vocabulary_size,)
        return keras.KerasTensor(shape, dtype="float32")

    def get_config(self):
        parts = {part: keras.saving.serialize_keras_object(getattr(self, part)) for part in PARTS}
        # The constructor builds the layers, so that the weights' paths start with its name.
        for part in parts.values():
            part.pop("build_config", None)
        return {**super().get_config(), **parts, "start_id": self.start_id}

    @classmethod
    def from_config(cls, config):
        parts = {part: keras.saving.deserialize_keras_object(config[part]) for part in PARTS}
        return cls(**{**config, **parts})
