"""Optimizers and learning-rate schedules by name."""

import keras
from keras import ops


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


def build_optimizer(training):
    """Builds the optimizer of a `TrainingConfig`.

    Adam has β1 = .9, β2 = .998, ε = 1e-9 (OpenNMT-tf's Transformer; Tensor2Tensor: .997).
    Adafactor has PEGASUS' settings: no momentum, decay 1 - t^-0.8, clipping at 1, updates scaled
    by the parameters' scale.
    """
    schedule = WarmupSchedule(
        training.schedule, training.learning_rate, training.warmup_steps, training.train_steps
    )
    # Its variables are found in a checkpoint by this name. Keras would number the optimizers of a
    # process.
    name = training.optimizer
    if name == "adam":
        return keras.optimizers.Adam(schedule, beta_1=0.9, beta_2=0.998, epsilon=1e-9, name=name)
    if name == "adafactor":
        return keras.optimizers.Adafactor(
            schedule, beta_2_decay=-0.8, clip_threshold=1.0, relative_step=False, name=name
        )
    return keras.optimizers.SGD(schedule, name=name)
