"""TeaForN: a stack of N decoders along a second time axis (paper, section 3).

`Seq2Seq` is the model one serves; `TeaForN` trains it and is left behind.
"""

import dataclasses
import sys
from typing import NamedTuple

import keras
from keras import ops

import tf_teaforn.models.architecture  # noqa: F401 (registers what a saved model consists of)
from tf_teaforn import objective
from tf_teaforn.config import TeaForNConfig, check
from tf_teaforn.errors import UserError, check_backend
from tf_teaforn.models.dropout import ShortSeeds
from tf_teaforn.models.recompute import recompute
from tf_teaforn.models.seq2seq import keep_frozen

check_backend(keras.backend.backend())
if keras.backend.backend() == "jax":
    from tf_teaforn.jax_backend.train_step import TrainStep
else:
    from tf_teaforn.tf_backend.train_step import TrainStep

# Constants of the compiled step.
_FIXED = ("n", "discount", "shared", "stage_input", "top_k", "word_drop", "label_smoothing")


class LossSums(NamedTuple):
    """Sums over one batch (of one replica); whoever knows the replicas divides.

    What is added to them is added to `TeaForN.no_sums` too, which parts of a batch start from.

    Attributes:
        total: float32 scalar, Σ λ^s times stage s's loss: what training lowers, and the only one
            with a gradient.
        stages: N float32 scalars, weighted cross-entropy of each stage, smoothing included.
        correct: float32 scalar, weight of the positions where stage 0's best token is right.
        tokens: float32 scalar, total weight of stage 0's targets.
    """

    total: object
    stages: tuple
    correct: object
    tokens: object


