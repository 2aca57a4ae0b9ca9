"""Optimizers and learning-rate schedules by name."""

import keras
from keras import ops

from tf_teaforn.errors import UserError

if keras.backend.backend() == "tensorflow":
    from tf_teaforn.tf_backend.adam import Adam
else:

    @keras.saving.register_keras_serializable("tf_teaforn")
    class Adam(keras.optimizers.Adam):
        """Keras', by the name that it has in a model saved under TensorFlow."""


@keras.saving.register_keras_serializable("tf_teaforn")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), but of biases and norms.

    An update takes `weight_decay` times the learning rate times the weight off the weight.
    """

    def build(self, variables):
        if not self.built:
            kept = [variable for variable in variables if not _decays(variable)]
            self.exclude_from_weight_decay(kept)
        super().build(variables)


def _decays(variable):
    # Some biases of KerasHub's attention are matrices; that of T5's distances has another name.
    bias = variable.path.endswith(("bias", "self_attention/embeddings"))
    return len(variable.shape) > 1 and not bias


@keras.saving.register_keras_serializable("tf_teaforn")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `peak` over `warmup_steps`, then the decay called `name`.

    "inverse_sqrt": peak · sqrt(warmup / step) (Vaswani et al. 2017, section 5.3); "linear": to 0
    at `train_steps`; "constant": peak.
    """

    def __init__(self, name, peak, warmup_steps, train_steps):
        self.name = name
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.train_steps = train_steps

    def __call__(self, step):
        # The first update has step 0.
        step = ops.cast(step, "float32") + 1.0
        warmup = float(max(self.warmup_steps, 1))
        if self.name == "inverse_sqrt":
            decay = ops.sqrt(warmup / ops.maximum(step, warmup))
        elif self.name == "linear":
            left = (self.train_steps + 1.0 - step) / max(self.train_steps + 1.0 - warmup, 1.0)
            decay = ops.clip(left, 0.0, 1.0)
        else:
            decay = 1.0
        return self.peak * ops.minimum(step / warmup, 1.0) * decay

    def get_config(self):
        return {
            "name": self.name,
            "peak": self.peak,
            "warmup_steps": self.warmup_steps,
            "train_steps": self.train_steps,
        }


@keras.saving.register_keras_serializable("tf_teaforn")
class Adafactor(keras.optimizers.Adafactor):
    """Adafactor (Shazeer and Stern 2018) in the memory that the method is known for.

    Keras', which this has the variables of, keeps the second moments of a matrix twice: factored,
    and multiplied out, which takes as much memory as the weights and is never read by the next
    step. It also holds the learning rate below 1 / sqrt(step); here, as in Tensor2Tensor and
    PEGASUS, a given rate is the rate, times the scale of the parameters.
    """

    def add_variable_from_reference(self, reference_variable, name=None, **kwargs):
        if name == "velocity" and len(reference_variable.shape) >= 2:
            return None
        return super().add_variable_from_reference(reference_variable, name=name, **kwargs)

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        step = ops.cast(self.iterations + 1, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        rate = rate * ops.maximum(self.epsilon_2, self._rms(variable))
        decay = 1 - ops.power(step, self.beta_2_decay)
        gradient = ops.cast(gradient, variable.dtype)
        squares = ops.square(gradient) + self.epsilon_1

        def moved(moments, values):
            new = decay * moments + (1 - decay) * values
            self.assign(moments, new)
            return new

        if len(variable.shape) < 2:
            update = gradient * ops.rsqrt(moved(self._v[index], squares))
        else:
            rows = moved(self._r[index], ops.mean(squares, axis=-1))
            columns = moved(self._c[index], ops.mean(squares, axis=-2))
            # Multiplied before the root, factors of a row without a gradient, such as the embedding
            # of padding, become 0 in float32, and the update no number.
            mean = ops.sqrt(ops.mean(rows, axis=-1, keepdims=True))
            update = gradient * (mean * ops.rsqrt(rows))[..., None]
            update = update * ops.rsqrt(columns)[..., None, :]
        update = update / ops.maximum(1.0, self._rms(update) / self.clip_threshold)
        self.assign_sub(variable, rate * update)


def check_settings(training):
    """Raises `UserError` for settings of a `TrainingConfig` that no optimizer has together."""
    if training.weight_decay and training.optimizer != "adam":
        raise UserError(
            f"--weight_decay={training.weight_decay} is for --optimizer=adam, not for "
            f"{training.optimizer}. Leave it out, or write --optimizer=adam."
        )


def build_optimizer(training):
    """Builds the optimizer of a `TrainingConfig`.

    Adam has β1 = .9, β2 = .998, ε = 1e-9 (OpenNMT-tf's Transformer; Tensor2Tensor: .997).
    Adafactor has PEGASUS' settings: no momentum, decay 1 - t^-0.8, clipping at 1, updates scaled
    by the parameters' scale.

    Raises:
        UserError: see `check_settings`.
    """
    check_settings(training)
    schedule = WarmupSchedule(
        training.schedule, training.learning_rate, training.warmup_steps, training.train_steps
    )
    # Its variables are found in a checkpoint by this name. Keras would number the optimizers of a
    # process.
    settings = {"name": training.optimizer, "global_clipnorm": training.clip_norm}
    if training.optimizer == "adam":
        settings |= {"beta_1": 0.9, "beta_2": 0.998, "epsilon": 1e-9}
        if training.weight_decay:
            return AdamW(schedule, weight_decay=training.weight_decay, **settings)
        return Adam(schedule, **settings)
    if training.optimizer == "adafactor":
        return Adafactor(
            schedule, beta_2_decay=-0.8, clip_threshold=1.0, relative_step=False, **settings
        )
    return keras.optimizers.SGD(schedule, **settings)
