"""SavedModel of Decoder-0 for TF Serving: strings in, strings out."""

import json
import math
import secrets
import time

import keras
import tensorflow as tf
from etils import epath
from tensorflow_serving.apis import prediction_log_pb2

from tf_teaforn.data.tokenizer import EOS_ID, NEWLINE_PIECE, PAD_ID
from tf_teaforn.errors import UserError
from tf_teaforn.paths import flush_folder, move_folder
from tf_teaforn.tf_backend import inference
from tf_teaforn.tf_backend.ids import checked

# What Python's str.strip takes off, or a newline as files have it.
_BLANK = rf"(?:[\t-\r\x1c-\x20\x{{85}}\pZ]|{NEWLINE_PIECE})*"

# oneDNN keeps what it prepares for each shape of a matrix product: a server's memory grows with the
# number of different lengths.
_LENGTH_STEP = 8


class ServingModule(tf.Module):
    """Tokenizer, weights and search behind the signatures of the SavedModel.

    "<n>" is a newline in texts that come in; those that go out have newlines.

    Signatures:
        serving_default: `inputs` string [B] -> `outputs` string, `scores` float32; [B], or with
            n_best > 1 [B, n_best]. A score is the natural-log sum over the output's tokens,
            end-of-sentence included; where fewer than n_best were found, the rest have no text and
            the lowest float32.
        token_ids: `inputs` int32 [B, S] ended in end-of-sentence; what comes after it does not
            count -> `outputs` int32 [B, T] or [B, n_best, T], `scores`.
        With static_shape = (B, S), of these shapes alone and their search compiled by XLA:
            `static`, like serving_default, and `static_token_ids`, like token_ids.
        With mode="score" serving_default alone: `inputs`, `targets` string [B] -> `scores`
            float32 [B].

    Args:
        seq2seq: the model; nothing else of training is exported. Its recurrent layers do without
            cuDNN from then on.
        tokenizer: `Tokenizer`.
        config: `SearchConfig`.
        max_source_length, max_target_length: longer texts are cut before end-of-sentence.
        static_shape: (B, S), or None.
        weights_dtype: type that weights are stored in, of `WEIGHTS_DTYPES`; every call converts
            them to their own.
    """

    def __init__(
        self,
        seq2seq,
        tokenizer,
        config,
        max_source_length,
        max_target_length,
        static_shape=None,
        weights_dtype="float32",
    ):
        super().__init__()
        self.tokenizer = tokenizer
        # Keras' variables are tracked by tf.Module only when they are handed over themselves.
        self.weights = [
            variable.value
            if weights_dtype == variable.dtype
            else tf.Variable(tf.cast(variable.value, weights_dtype), name=variable.path)
            for variable in seq2seq.weights
        ]
        for layer in seq2seq._flatten_layers():
            if hasattr(layer, "use_cudnn"):
                # Chosen where the graph is made, it could not be served by a CPU.
                layer.use_cudnn = False
        self._seq2seq = _Untracked(seq2seq)
        self._config = config
        self._max_source_length = max_source_length
        self._max_target_length = max_target_length
        self._static_shape = static_shape

    def _stored_weights(self):
        """Within it, the model computes with the variables of the SavedModel."""
        variables = self._seq2seq.value.weights
        return keras.StatelessScope(
            [
                (variable, tf.cast(stored, variable.dtype))
                for variable, stored in zip(variables, self.weights, strict=True)
            ]
        )

    def _search(self, source_ids):
        inputs = {"encoder_token_ids": source_ids}
        with self._stored_weights():
            return inference.search(self._seq2seq.value, inputs, self._config)

    def signatures(self, mode):
        """{name: `tf.function`} of a mode; a SavedModel holds no other functions."""

        def texts(batch=None, name="inputs"):
            return tf.TensorSpec([batch], tf.string, name=name)

        def ids(batch=None, length=None):
            return tf.TensorSpec([batch, length], tf.int32, name="inputs")

        if mode == "score":
            specification = [texts(), texts(name="targets")]
            return {"serving_default": tf.function(self._score, input_signature=specification)}
        signatures = {
            "serving_default": tf.function(self._predict, input_signature=[texts()]),
            "token_ids": tf.function(self._predict_ids, input_signature=[ids()]),
        }
        if self._static_shape:
            batch, length = self._static_shape
            compiled = tf.function(
                self._search, input_signature=[ids(batch, length)], jit_compile=True
            )
            signatures["static"] = tf.function(
                lambda inputs: self._predict(inputs, compiled, length),
                input_signature=[texts(batch)],
            )
            signatures["static_token_ids"] = tf.function(
                lambda inputs: self._predict_ids(inputs, compiled),
                input_signature=[ids(batch, length)],
            )
        return signatures

    def _predict(self, inputs, search=None, length=None):
        max_length = min(self._max_source_length, length or math.inf)
        ids = self.tokenizer.encode(_with_newlines(inputs), max_length)
        if length:
            ids = tf.ensure_shape(_padded(ids, length), [inputs.shape[0], length])
        else:
            ids = _rounded_up(ids, self._max_source_length)
        found = (search or self._search)(ids)
        shape = tf.shape(found.token_ids)
        ids = tf.reshape(found.token_ids, [shape[0] * shape[1], shape[2]])
        outputs = tf.reshape(self.tokenizer.targets.detokenize(ids), shape[:2])
        # As in bin/decode: a blank line stays one.
        blank = tf.strings.regex_full_match(inputs, _BLANK)[:, None]
        outputs = tf.where(blank, "", outputs)
        return self._ranked(outputs, tf.where(blank, 0.0, found.scores))

    def _predict_ids(self, inputs, search=None):
        inputs = checked(inputs, self._seq2seq.value.vocabulary_size, "inputs")
        # TF Serving fills up what it batches with the first id of all.
        is_end = tf.cast(inputs == EOS_ID, tf.int32)
        ended = tf.cumsum(is_end, axis=1, exclusive=True) > 0
        inputs = tf.where(ended, PAD_ID, inputs)
        found = (search or self._search)(inputs)
        return self._ranked(found.token_ids, found.scores)

    def _score(self, inputs, targets):
        source_ids, target_ids = (
            _rounded_up(tokenizer.encode(_with_newlines(texts), max_length), max_length)
            for tokenizer, texts, max_length in (
                (self.tokenizer, inputs, self._max_source_length),
                (self.tokenizer.targets, targets, self._max_target_length),
            )
        )
        inputs = {"encoder_token_ids": source_ids}
        with self._stored_weights():
            return {"scores": inference.score(self._seq2seq.value, inputs, target_ids)}

    def _ranked(self, outputs, scores):
        # Fewer than n may have ended. JSON has no infinity.
        scores = tf.maximum(scores, scores.dtype.min)
        if self._config.n_best == 1:
            outputs, scores = outputs[:, 0], scores[:, 0]
        return {"outputs": outputs, "scores": scores}


