"""Weights of our Transformer under the names that others keep them by."""

from tf_teaforn.errors import UserError
from tf_teaforn.models.embedding import TokenEmbedding
from tf_teaforn.models.seq2seq import Seq2Seq
from tf_teaforn.models.transformer import TransformerDecoder, TransformerEncoder
from tf_teaforn.pretrained.tensors import Source

# Hugging Face's names for Keras' activations.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}


def build_transformer(
    vocabulary_size, encoder, decoder, *, dtype, scaled, logits_bias=False, zero_row=True
):
    """A `Seq2Seq` of our layers; `encoder` and `decoder` are the settings of each.

    Raises:
        UserError: sizes that do not go together, or values that are none.
    """
    try:
        return Seq2Seq(
            TokenEmbedding(
                vocabulary_size,
                encoder["hidden_dim"],
                scaled=scaled,
                logits_bias=logits_bias,
                zero_row=zero_row,
                dtype=dtype,
                name="embedding",
            ),
            TransformerEncoder(**encoder, dtype=dtype, name="encoder"),
            TransformerDecoder(**decoder, dtype=dtype, name="decoder"),
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"The pretrained model's settings cannot be used: {error}") from error


def layer_variables(seq2seq):
    """Weights of encoder and decoder: {(part, layer, sublayer, piece, parameter): variable}.

    `part` is "encoder" or "decoder"; `layer` its number, or None for the last norm; `sublayer`
    "self_attention", "cross_attention" or "feed_forward"; `piece` "norm" or one of "query", "key",
    "value", "output", "inner", "outer"; `parameter` "kernel", "bias", "gamma" or "beta".
    """
    variables = {}

    def add(part, number, sublayer, piece, layer):
        for variable in layer.weights:
            variables[part, number, sublayer, piece, variable.name] = variable

    for part in ("encoder", "decoder"):
        stack = getattr(seq2seq, part)
        for number, block in enumerate(stack.blocks):
            pairs = zip(block[::2], block[1::2], strict=True)
            for sublayer, (layer, residual) in zip(stack.sublayers, pairs, strict=True):
                add(part, number, sublayer, "norm", residual.layer_norm)
                pieces = (
                    {"inner": layer.inner, "outer": layer.outer}
                    if sublayer == "feed_forward"
                    else {
                        "query": layer.query,
                        "key": layer.key,
                        "value": layer.value,
                        "output": layer.output_projection,
                    }
                )
                for piece, dense in pieces.items():
                    add(part, number, sublayer, piece, dense)
        if stack.final_norm is not None:
            add(part, None, None, "norm", stack.final_norm)
    return variables


def hugging_face_source(part, layer, sublayer, piece, parameter):
    """`Source` of a key of `layer_variables` in a model of BART's layout: PEGASUS, Marian."""
    parameter = {"gamma": "weight", "beta": "bias", "kernel": "weight"}.get(parameter, parameter)
    if layer is None:
        return Source(f"model.{part}.layer_norm.{parameter}")
    attention = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}.get(sublayer)
    if piece == "norm":
        name = f"{attention or 'final'}_layer_norm"
    elif attention:
        short = {"query": "q", "key": "k", "value": "v", "output": "out"}[piece]
        name = f"{attention}.{short}_proj"
    else:
        name = {"inner": "fc1", "outer": "fc2"}[piece]
    transpose = piece != "norm" and parameter == "weight"
    return Source(f"model.{part}.layers.{layer}.{name}.{parameter}", transpose=transpose)


def hugging_face_sizes(settings, part, origin):
    """Settings of our encoder or decoder from a config.json of BART's layout.

    Raises:
        UserError: a size is missing, or the activation is none of ours.
    """
    activation = settings.get("activation_function", "gelu")
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"{origin}: activation_function {activation!r} is none of {', '.join(_ACTIVATIONS)}."
        )
    if not settings.get("tie_word_embeddings", True):
        raise UserError(
            f"{origin}: models whose output is not tied to the embedding cannot be read."
        )
    names = {
        "num_layers": f"{part}_layers",
        "hidden_dim": "d_model",
        "intermediate_dim": f"{part}_ffn_dim",
        "num_heads": f"{part}_attention_heads",
    }
    missing = [name for name in names.values() if not isinstance(settings.get(name), int)]
    if missing:
        raise UserError(f"{origin} has no {', '.join(missing)}.")
    return {
        **{ours: settings[theirs] for ours, theirs in names.items()},
        "dropout": settings.get("dropout", 0.1),
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "activation_dropout": settings.get("activation_dropout", 0.0),
        "activation": _ACTIVATIONS[activation],
        "attention_bias": True,
        "norm_epsilon": 1e-5,
    }
