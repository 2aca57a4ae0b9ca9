"""T5 and T5 1.1 as Hugging Face keeps them: config.json, model.safetensors, spiece.model."""

from tf_teaforn.data.t5_tokenizer import SENTENCEPIECE_FILE, T5Tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import with_dropout
from tf_teaforn.models.hub import build_t5
from tf_teaforn.pretrained.importer import (
    HuggingFaceFolder,
    naming,
    read_files,
    refuse_added_tokens,
)
from tf_teaforn.pretrained.tensors import Source, assign, check_sizes, open_safetensors, with_tied

_EMBEDDING = "shared.weight"
_OUTPUT = "lm_head.weight"
# Other names of the one table, which files have besides or instead.
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_IGNORED = (
    *_COPIES,
    _OUTPUT,
    # Of no effect, and only in older files.
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
# What KerasHub's layers compute.
_FIXED = {
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
# feed_forward_proj -> activation, gated.
_FEED_FORWARD = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_new", True),
    "gated-silu": ("silu", True),
}


class T5(HuggingFaceFolder):
    """The layers of KerasHub's backbone."""

    model = "t5"
    types = ("t5", "mt5")

    def __init__(self, folder):
        super().__init__(folder)
        settings, origin = self._settings, self._origin
        for name, value in _FIXED.items():
            if settings.get(name, value) != value:
                raise UserError(f"{origin}: {name} must be {value}, not {settings[name]}.")
        projection = settings.get("feed_forward_proj", "relu")
        if projection not in _FEED_FORWARD:
            raise UserError(
                f"{origin}: feed_forward_proj {projection!r} is none of {', '.join(_FEED_FORWARD)}."
            )
        activation, gated = _FEED_FORWARD[projection]
        try:
            sizes = {
                "num_layers": settings["num_layers"],
                "hidden_dim": settings["d_model"],
                "intermediate_dim": settings["d_ff"],
                "num_heads": settings["num_heads"],
                "head_dim": settings["d_kv"],
                "dropout": settings.get("dropout_rate", 0.1),
                "activation": activation,
                "gated": gated,
                "norm_epsilon": settings.get("layer_norm_epsilon", 1e-6),
            }
            vocabulary_size = settings["vocab_size"]
        except KeyError as error:
            raise UserError(f"{origin} has no {error.args[0]}.") from None
        layers = settings.get("num_decoder_layers") or sizes["num_layers"]
        self._parts = {"encoder": sizes, "decoder": {**sizes, "num_layers": layers}}
        files = read_files(folder, SENTENCEPIECE_FILE)
        with naming(folder / SENTENCEPIECE_FILE):
            self.tokenizer = T5Tokenizer(files, vocabulary_size)
        refuse_added_tokens(folder, self.tokenizer.end)

    def build(self, dtype=None, dropout=None):
        tensors = open_safetensors(self._folder)
        tensors = with_tied(tensors, _EMBEDDING, _COPIES)
        if _EMBEDDING not in tensors.shapes and self._settings.get("tie_word_embeddings", True):
            tensors = with_tied(tensors, _EMBEDDING, [_OUTPUT])
        tied = _OUTPUT not in tensors.shapes or (
            _EMBEDDING in tensors.shapes and tensors.equal(_OUTPUT, _EMBEDDING)
        )
        check_sizes(tensors, self.tokenizer.vocabulary_size, *self._parts.values())
        encoder, decoder = (with_dropout(part, dropout) for part in self._parts.values())
        settings = self._settings
        seq2seq = build_t5(
            self.tokenizer.vocabulary_size,
            encoder,
            decoder,
            dtype=dtype,
            tied=tied,
            # mT5 never divides, tied or not. Older files do not say so of 1.1, but that it is not
            # tied.
            divided=settings["model_type"] != "mt5"
            and settings.get("scale_decoder_outputs", settings.get("tie_word_embeddings", True)),
        )
        variables = {variable.path: variable for variable in seq2seq.weights}
        sources = dict(_sources(seq2seq))
        assign(variables, sources, tensors, ignored=_IGNORED)
        return seq2seq


def _sources(seq2seq):
    """(path, `Source`) of every weight."""
    yield seq2seq.embedding.embeddings.path, Source(_EMBEDDING)
    if not seq2seq.embedding.tie_weights:
        yield seq2seq.embedding.reverse_embeddings.path, Source(_OUTPUT, transpose=True)
    for part in ("encoder", "decoder"):
        stack = getattr(seq2seq, part)
        yield stack.final_norm.weight.path, Source(f"{part}.final_layer_norm.weight")
        for number, layer in enumerate(stack.hub_layers):
            attentions = [("SelfAttention", layer.self_attention, layer.self_attention_layer_norm)]
            if stack.is_decoder:
                attentions.append(
                    ("EncDecAttention", layer.cross_attention, layer.cross_attention_layer_norm)
                )
            for place, (name, attention, norm) in enumerate(attentions):
                prefix = f"{part}.block.{number}.layer.{place}"
                yield norm.weight.path, Source(f"{prefix}.layer_norm.weight")
                for piece in ("query", "key", "value", "output"):
                    kernel = getattr(attention, f"{piece}_projector").kernel
                    letter = "o" if piece == "output" else piece[0]
                    yield kernel.path, Source(f"{prefix}.{name}.{letter}.weight", transpose=True)
                if attention.use_relative_attention_bias:
                    table = f"{prefix}.{name}.relative_attention_bias.weight"
                    yield attention.relative_attention_bias.path, Source(table)
            prefix = f"{part}.block.{number}.layer.{len(attentions)}"
            yield layer.layer_norm.weight.path, Source(f"{prefix}.layer_norm.weight")
            projectors = {"wo": layer.output_projector}
            if layer.use_gated_activation:
                projectors |= {"wi_0": layer.input_projector, "wi_1": layer.gate_projector}
            else:
                projectors["wi"] = layer.input_projector
            for name, dense in projectors.items():
                source = Source(f"{prefix}.DenseReluDense.{name}.weight", transpose=True)
                yield dense.kernel.path, source
