"""The contract between decoders and everything that drives them: TeaForN, search, export.

Shapes: B sentences, K hypotheses a sentence, S source positions, T target positions, D width.
"""

import keras


class Decoder(keras.layers.Layer):
    """An autoregressive decoder over hidden states.

    Inputs are vectors, not token ids, because Decoder-s of TeaForN reads the outputs of
    Decoder-(s-1) (paper, section 3). Outputs are hidden states after the last normalisation;
    the embedding turns them into logits.

    `step`, looped over the positions, equals `call`.
    """

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
            A nested structure of tensors with leading dimensions [B, K].
        """
        raise NotImplementedError

    def step(self, x_BxKxD, state, prepared, position):
        """Runs one position of K hypotheses for each sentence.

        Args:
            x_BxKxD: scaled embeddings of the previous tokens.
            state: from `initial_state` or the previous `step`, reordered along K at will.
            prepared: the result of `prepare`; not repeated for hypotheses.
            position: int32 scalar, from 0.

        Returns:
            ([B, K, D], new state).
        """
        raise NotImplementedError
