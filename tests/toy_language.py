"""A decoder whose conditional probabilities are a table, and searches over it by enumeration."""

import itertools

import numpy as np
from keras import ops

from tf_teaforn.models.decoder import Decoder

EOS = 1


class ToyLanguage:
    """What `search` needs of a `Seq2Seq`, with one random table of logits for each language.

    A sentence's language is the sum of its source ids modulo their number. The state keeps tokens
    by position, as a cache of keys and values does, so that wrong reordering or positions show.

    Args:
        tables: float32 [languages, contexts, V], logits after each prefix. A prefix w_1 … w_p is
            row (w_1 V^(p-1) + … + w_p) modulo contexts.
    """

    start_id = 0
    eos_id = EOS

    def __init__(self, tables):
        self.tables = np.asarray(tables, "float32")
        self.languages, self.contexts, self.vocabulary_size = self.tables.shape
        self.decoder = self

    @classmethod
    def random(cls, languages, contexts, vocabulary_size, scale=2.0, seed=0):
        shape = (languages, contexts, vocabulary_size)
        return cls(np.random.default_rng(seed).normal(size=shape) * scale)

    def encode(self, inputs, training=False):
        ids = ops.convert_to_tensor(inputs["encoder_token_ids"])
        return ops.cast(ids, "float32")[..., None], ids != 0

    def embed(self, token_ids):
        one_hot = ops.one_hot(token_ids, self.vocabulary_size, dtype="float32")
        return one_hot * ops.cast(token_ids != 0, "float32")[..., None]

    def logits_function(self):
        return lambda hidden: hidden

    def reorder_state(self, state, parents):
        return Decoder.reorder_state(self, state, parents)

    def growing_state(self, prepared, num_hypotheses):
        return None

    def prepare(self, memory, memory_mask):
        return ops.cast(ops.sum(memory[..., 0], axis=1), "int32") % self.languages

    def initial_state(self, prepared, num_hypotheses, max_length):
        shape = (ops.shape(prepared)[0], num_hypotheses, max_length)
        return {"tokens": ops.zeros(shape, "int32")}

    def step(self, x, state, prepared, position):
        tokens = state["tokens"]
        here = ops.arange(ops.shape(tokens)[-1]) == position
        tokens = ops.where(here, ops.cast(ops.argmax(x, axis=-1), "int32")[..., None], tokens)

        def fold(i, context):
            return (context * self.vocabulary_size + ops.take(tokens, i, axis=-1)) % self.contexts

        context = ops.fori_loop(0, position + 1, fold, ops.zeros_like(tokens[..., 0]))
        rows = prepared[:, None] * self.contexts + context
        flat = ops.reshape(ops.convert_to_tensor(self.tables), (-1, self.vocabulary_size))
        return ops.take(flat, rows, axis=0), {"tokens": tokens}

    def log_probabilities(self, source, prefix):
        """float64 [V] after a prefix (list of ids), in NumPy."""
        context = 0
        for token in prefix:
            context = (context * self.vocabulary_size + token) % self.contexts
        logits = self.tables[sum(source) % self.languages, context].astype("float64")
        return logits - np.log(np.sum(np.exp(logits)))

    def score(self, source, tokens):
        """Log probability of a sequence of ids."""
        steps = range(len(tokens))
        return sum(self.log_probabilities(source, tokens[:i])[tokens[i]] for i in steps)

    def enumerate(self, source, max_length, min_length=0):
        """All (log probability, tokens) that end within the maximum, and all cut off by it."""
        words = range(2, self.vocabulary_size)
        finished = [
            (*prefix, EOS)
            for length in range(max(min_length, 1), max_length + 1)
            for prefix in itertools.product(words, repeat=length - 1)
        ]
        unfinished = list(itertools.product(words, repeat=max_length))
        return tuple(
            [(score, tokens) for tokens in group if (score := self.score(source, tokens)) > -np.inf]
            for group in (finished, unfinished)
        )


def length_penalty(length, alpha):
    return ((5 + length) / 6) ** alpha
