"""What a training step costs, in closed form: operations of the matrix products of a Transformer.

Two operations (a multiplication and an addition) for each product of two numbers. Attention counts
in full, as it is computed, although half of the decoder's is masked. Position signals, norms,
softmaxes, the optimizer are left out: they are no matrix products.
"""

# A product of the forward pass has two in the backward pass: by each of its operands.
_FORWARD_AND_BACKWARD = 3


def training_flops(
    *,
    batch_size,
    source_length,
    target_length,
    vocabulary_size,
    num_layers,
    hidden_dim,
    intermediate_dim,
    n=1,
    shared=True,
):
    """Operations of one update of `TeaForN` with stage_input="hidden" and remat="none".

    Args:
        batch_size: B; source_length: S; target_length: T, padding included.
        vocabulary_size: V; num_layers: of the encoder and of the decoder; hidden_dim: D;
            intermediate_dim: F.
        n: number of stages N.
        shared: whether the stages share their weights, and with them the keys and values of the
            encoder's outputs, which are then computed once.
    """
    projection = 2 * hidden_dim**2
    feed_forward = 4 * hidden_dim * intermediate_dim

    def attention(length):
        """Scores and weighted sum of one query."""
        return 4 * length * hidden_dim

    encoder_position = num_layers * (4 * projection + attention(source_length) + feed_forward)
    keys_and_values = num_layers * 2 * projection
    decoder_position = num_layers * (
        6 * projection + attention(target_length) + attention(source_length) + feed_forward
    )
    logits = 2 * vocabulary_size * hidden_dim
    preparations = 1 if shared else n
    forward = source_length * (encoder_position + preparations * keys_and_values)
    forward += n * target_length * (decoder_position + logits)
    return _FORWARD_AND_BACKWARD * batch_size * forward
