"""The Transformer of Vaswani et al. 2017 in NumPy, float64: what the Keras layers are held to.

Written for one sentence at a time, without padding and without batches.
"""

import numpy as np

from tf_teaforn.testing import reference_losses


def position_signal(positions, width, layout="half_split"):
    """[T] -> [T, D], one number at a time."""
    half = width // 2
    signal = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for i in range(half):
            divisor = half - 1 if layout == "tensor2tensor" else half
            angle = position / 10000 ** (i / divisor)
            sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, half + i)
            signal[row, sine], signal[row, cosine] = np.sin(angle), np.cos(angle)
    return np.zeros_like(signal) if layout == "none" else signal


class NumpyTransformer:
    """Encoder and decoders over the weights of a `TeaForN` or `Seq2Seq`.

    Args:
        weights: {path: array}.
        settings: those of `TransformerEncoder`.
    """

    def __init__(self, weights, settings):
        self.weights = {path: np.asarray(value, "float64") for path, value in weights.items()}
        self.table = self.weights["seq2seq/embedding/embeddings"]
        self.norm = settings.get("norm", "pre")
        self.layout = settings.get("position_signal", "half_split")
        self.layers = settings["num_layers"]
        self.heads = settings["num_heads"]

    def dense(self, name, x):
        return x @ self.weights[f"{name}/kernel"] + self.weights.get(f"{name}/bias", 0.0)

    def layer_norm(self, name, x):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
        return x * self.weights[f"{name}/gamma"] + self.weights[f"{name}/beta"]

    def attention(self, name, x, memory, causal=False):
        query, key, value = (
            self.dense(f"{name}/{part}", y)
            for part, y in (("query", x), ("key", memory), ("value", memory))
        )
        outputs = np.zeros_like(query)
        width = query.shape[-1] // self.heads
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            for t in range(len(x)):
                seen = t + 1 if causal else len(memory)
                scores = key[:seen, part] @ query[t, part] / np.sqrt(width)
                odds = np.exp(scores - scores.max())
                outputs[t, part] = odds / odds.sum() @ value[:seen, part]
        return self.dense(f"{name}/output", outputs)

    def feed_forward(self, name, x):
        return self.dense(f"{name}/outer", np.maximum(self.dense(f"{name}/inner", x), 0.0))

    def residual(self, name, x, sublayer):
        norm = f"{name}_residual/layer_norm"
        if self.norm == "pre":
            return x + sublayer(name, self.layer_norm(norm, x))
        return self.layer_norm(norm, x + sublayer(name, x))

    def stack(self, name, x, start_position, causal, memory=None):
        x = x + position_signal(np.arange(len(x)) + start_position, x.shape[-1], self.layout)
        for layer in range(self.layers):
            prefix = f"{name}/layer_{layer}"
            x = self.residual(
                f"{prefix}_self_attention", x, lambda n, y: self.attention(n, y, y, causal)
            )
            if memory is not None:
                x = self.residual(
                    f"{prefix}_cross_attention", x, lambda n, y: self.attention(n, y, memory)
                )
            x = self.residual(f"{prefix}_feed_forward", x, self.feed_forward)
        return self.layer_norm(f"{name}/final_norm", x) if self.norm == "pre" else x

    def memories(self, encoder_token_ids):
        """One [S, D] for each sentence, of its own length."""
        scale = np.sqrt(self.table.shape[1])
        rows = [ids[ids != 0] for ids in encoder_token_ids]
        return [self.stack("seq2seq/encoder", self.table[ids] * scale, 0, False) for ids in rows]

    def decode(self, name, x_BxTxD, memories, start_position=0):
        """[B, T, D]."""
        return np.stack(
            [
                self.stack(name, x, start_position, True, memory)
                for x, memory in zip(x_BxTxD, memories, strict=True)
            ]
        )

    def losses(self, inputs, targets, weights, *, shared=True, **settings):
        """`reference_losses` of a `TeaForN` with these weights."""
        memories = self.memories(inputs["encoder_token_ids"])

        def decode(stage, x):
            name = "seq2seq/decoder" if shared or stage == 0 else f"decoder_{stage}"
            return self.decode(name, x, memories, start_position=stage)

        return reference_losses(decode, self.table, inputs, targets, weights, **settings)
