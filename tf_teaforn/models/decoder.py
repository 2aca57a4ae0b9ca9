"""The contract between decoders and everything that drives them: TeaForN, search, export.

Shapes: B sentences, K hypotheses a sentence, S source positions, T target positions, D width.
"""

import keras
from keras import ops


class Decoder(keras.layers.Layer):
    """An autoregressive decoder over hidden states.

    Inputs are vectors, not token ids, because Decoder-s of TeaForN reads the outputs of
    Decoder-(s-1) (paper, section 3). Outputs are hidden states after the last normalisation;
    the embedding turns them into logits.

    `step`, looped over the positions, equals `call`.

    `build(None)` makes all weights: TeaForN copies a decoder for further stages, and the optimizer
    asks for its variables, before there is any input. Its layers have names, each of its own:
    checkpoints find weights by their paths. A subclass is registered with
    `keras.saving.register_keras_serializable`, and its `get_config` has all that its constructor
    takes, `name` included.

    Attributes:
        max_positions: how many positions there are vectors for; None: any number.
        supports_packing: whether segments of a packed row see nothing of each other.
        remat_layers: whether training computes the layers again in the backward pass, one after the
            other (`--remat=layer`); set by TeaForN. None: not with this class.
    """

    max_positions = None
    supports_packing = False
    remat_layers = None

    def prepare(
        self,
        memory_BxSxD,
        memory_mask_BxS,
        memory_segment_ids=None,
        segment_ids=None,
        positions=None,
    ):
        """Computes, once a batch, all that depends neither on the stage nor on the step.

        Args:
            memory_BxSxD: encoder output.
            memory_mask_BxS: bool, False on padding.
            memory_segment_ids: int32 [B, S], `segment_ids` int32 [B, T] and `positions`
                int32 [B, T] (position inside the segment): for packed batches.

        Returns:
            A nested structure of tensors, each with leading dimension B.
        """
        raise NotImplementedError

    def call(self, x_BxTxD, prepared, start_position=0, training=None):
        """Runs over all positions with causal self-attention (or recurrence).

        Args:
            x_BxTxD: scaled embeddings of the previous tokens, or another decoder's output.
            prepared: the result of `prepare`.
            start_position: int, added to every position before the position signal: s for
                Decoder-s, which predicts y^(t+s) at position t.

        Returns:
            [B, T, D], after the last normalisation.
        """
        raise NotImplementedError

    def initial_state(self, prepared, num_hypotheses, max_length):
        """Returns the state before the first step.

        Args:
            num_hypotheses: K.
            max_length: number of steps there is room for.

        Returns:
            A nested structure of tensors with leading dimensions [B, K], or another one that
            `reorder_state` knows.
        """
        raise NotImplementedError

    def reorder_state(self, state, parents_BxK):
        """Returns the state of hypotheses that continue others.

        Args:
            state: from `initial_state`, `grow_state` or `step`.
            parents_BxK: int32, the hypothesis that each of the new ones continues.
        """
        return keras.tree.map_structure(lambda x: batch_gather(x, parents_BxK), state)

    def growing_state(self, prepared, num_hypotheses):
        """Like `initial_state`, without room for any step, where `grow_state` can make more.

        Search then computes with as much room as it has used and not with all that it might need;
        it does so where shapes may change: in a TensorFlow graph without XLA. Shapes must be
        dynamic in what grows.

        Returns:
            None: the state always has room for the longest output.
        """
        return None

    def grow_state(self, state, steps):
        """Returns a `growing_state` or its successor with room for more steps.

        Args:
            state: has no room left.
            steps: int or int32 scalar.
        """
        raise NotImplementedError

    def step(self, x_BxKxD, state, prepared, position):
        """Runs one position of K hypotheses for each sentence.

        Args:
            x_BxKxD: scaled embeddings of the previous tokens.
            state: from `initial_state`, `grow_state`, `reorder_state` or the previous `step`.
            prepared: the result of `prepare`; not repeated for hypotheses.
            position: int32 scalar, from 0.

        Returns:
            ([B, K, D], new state).
        """
        raise NotImplementedError


def batch_gather(x, indices_BxJ):
    """[B, K, ...] -> [B, J, ...]: for each sentence the entries at its indices."""
    batch, width, *rest = ops.shape(x)
    first = ops.arange(batch, dtype="int32")[:, None] * width
    return ops.take(ops.reshape(x, (batch * width, *rest)), first + indices_BxJ, axis=0)
