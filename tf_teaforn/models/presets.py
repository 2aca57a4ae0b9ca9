"""KerasHub's presets of BART and T5 as `Seq2Seq`."""

import logging

import keras_nlp
import numpy as np

from tf_teaforn.errors import UserError
from tf_teaforn.models.hub import build_bart, build_t5

PREFIX = "keras_nlp:"

_logger = logging.getLogger(__name__)


def from_preset(kind, name):
    """`kind.from_preset` of what follows "keras_nlp:" in `name`; `kind` is a class of KerasHub.

    Raises:
        UserError: KerasHub cannot open it.
    """
    try:
        return kind.from_preset(name.removeprefix(PREFIX))
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"--model={name}: KerasHub cannot open it: {reason}") from error


def load_backbone(name):
    """The backbone of a preset, with its weights.

    Raises:
        UserError: it is none, or neither BART nor T5.
    """
    backbone = from_preset(keras_nlp.models.Backbone, name)
    kinds = (keras_nlp.models.BartBackbone, keras_nlp.models.T5Backbone)
    if not isinstance(backbone, kinds):
        raise UserError(
            f"--model={name} is a {type(backbone).__name__}; those that can be used are "
            f"{' and '.join(kind.__name__ for kind in kinds)}."
        )
    return backbone


def seq2seq_of(backbone, dtype=None, dropout=None):
    """A `Seq2Seq` with a backbone's weights.

    BART's ids are permuted: of its padding 1, end of sentence 2 and start 0 ours are 0, 1 and 2.

    Args:
        dtype: Keras policy such as "mixed_bfloat16".
        dropout: another rate than the backbone's.
    """
    build = _bart if isinstance(backbone, keras_nlp.models.BartBackbone) else _t5
    return build(backbone, dtype, dropout)


def _sizes(backbone, dropout, **others):
    names = ("num_layers", "hidden_dim", "intermediate_dim", "num_heads", "dropout")
    settings = {**{name: getattr(backbone, name) for name in names}, **others}
    return settings if dropout is None else {**settings, "dropout": dropout}


def _bart(backbone, dtype, dropout):
    sizes = _sizes(backbone, dropout, max_positions=backbone.max_sequence_length)
    # Decoding starts from the end of sentence, which is 1 in our order.
    seq2seq = build_bart(backbone.vocabulary_size, sizes, sizes, dtype=dtype)
    table = backbone.token_embedding.get_weights()[0]
    order = np.array([1, 2, 0, *range(3, len(table))])
    seq2seq.embedding.set_weights([table[order]])
    for part in ("encoder", "decoder"):
        stack = getattr(seq2seq, part)
        for ours, theirs in (
            (stack.position_embedding, f"{part}_position_embedding"),
            (stack.embedding_norm, f"{part}_embeddings_layer_norm"),
        ):
            ours.set_weights(getattr(backbone, theirs).get_weights())
        _copy_layers(stack, getattr(backbone, f"{part}_transformer_layers"))
    return seq2seq


def _t5(backbone, dtype, dropout):
    sizes = _sizes(
        backbone,
        dropout,
        head_dim=backbone.key_value_dim or backbone.hidden_dim // backbone.num_heads,
        activation=_activation(backbone),
        gated=backbone.use_gated_activation,
        norm_epsilon=backbone.layer_norm_epsilon,
    )
    tied = backbone.tie_embedding_weights
    if tied and backbone.use_gated_activation:
        _logger.warning(
            "Warning: this preset takes its embedding for its softmax weights, as KerasHub does. "
            "T5 1.1 has weights of their own: --init_from reads them from Hugging Face's folder."
        )
    seq2seq = build_t5(backbone.vocabulary_size, sizes, sizes, dtype=dtype, tied=tied, divided=tied)
    seq2seq.embedding.set_weights(backbone.token_embedding.get_weights())
    for part in ("encoder", "decoder"):
        stack = getattr(seq2seq, part)
        norm = getattr(backbone, f"{part}_layer_norm")
        stack.final_norm.set_weights(norm.get_weights())
        _copy_layers(stack, getattr(backbone, f"{part}_transformer_layers"))
    return seq2seq


def _activation(backbone):
    """Its name; KerasHub's presets of Flan-T5 have a function, which no file of ours may hold."""
    activation = backbone.get_config()["activation"]
    if isinstance(activation, str):
        return activation
    if backbone.activation.__name__ != "gelu_approximate":
        raise UserError(f"{backbone.name}: its activation {activation} is not supported.")
    return "gelu_new"


def _copy_layers(stack, layers):
    for ours, theirs in zip(stack.hub_layers, layers, strict=True):
        ours.set_weights(theirs.get_weights())
