"""TeaForN: Teacher-Forcing with N-grams (Goodman, Ding and Soricut, EMNLP 2020) for Keras."""

from tf_teaforn.models.catalog import build_model, model_names
from tf_teaforn.models.decoder import Decoder
from tf_teaforn.models.seq2seq import Seq2Seq
from tf_teaforn.teaforn import TeaForN

__all__ = ["Decoder", "Seq2Seq", "TeaForN", "build_model", "model_names"]