@keras.saving.register_keras_serializable("tf_teaforn")
class TeaForN(TrainStep, keras.Model):
    """Trains a `Seq2Seq` with N decoders; n = 1 or discount = 0 is teacher forcing.

    Its settings stay as they are: another λ is another `TeaForN` around the same `Seq2Seq`. The
    loss is its own too; a subclass changes it in `loss_sums`, or its weights in `stage_discounts`,
    and `add_loss` does not count.

    Decoder-s reads x_s^(t) = pos(t + s) + (E[y^(t-1)] for s = 0, o_{s-1}^(t) for s > 0) and
    predicts y^(t+s). Gradients flow through the whole stack. The logs are the weighted mean loss
    of each stage over stage 0's target tokens (`loss_0`, `loss_1`, …), `loss` = Σ λ^s loss_s,
    stage 0's `accuracy`, and `tokens`, the number of target tokens.

    Args:
        seq2seq: the model to train. Its decoder is Decoder-0.
        n: number of stages N, at least 1.
        discount: λ in [0, 1].
        shared: one decoder for all stages, or one each. Encoder and embedding are one always.
        stage_input: what Decoder-s, s > 0, reads: "hidden", the outputs of Decoder-(s-1)
            (paper, eq. 1), or "top_k", the expected embedding under its `top_k` best tokens
            (eq. 3).
        top_k: 1 to V, for stage_input="top_k".
        word_drop: probability with which a ground-truth input embedding is zeroed, its position
            signal kept (paper, section "Word drop regularization").
        label_smoothing: ε, at every stage.
        clone_init: for shared=False: decoders 1 to N-1 start as copies of Decoder-0 ("copy") or
            with random weights of their own ("independent").
        remat: what the backward pass computes again to save memory: nothing; encoder and stages,
            one after the other ("stage"); their layers, one after the other ("layer").
        micro_batch_tokens: padded tokens of the longer side, over all devices, that are computed
            at a time; an update sums its gradients over as many parts of its batch as that takes.
            None: the batch as a whole.

    Raises:
        UserError: a value out of its range, remat="layer" with a model that cannot, weights with a
            regularizer, which would not count, or a model that computes in float16.
    """

    def __init__(
        self,
        seq2seq,
        n=2,
        discount=0.4,
        shared=True,
        stage_input="hidden",
        top_k=None,
        word_drop=0.0,
        label_smoothing=0.1,
        clone_init="copy",
        remat="none",
        micro_batch_tokens=None,
        **kwargs,
    ):
        kwargs.setdefault("name", "teaforn")
        super().__init__(**kwargs)
        settings = {
            "n": n,
            "discount": discount,
            "shared": shared,
            "stage_input": stage_input,
            "top_k": top_k,
            "word_drop": word_drop,
            "label_smoothing": label_smoothing,
            "clone_init": clone_init,
            "remat": remat,
            "micro_batch_tokens": micro_batch_tokens,
        }
        check_settings(settings, seq2seq.vocabulary_size)
        self.seq2seq = seq2seq
        self.n = int(n)
        self.discount = discount
        self.shared = shared
        self.stage_input = stage_input
        self.top_k = top_k
        self.word_drop = word_drop
        self.label_smoothing = label_smoothing
        self.clone_init = clone_init
        self.remat = remat
        # NumPy's numbers would make tensors of sizes.
        self.micro_batch_tokens = micro_batch_tokens and int(micro_batch_tokens)
        self.clones = [] if shared else [self._clone(stage) for stage in range(1, n)]
        self.word_drop_seed = keras.random.SeedGenerator()
        self._trackers = {
            name: keras.metrics.Mean(name=name)
            for name in ("loss", *(f"loss_{stage}" for stage in range(n)), "accuracy")
        }
        self._trackers["tokens"] = keras.metrics.Sum(name="tokens")
        for layer in (seq2seq.encoder, *self.decoders):
            if remat == "layer" and not _knows_remat(layer):
                raise UserError("--remat=layer: not with this model. Write --remat=stage.")
        if any(layer.compute_dtype == "float16" for layer in seq2seq._flatten_layers()):
            raise UserError("float16: small gradients would be lost. Write mixed_bfloat16.")
        for variable in self.trainable_variables:
            if variable.regularizer is not None:
                raise UserError(
                    f"{variable.path} has a regularizer, which TeaForN's loss does not count. Give "
                    "the optimizer a weight_decay instead."
                )
        self.built = True

    def __setattr__(self, name, value):
        if name in _FIXED and name in self.__dict__:
            raise UserError(
                f"{name} is fixed when the model is made, as the compiled step has it: make "
                "another TeaForN around the same seq2seq, and compile that."
            )
        super().__setattr__(name, value)

    def _clone(self, stage):
        decoder = self.seq2seq.decoder
        clone = type(decoder).from_config({**decoder.get_config(), "name": f"decoder_{stage}"})
        clone.build(None)
        keep_frozen(clone)
        if self.clone_init == "copy":
            clone.set_weights(decoder.get_weights())
        return clone

    @property
    def decoders(self):
        """The N decoders in order of their stages."""
        decoder = self.seq2seq.decoder
        return [decoder] * self.n if self.shared else [decoder, *self.clones]

    def freeze(self, parts):
        """Keeps weights as they are; before `compile`, so that they get no optimizer state.

        Args:
            parts: some of "embedding", "encoder" and "decoder", which is that of every stage.
        """
        for part in parts:
            for layer in self.decoders if part == "decoder" else [getattr(self.seq2seq, part)]:
                layer.trainable = False

    def fit(self, x=None, y=None, *args, **kwargs):
        """As that of every Keras model, on arrays or a dataset.

        `sample_weight`, [B, T], has one weight for each target; without it padding weighs 0.

        Raises:
            UserError: an id in arrays is outside of the vocabulary, targets are missing, shapes do
                not agree, or there is a `class_weight`, or a loss or metrics from `compile`.
            tf.errors.InvalidArgumentError: an id in a `tf.data` dataset is outside of the
                vocabulary.
        """
        self._check_compiled()
        if kwargs.get("class_weight") is not None:
            raise UserError(
                "class_weight: tokens have no class weights. Give one weight for each target as "
                "sample_weight, [B, T]."
            )
        if "validation_data" in kwargs:
            kwargs["validation_data"] = self._checked(kwargs["validation_data"])
        return super().fit(self._checked(x, y), y, *args, **kwargs)

    def evaluate(self, x=None, y=None, *args, **kwargs):
        """As that of every Keras model; raises what `fit` raises."""
        self._check_compiled()
        return super().evaluate(self._checked(x, y), y, *args, **kwargs)

    def _check_compiled(self):
        """Refuses a loss and metrics given to `compile`, which would have no effect."""
        # Not what Keras made of them, which it keeps when a model is compiled again without.
        given = self._compile_config.config if self.compiled else {}
        if any(given.get(name) is not None for name in ("loss", "metrics", "weighted_metrics")):
            raise UserError(
                "compile: loss and metrics are TeaForN's own. Leave out loss, metrics and "
                "weighted_metrics; another loss overrides loss_sums."
            )
        self._compile_loss = self._compile_metrics = None

    def _checked(self, x, y=None):
        """`x`, whose ids are looked at: arrays' at once, a dataset's as it is read."""
        if isinstance(x, dict):
            ids = {name: value for name, value in x.items() if name.endswith("_token_ids")}
            self.seq2seq.check_ids(**ids, **({} if y is None else {"targets": y}))
        # Where nobody has imported TensorFlow there are no datasets of its either.
        elif sys.modules.get("tensorflow"):
            from tf_teaforn.tf_backend.ids import dataset_with_checks

            return dataset_with_checks(x, self.seq2seq.vocabulary_size)
        return x

    @property
    def metrics(self):
        own = list(self._trackers.values())
        # Those of a subclass. Keras' own mean of losses is of `compute_loss`, which is not used.
        known = {id(metric) for metric in (*own, self._loss_tracker)}
        return own + [metric for metric in self._metrics if id(metric) not in known]

    def hidden_states(self, inputs, training=False):
        """Outputs o_s of all stages: list of N tensors [B, T, D].

        Raises:
            UserError: as `Seq2Seq.check_ids`.

        Args:
            inputs: "encoder_token_ids" int32 [B, S] and "decoder_token_ids" int32 [B, T], the
                targets shifted right with the start id in front; for packed batches also
                "encoder_segment_ids", "encoder_positions", "decoder_segment_ids" and
                "decoder_positions".
        """
        seq2seq, decoders = self.seq2seq, self.decoders
        by_stage = training and self.remat == "stage"
        for layer in (seq2seq.encoder, *decoders):
            # Another TeaForN around them may have set it.
            if _knows_remat(layer):
                layer.remat_layers = self.remat == "layer"
        seq2seq.check_ids(decoder_token_ids=inputs["decoder_token_ids"])
        memory, mask = seq2seq.encode(inputs, training=training, remat=by_stage)
        x = self._drop_words(seq2seq.embed(inputs["decoder_token_ids"]), training)
        hidden_states, prepared = [], None
        for stage, decoder in enumerate(decoders):

            def run(x, prepared, stage=stage, decoder=decoder):
                x = self._stage_input(x) if stage else x
                return decoder(x, prepared, start_position=stage, training=training)

            if prepared is None or not self.shared:
                prepared = seq2seq.prepare(decoder, inputs, memory, mask)
            if by_stage:
                x = recompute([seq2seq.embedding, decoder], run, x, prepared)
            else:
                x = run(x, prepared)
            hidden_states.append(x)
        return hidden_states

    def _drop_words(self, x_BxTxD, training):
        if not training or not self.word_drop:
            return x_BxTxD
        shape = tuple(ops.shape(x_BxTxD)[:2]) + (1,)
        seed = ShortSeeds(self.word_drop_seed)
        keep = keras.random.uniform(shape, seed=seed) >= self.word_drop
        return x_BxTxD * ops.cast(keep, x_BxTxD.dtype)

    def _stage_input(self, hidden_BxTxD):
        if self.stage_input == "hidden":
            return hidden_BxTxD
        logits = self.seq2seq.logits(hidden_BxTxD)
        return self.seq2seq.embedding.expectation(logits, self.top_k)

    def call(self, inputs, training=False):
        """Logits of all stages: list of N float32 [B, T, V]. Stage s scores y^(t+s) at t.

        Takes the arguments and raises the errors of `hidden_states`.
        """
        return [self.seq2seq.logits(hidden) for hidden in self.hidden_states(inputs, training)]

    def stage_discounts(self):
        """What each stage's loss counts: N floats, or float32 scalars that the step computes.

        A subclass may let them change in training, by `self.optimizer.iterations` for instance.
        """
        return objective.discounts(self.n, self.discount)

    def loss_sums(self, inputs, targets, weights, training=False):
        """`LossSums` of one batch.

        Args:
            inputs: as in `hidden_states`.
            targets: int32 [B, T], end of sentence included, 0 on padding.
            weights: float32 [B, T], 0 on padding.
            training: with dropout, and with a gradient of `total`.
        """
        self.seq2seq.check_ids(targets=targets)
        targets = ops.cast(targets, "int32")
        hidden_BxNxTxD = ops.stack(self.hidden_states(inputs, training), axis=1)
        targets, stage_weights = objective.all_stage_targets(
            targets, weights, self.n, inputs.get("decoder_segment_ids")
        )
        discounts = ops.convert_to_tensor(self.stage_discounts(), "float32")
        coefficients = stage_weights * discounts[:, None]
        # All stages are rows of one loop: one body to compile, whatever N.
        total, losses, correct = objective.cross_entropy(
            ops.reshape(hidden_BxNxTxD, (-1, hidden_BxNxTxD.shape[-1])),
            self.seq2seq.embedding.table("float32"),
            ops.reshape(targets, (-1,)),
            ops.reshape(coefficients, (-1,)),
            self.label_smoothing,
            training,
            self.seq2seq.embedding.bias(),
        )
        stages = ops.sum(ops.reshape(losses, ops.shape(stage_weights)) * stage_weights, axis=(0, 2))
        correct = ops.reshape(correct, ops.shape(stage_weights))[:, 0]
        return LossSums(
            total, tuple(ops.unstack(stages, self.n)), ops.sum(correct * weights), ops.sum(weights)
        )

    def no_sums(self):
        """`LossSums` of nothing."""
        return LossSums(
            *keras.tree.map_structure(ops.convert_to_tensor, (0.0, (0.0,) * self.n, 0.0, 0.0))
        )

    def update_metrics(self, sums):
        """Adds a batch to the running means and returns the logs."""
        tokens = objective.divisor(sums.tokens)
        means = {f"loss_{stage}": total / tokens for stage, total in enumerate(sums.stages)}
        means["loss"] = sums.total / tokens
        means["accuracy"] = sums.correct / tokens
        for name, mean in means.items():
            self._trackers[name].update_state(mean, sample_weight=sums.tokens)
        self._trackers["tokens"].update_state(sums.tokens)
        return self.get_metrics_result()

    def compute_output_spec(self, inputs, training=False):
        # Keras tells outputs apart by their identity.
        return [self.seq2seq.compute_output_spec(inputs) for _ in range(self.n)]

    def get_config(self):
        return {
            **super().get_config(),
            "seq2seq": keras.saving.serialize_keras_object(self.seq2seq),
            **{
                field.name: getattr(self, field.name) for field in dataclasses.fields(TeaForNConfig)
            },
        }

    @classmethod
    def from_config(cls, config):
        seq2seq = keras.saving.deserialize_keras_object(config["seq2seq"])
        return cls(**{**config, "seq2seq": seq2seq})


def _knows_remat(layer):
    return getattr(layer, "remat_layers", None) is not None


def check_settings(settings, vocabulary_size):
    """Checks the method's settings.

    Args:
        settings: mapping from names of `TeaForNConfig`.
        vocabulary_size: V.

    Raises:
        UserError: one has another type or is out of its range, named as the flag is.
    """
    check(TeaForNConfig, settings)
    top_k = settings["top_k"]
    if settings["stage_input"] != "top_k":
        if top_k is not None:
            raise UserError(f"--top_k={top_k} has no effect: add --stage_input=top_k or drop it.")
    elif top_k is None or top_k > vocabulary_size:
        raise UserError(
            f"--top_k={top_k}: with --stage_input=top_k write a number from 1 to the vocabulary "
            f"size, {vocabulary_size}."
        )