def _with_newlines(texts):
    """Not every vocabulary takes "<n>" for a newline."""
    return tf.strings.regex_replace(texts, NEWLINE_PIECE, "\n")


def _padded(ids, length):
    return tf.pad(ids, [[0, 0], [0, length - tf.shape(ids)[1]]])


def _rounded_up(ids, max_length):
    """Pads to a multiple of `_LENGTH_STEP`, at most to `max_length`."""
    # A batch without any text has length 0, which recurrent layers refuse.
    steps = tf.maximum(1, -(-tf.shape(ids)[1] // _LENGTH_STEP))
    return _padded(ids, tf.minimum(steps * _LENGTH_STEP, max_length))


class _Untracked:
    """Hides a Keras model from tf.Module, which would save all it finds in it."""

    def __init__(self, value):
        self.value = value


MODES = ("predict", "score")
WEIGHTS_DTYPES = ("float32", "bfloat16")


def write_saved_model(module, export_dir, details, examples, mode):
    """Saves a `ServingModule` as `<export_dir>/<version>`, whole or not at all.

    Args:
        module: `ServingModule`.
        export_dir: folder of all versions.
        details: what `assets.extra/decode.json` shall say.
        examples: {"sources": list of str, "targets": list of str}, of which
            `assets.extra/tf_serving_warmup_requests` makes one request.
        mode: "predict" or "score".

    Returns:
        The new folder. The version is the time in seconds, raised where it exists.

    Raises:
        UserError: TensorFlow cannot write there; no version is left of it.
        OSError: it cannot be written otherwise; no version is left of it either.
    """
    export_dir = epath.Path(export_dir)
    export_dir.mkdir(parents=True, exist_ok=True)
    # Of its own: several exports may be writing into this folder.
    temporary = export_dir / f"{secrets.token_hex(8)}.tmp"
    try:
        tf.saved_model.save(module, str(temporary), signatures=module.signatures(mode))
        extra = temporary / "assets.extra"
        extra.mkdir()
        (extra / "decode.json").write_text(json.dumps(details, indent=2) + "\n")
        inputs = {"inputs": examples["sources"]}
        if mode == "score":
            inputs["targets"] = examples["targets"]
        _write_warmup_request(extra / "tf_serving_warmup_requests", inputs)
        flush_folder(temporary)
        return _as_version(temporary, export_dir)
    except tf.errors.OpError as error:
        raise UserError(
            f"--export_dir={export_dir}: cannot write there: {error.message}"
        ) from error
    finally:
        if temporary.exists():
            temporary.rmtree()


def _as_version(temporary, export_dir):
    """Renames a folder to the next version and returns it."""
    while True:
        versions = [int(path.name) for path in export_dir.iterdir() if path.name.isdigit()]
        version = max([int(time.time()), *(number + 1 for number in versions)])
        folder = export_dir / str(version)
        try:
            move_folder(temporary, folder, "saved_model.pb")
        except OSError:
            # Another export may have taken the number meanwhile.
            if not folder.exists():
                raise
        else:
            return folder


def _write_warmup_request(path, inputs):
    """Writes a PredictionLog record, as TF Serving's SavedModel warm-up reads it.

    A server that cannot answer it does not load the version. Hence one text, as a larger request
    may not fit the server's `max_batch_size`, and none for the signature `static`: servers have XLA
    switched off unless told otherwise (`--xla_cpu_compilation_enabled`).
    """
    log = prediction_log_pb2.PredictionLog()
    request = log.predict_log.request
    request.model_spec.signature_name = "serving_default"
    for name, texts in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(texts[:1], tf.string))
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(log.SerializeToString())
