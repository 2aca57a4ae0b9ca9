"""PEGASUS as google-research/pegasus keeps it: TensorFlow checkpoint and SentencePiece model."""

import re

from tf_teaforn.data.pegasus_tokenizer import SENTENCEPIECE_FILE, PegasusTokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.models.architecture import with_dropout
from tf_teaforn.paths import matching
from tf_teaforn.pretrained.importer import Pretrained, naming
from tf_teaforn.pretrained.tensors import Source, TensorFile, assign, check_sizes
from tf_teaforn.pretrained.transformer import build_transformer, layer_variables
from tf_teaforn.tf_backend.tensor_bundle import open_checkpoint

_EMBEDDING = "embeddings/weights"
# The checkpoint does not say; all of Google's models have heads of this width.
_HEAD_WIDTH = 64
_RATE = 0.1


class GooglePegasus(Pretrained):
    """Pre-norm, attention without biases, Tensor2Tensor's sinusoids.

    The newest `model.ckpt-<step>` of the folder is read. The vocabulary is the one `.model` file
    there or in the folder above.
    """

    model = "pegasus"

    @classmethod
    def recognizes(cls, folder):
        return bool(_steps(folder))

    def __init__(self, folder):
        step = max(_steps(folder))
        shapes, read = open_checkpoint(folder / f"model.ckpt-{step}")
        # The rest is the optimizer's.
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if "Adafactor" not in name and name != "global_step"
        }
        self._tensors = TensorFile(f"{folder}/model.ckpt-{step}", shapes, read)
        if _EMBEDDING not in shapes:
            raise UserError(
                f"{self._tensors.origin} has no {_EMBEDDING}: it is no checkpoint of PEGASUS."
            )
        vocabulary_size, _ = shapes[_EMBEDDING]
        found = matching(folder, "*.model") or matching(folder.parent, "*.model")
        if len(found) != 1:
            names = ", ".join(sorted(path.name for path in found)) or "none"
            raise UserError(
                f"{folder}: copy the SentencePiece model, one .model file, there; found: {names}."
            )
        with naming(found[0]):
            self.tokenizer = PegasusTokenizer(
                {SENTENCEPIECE_FILE: found[0].read_bytes()}, vocabulary_size=vocabulary_size
            )

    def _settings(self, part):
        shapes = self._tensors.shapes
        layers = [re.match(rf"{part}/layer_(\d+)/", name) for name in shapes]
        width = shapes[_EMBEDDING][1]
        # The name of a missing kernel is reported when the weights are assigned.
        inner = shapes.get(f"{part}/layer_0/ffn/dense/kernel", (width, 4 * width))[1]
        return {
            "num_layers": 1 + max((int(layer[1]) for layer in layers if layer), default=0),
            "hidden_dim": width,
            "intermediate_dim": inner,
            "num_heads": max(1, width // _HEAD_WIDTH),
            "dropout": _RATE,
            "attention_dropout": _RATE,
            "activation_dropout": _RATE,
            # tf.contrib.layers.layer_norm in float32.
            "norm_epsilon": 1e-12,
            "position_signal": "tensor2tensor",
        }

    def build(self, dtype=None, dropout=None):
        parts = [self._settings(part) for part in ("encoder", "decoder")]
        check_sizes(self._tensors, self.tokenizer.vocabulary_size, *parts)
        encoder, decoder = (with_dropout(part, dropout) for part in parts)
        seq2seq = build_transformer(
            self.tokenizer.vocabulary_size, encoder, decoder, dtype=dtype, scaled=True
        )
        variables = layer_variables(seq2seq)
        sources = {key: Source(google_name(*key)) for key in variables}
        variables["embedding"] = seq2seq.embedding.embeddings
        sources["embedding"] = Source(_EMBEDDING)
        # Row 0 is not zero there: it counts in the softmax, while texts and decoding see zeros.
        assign(variables, sources, self._tensors)
        return seq2seq


def google_name(part, layer, sublayer, piece, parameter):
    """The variable of a key of `layer_variables`."""
    if layer is None:
        return f"{part}/LayerNorm/{parameter}"
    scope = {"cross_attention": "memory_attention", "feed_forward": "ffn"}.get(sublayer, sublayer)
    name = {
        "norm": "LayerNorm",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "output_proj",
        "inner": "dense",
        "outer": "dense_1",
    }[piece]
    return f"{part}/layer_{layer}/{scope}/{name}/{parameter}"


def _steps(folder):
    names = (re.fullmatch(r"model\.ckpt-(\d+)\.index", path.name) for path in folder.iterdir())
    return [int(name[1]) for name in names if name]
