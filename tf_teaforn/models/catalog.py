"""Models by name."""

import keras

from tf_teaforn.errors import UserError
from tf_teaforn.models import presets
from tf_teaforn.models.architecture import with_dropout
from tf_teaforn.models.embedding import TokenEmbedding
from tf_teaforn.models.rnn import RnnDecoder, RnnEncoder
from tf_teaforn.models.seq2seq import Seq2Seq
from tf_teaforn.models.transformer import TransformerDecoder, TransformerEncoder


def _model(encoder, decoder, vocabulary_size, dtype=None, scaled_embedding=True, **settings):
    policy = keras.dtype_policies.get(dtype) if dtype else None
    return Seq2Seq(
        TokenEmbedding(
            vocabulary_size,
            settings["hidden_dim"],
            scaled=scaled_embedding,
            dtype=policy,
            name="embedding",
        ),
        encoder(**settings, dtype=policy, name="encoder"),
        decoder(**settings, dtype=policy, name="decoder"),
    )


def _sizes(num_layers, hidden_dim, intermediate_dim, num_heads, dropout):
    return {
        "num_layers": num_layers,
        "hidden_dim": hidden_dim,
        "intermediate_dim": intermediate_dim,
        "num_heads": num_heads,
        "dropout": dropout,
    }


# base and big: paper, Table 2. big_enfr: dropout .1 as in Vaswani et al. 2017, section 6.1.
# multi30k: the size usual on that data set, for example in Wu et al. 2021, "Good for Misconceived
# Reasons".
# pegasus_large: Zhang et al. 2020, section 6.1, as google-research/pegasus builds it, which draws
# one dropout mask for all positions, though, where each has its own here; its vocabulary has 96,103
# subwords.
_TRANSFORMERS = {
    "transformer_tiny": _sizes(2, 128, 512, 4, 0.1),
    "transformer_small": _sizes(3, 256, 1024, 4, 0.1),
    "transformer_multi30k": _sizes(4, 128, 256, 4, 0.3),
    "transformer_base": _sizes(6, 512, 2048, 8, 0.1),
    "transformer_big": _sizes(6, 1024, 4096, 16, 0.3),
    "transformer_big_enfr": _sizes(6, 1024, 4096, 16, 0.1),
    "pegasus_large": {
        **_sizes(16, 1024, 4096, 16, 0.1),
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "norm_epsilon": 1e-12,
        "position_signal": "tensor2tensor",
    },
}
_RNNS = {
    "rnn_base": {"num_layers": 2, "hidden_dim": 512, "cell": "lstm", "dropout": 0.2},
}
# Name -> encoder, decoder, settings that both classes take.
_MODELS = {
    **{name: (TransformerEncoder, TransformerDecoder, s) for name, s in _TRANSFORMERS.items()},
    **{name: (RnnEncoder, RnnDecoder, s) for name, s in _RNNS.items()},
}


def model_names():
    """Names that `build_model` knows."""
    return tuple(_MODELS)


def build_model(name, vocabulary_size, **overrides):
    """Builds a randomly initialised `Seq2Seq`, or that of a preset of KerasHub with its weights.

    Args:
        name: one of `model_names()`, or keras_nlp:<preset>.
        vocabulary_size: V, with id 0 for padding and start, 1 for end of sentence. None: the
            preset's.
        **overrides: settings that differ from the named model's: num_layers, hidden_dim,
            intermediate_dim, num_heads, norm and the other arguments of `TransformerEncoder`, or
            those of `RnnEncoder`; dropout, see `with_dropout`; dtype, a Keras policy such as
            "mixed_bfloat16". For a preset dropout and dtype alone.

    Raises:
        UserError: unknown name or setting.
    """
    if name.startswith(presets.PREFIX):
        return _preset(name, vocabulary_size, **overrides)
    if name not in _MODELS:
        raise UserError(
            f"Unknown model {name!r}. Write one of: {', '.join(model_names())}; or "
            f"{presets.PREFIX}<preset>, a BART or T5 of KerasHub."
        )
    encoder, decoder, settings = _MODELS[name]
    settings = with_dropout(settings, overrides.pop("dropout", None))
    try:
        return _model(encoder, decoder, vocabulary_size, **{**settings, **overrides})
    except (TypeError, ValueError) as error:
        raise UserError(f"Model {name} cannot be built: {error}") from error


def _preset(name, vocabulary_size, dtype=None, dropout=None, **others):
    if others:
        raise UserError(f"Model {name} has its sizes: {', '.join(others)} cannot be set.")
    backbone = presets.load_backbone(name)
    if vocabulary_size not in (None, backbone.vocabulary_size):
        raise UserError(
            f"Model {name} has {backbone.vocabulary_size} tokens, not {vocabulary_size}."
        )
    return presets.seq2seq_of(backbone, dtype, dropout)
