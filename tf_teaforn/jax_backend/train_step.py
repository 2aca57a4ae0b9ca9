"""`train_step` under JAX, on arrays of any sharding."""

import jax
import keras

from tf_teaforn import objective
from tf_teaforn.accumulation import accumulate, batch_of, number_of_parts


class TrainStep:
    """Mixed into `TeaForN` under the JAX backend."""

    def _stateless(self, function, variables, values):
        """Calls `function` with `values` for `variables`; returns its result and new values."""
        with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)) as scope:
            result = function()
        current = [scope.get_current_value(variable) for variable in variables]
        return result, [
            old if new is None else new for old, new in zip(values, current, strict=True)
        ]

    def _update_metrics(self, values, sums):
        return self._stateless(lambda: self.update_metrics(sums), self.metrics_variables, values)

    def train_step(self, state, data):
        """One update.

        Args:
            state: values of (trainable, non-trainable, optimizer, metrics) variables.
            data: (inputs, targets, weights), see `TeaForN.loss_sums`.

        Returns:
            (logs of `TeaForN.update_metrics`, new state).
        """
        trainable, non_trainable, optimizer, metrics = state
        batch = batch_of(data)
        tokens = objective.divisor(jax.numpy.sum(batch[2]))

        def loss_function(trainable, non_trainable, part):
            sums, values = self._stateless(
                lambda: self.loss_sums(*part, training=True),
                # The optimizer's for a subclass whose loss depends on the step.
                [
                    *self.trainable_variables,
                    *self.non_trainable_variables,
                    *self.optimizer.variables,
                ],
                [*trainable, *non_trainable, *optimizer],
            )
            loss, _ = self._stateless(
                lambda: self.optimizer.scale_loss(sums.total / tokens),
                self.optimizer.variables,
                optimizer,
            )
            first = len(trainable)
            return loss, (sums, values[first : first + len(non_trainable)])

        def step(part, non_trainable):
            differentiate = jax.grad(loss_function, has_aux=True)
            gradients, (sums, non_trainable) = differentiate(trainable, non_trainable, part)
            return (sums, gradients), non_trainable

        (sums, gradients), non_trainable = accumulate(
            step,
            batch,
            number_of_parts(batch, self.micro_batch_tokens),
            zeros=(self.no_sums(), jax.tree.map(jax.numpy.zeros_like, trainable)),
            state=non_trainable,
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self._update_metrics(metrics, sums)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def make_test_function(self, force=False):
        """Keras' own, to which the optimizer's values come with every batch.

        Else a loss that depends on the step would keep the step at which it was compiled.
        """
        if self.test_function is not None and not force:
            return
        super().make_test_function(force)
        function = self.test_function

        def with_optimizer(state, iterator):
            return function(state, ((batch, self.optimizer_values()) for batch in iterator))

        self.test_function = with_optimizer

    def optimizer_values(self):
        """Values of the optimizer's variables; none where there is no optimizer."""
        return [variable.value for variable in self._optimizer_variables()]

    def _optimizer_variables(self):
        return self.optimizer.variables if self.optimizer else []

    def test_step(self, state, data):
        """One batch without dropout.

        Args:
            state: values of (trainable, non-trainable, metrics) variables.
            data: a batch as of `train_step`, and `optimizer_values`.

        Returns:
            (logs of `TeaForN.update_metrics`, new state).
        """
        trainable, non_trainable, metrics = state
        batch, optimizer = data
        sums, _ = self._stateless(
            lambda: self.loss_sums(*batch_of(batch), training=False),
            [
                *self.trainable_variables,
                *self.non_trainable_variables,
                *self._optimizer_variables(),
            ],
            [*trainable, *non_trainable, *optimizer],
        )
        logs, metrics = self._update_metrics(metrics, sums)
        return logs, (trainable, non_trainable, metrics)
