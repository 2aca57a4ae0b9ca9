"""What tests of models need: the decoder contract, tiny models and data, the loss in NumPy.

Shapes: B sentences, K hypotheses a sentence, S source positions, T target positions, D width,
V vocabulary, N stages.
"""

import json

import keras
import numpy as np
from keras import ops

from tf_teaforn.models.catalog import build_model

TINY_TRANSFORMER = {
    "num_layers": 1,
    "hidden_dim": 4,
    "intermediate_dim": 6,
    "num_heads": 2,
    "dropout": 0.0,
}
TINY_VOCABULARY_SIZE = 17


def tiny_model(seed=0, vocabulary_size=TINY_VOCABULARY_SIZE, **overrides):
    """A Transformer `Seq2Seq` of a few hundred weights, all random, the same for the same seed."""
    settings = {**TINY_TRANSFORMER, **overrides}
    return randomize(build_model("transformer_tiny", vocabulary_size, **settings), seed)


def randomize(model, seed=0):
    """Gives every weight a random value, biases and norms too; returns the model or layer.

    A layer that has none yet is built. Row 0 of an embedding table stays zero.
    """
    if not model.built:
        model.build(None)
    random = np.random.default_rng(seed)
    for weight in model.weights:
        noise = random.normal(size=weight.shape)
        if len(weight.shape) > 1:
            value = noise / np.sqrt(weight.shape[0])
        else:
            value = ops.convert_to_numpy(weight) + 0.3 * noise
        if weight.name == "embeddings":
            value = noise / np.sqrt(weight.shape[1])
            value[0] = 0.0
        weight.assign(value)
    return model


def random_pairs(count, max_source_length=5, max_target_length=5, seed=0):
    """Sentence pairs of uneven lengths: `count` tuples of two lists of ids, each ending in EOS.

    The first has the maximum lengths, the second a target of end-of-sentence alone.
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(1, [max_source_length + 1, max_target_length + 1], size=(count, 2))
    lengths[0] = max_source_length, max_target_length
    lengths[1:2, 1] = 1

    def ids(length):
        return [*random.integers(2, TINY_VOCABULARY_SIZE, size=length - 1).tolist(), 1]

    return [tuple(map(ids, row)) for row in lengths]


def padded_batch(pairs):
    """(inputs, targets int32 [B, T], weights float32 [B, T]), one pair a row."""
    inputs, targets, weights = packed_batch([[pair] for pair in pairs])
    return {name: ids for name, ids in inputs.items() if "token_ids" in name}, targets, weights


def packed_batch(rows):
    """(inputs, targets, weights) with several pairs a row.

    Segments count from 1 in their row, 0 is padding; positions count from 0 in their segment.

    Args:
        rows: B lists of pairs.
    """

    def padded(sequences):
        width = max(map(len, sequences))
        return np.array([[*row, *[0] * (width - len(row))] for row in sequences], "int32")

    inputs = {}
    for side, part in enumerate(("encoder", "decoder")):
        texts = [[pair[side] for pair in row] for row in rows]
        if part == "decoder":
            targets = padded([sum(row, []) for row in texts])
            texts = [[[0, *text[:-1]] for text in row] for row in texts]
        inputs[f"{part}_token_ids"] = padded([sum(row, []) for row in texts])
        inputs[f"{part}_segment_ids"] = padded(
            [sum(([i] * len(text) for i, text in enumerate(row, 1)), []) for row in texts]
        )
        inputs[f"{part}_positions"] = padded(
            [sum((list(range(len(text))) for text in row), []) for row in texts]
        )
    return inputs, targets, (targets != 0).astype("float32")


def reference_losses(
    decode,
    table_VxD,
    inputs,
    targets,
    weights,
    *,
    n,
    stage_input="hidden",
    top_k=None,
    label_smoothing=0.0,
):
    """L_0 … L_{N-1} of the paper, section 3, summed over a batch; float64, one target at a time.

    Args:
        decode: function of (stage, x float64 [B, T, D]) that returns Decoder-stage's outputs
            [B, T, D]. It adds pos(t + stage) itself.
        table_VxD: E = W of the paper, row 0 zero. Inputs are its rows times sqrt(D).
        inputs, targets, weights: a batch.
        n, stage_input, top_k, label_smoothing: as `TeaForN` has them.

    Returns:
        list of N floats.
    """
    table = np.asarray(table_VxD, "float64")
    vocabulary_size, width = table.shape
    segments = inputs.get("decoder_segment_ids", np.ones_like(targets))
    batch, length = targets.shape
    losses = []
    x = table[inputs["decoder_token_ids"]] * np.sqrt(width)
    for stage in range(n):
        outputs = decode(stage, x)
        loss = 0.0
        x = np.zeros_like(outputs)
        for b in range(batch):
            for t in range(length):
                logits = table @ outputs[b, t]
                if stage_input == "hidden":
                    x[b, t] = outputs[b, t]
                else:
                    best = np.argsort(-logits, kind="stable")[:top_k]
                    odds = np.exp(logits[best] - logits[best].max())
                    x[b, t] = (odds / odds.sum()) @ table[best] * np.sqrt(width)
                if t + stage < length and segments[b, t + stage] == segments[b, t]:
                    log_normalizer = np.log(np.sum(np.exp(logits - logits.max()))) + logits.max()
                    expected = np.full(vocabulary_size, label_smoothing / vocabulary_size)
                    expected[targets[b, t + stage]] += 1.0 - label_smoothing
                    loss += weights[b, t + stage] * (expected @ (log_normalizer - logits))
        losses.append(loss)
    return losses


def check_decoder(decoder, hidden_dim, position_signal=None, tolerance=2e-5):
    """Asserts that a decoder keeps the contract of `tf_teaforn.models.decoder.Decoder`.

    Args:
        decoder: a float32 `Decoder`; give it random weights first (`randomize`), else terms that
            start at zero go untested.
        hidden_dim: D.
        position_signal: function of int positions [T] that returns what the decoder adds to its
            inputs there, [T, D]. None: the decoder has no position signal.
        tolerance: of outputs of unit size.

    Raises:
        AssertionError: it does not; the message says where.
    """
    check = _DecoderCheck(decoder, hidden_dim, tolerance)
    check.shapes()
    check.causality()
    check.batch_rows_are_independent()
    check.memory_padding_is_invisible()
    check.prepared_depends_on_memory_only()
    check.start_position_shifts(position_signal)
    check.steps_equal_call()
    check.hypotheses_can_be_reordered()
    check.growing_equals_given_room()
    check.segments_are_rows()
    check.config_round_trip()
    check.clone_is_another_decoder()


class _DecoderCheck:
    batch, source_length, target_length, hypotheses = 3, 4, 5, 2

    def __init__(self, decoder, hidden_dim, tolerance):
        if not decoder.built:
            decoder.build(None)
        random = np.random.default_rng(0)
        self.decoder = decoder
        self.tolerance = tolerance
        self.width = hidden_dim
        self.memory = self._normal(random, self.batch, self.source_length)
        self.mask = np.arange(self.source_length) < np.array([[4], [1], [3]])
        self.x = self._normal(random, self.batch, self.target_length)
        self.other_x = self._normal(random, self.batch, self.target_length)
        self.prepared = self.prepare(self.memory, self.mask)
        self.outputs = self.call(self.x, self.prepared)

    def _normal(self, random, *shape):
        return random.normal(size=(*shape, self.width)).astype("float32")

    def prepare(self, memory, mask):
        return self.decoder.prepare(ops.convert_to_tensor(memory), ops.convert_to_tensor(mask))

    def call(self, x, prepared, decoder=None, **options):
        decoder = decoder or self.decoder
        outputs = decoder(ops.convert_to_tensor(x), prepared, training=False, **options)
        return ops.convert_to_numpy(outputs)

    def step(self, x, state, position):
        position = ops.convert_to_tensor(position, "int32")
        outputs, state = self.decoder.step(ops.convert_to_tensor(x), state, self.prepared, position)
        return ops.convert_to_numpy(outputs), state

    def same(self, actual, expected, message):
        keras.tree.assert_same_structure(actual, expected)
        for a, b in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
            a, b = ops.convert_to_numpy(a), ops.convert_to_numpy(b)
            np.testing.assert_allclose(
                a, b, rtol=self.tolerance, atol=self.tolerance, err_msg=message
            )

    def differ(self, actual, other, message):
        assert np.all(np.max(np.abs(actual - other), axis=-1) > 10 * self.tolerance), message

    def shapes(self):
        assert self.outputs.shape == self.x.shape, "call does not return [B, T, D]"
        assert np.all(np.isfinite(self.outputs)), "call gives NaN or infinity"
        for leaf in keras.tree.flatten(self.prepared):
            assert leaf.shape[0] == self.batch, "prepared has a leaf without leading dimension B"
        state = self.decoder.initial_state(self.prepared, self.hypotheses, self.target_length)
        for leaf in keras.tree.flatten(state):
            assert leaf.shape[0] == self.batch, "state has a leaf without leading dimension B"

    def causality(self):
        for length in range(1, self.target_length):
            x = np.concatenate([self.x[:, :length], self.other_x[:, length:]], axis=1)
            outputs = self.call(x, self.prepared)
            message = f"outputs before position {length} depend on inputs from there on"
            self.same(outputs[:, :length], self.outputs[:, :length], message)
            self.differ(
                outputs[:, length:],
                self.outputs[:, length:],
                f"outputs from position {length} on do not depend on the inputs from there on",
            )
            self.same(
                self.call(self.x[:, :length], self.prepared),
                self.outputs[:, :length],
                "outputs depend on the length of the input",
            )
        x = np.concatenate([self.other_x[:, :1], self.x[:, 1:]], axis=1)
        message = "outputs do not depend on earlier inputs"
        self.differ(self.call(x, self.prepared), self.outputs, message)

    def batch_rows_are_independent(self):
        for row in range(self.batch):
            part = slice(row, row + 1)
            prepared = self.prepare(self.memory[part], self.mask[part])
            outputs = self.call(self.x[part], prepared)
            self.same(outputs, self.outputs[part], "rows of a batch influence each other")

    def memory_padding_is_invisible(self):
        garbage = np.where(self.mask[..., None], self.memory, 1e3)
        longer = np.pad(garbage, ((0, 0), (0, 3), (0, 0)), constant_values=-1e3)
        for memory in (garbage, longer):
            mask = np.pad(self.mask, ((0, 0), (0, memory.shape[1] - self.source_length)))
            outputs = self.call(self.x, self.prepare(memory.astype("float32"), mask))
            self.same(outputs, self.outputs, "padding of the memory is visible")
        seen = self.call(self.x, self.prepare(self.memory + self.mask[..., None], self.mask))
        self.differ(seen, self.outputs, "outputs do not depend on the memory")
        empty = self.call(self.x, self.prepare(self.memory, np.zeros_like(self.mask)))
        assert np.all(np.isfinite(empty)), "a row without source gives NaN or infinity"

    def prepared_depends_on_memory_only(self):
        before = [ops.convert_to_numpy(leaf) for leaf in keras.tree.flatten(self.prepared)]
        self.decoder(ops.convert_to_tensor(self.other_x), self.prepared, training=True)
        self.call(self.other_x, self.prepared, start_position=2)
        again = keras.tree.flatten(self.prepare(self.memory, self.mask))
        self.same(again, before, "prepare gives another result after a call")
        outputs = self.call(self.x, self.prepared)
        self.same(outputs, self.outputs, "call gives another result the second time")

    def start_position_shifts(self, position_signal):
        outputs = self.call(self.x, self.prepared, start_position=0)
        self.same(outputs, self.outputs, "start_position is not 0 by default")
        positions = np.arange(self.target_length)
        for start in (1, 3):
            outputs = self.call(self.x, self.prepared, start_position=start)
            x = self.x
            if position_signal is not None:
                message = f"start_position={start} has no effect"
                self.differ(outputs, self.outputs, message)
                shifted = position_signal(positions + start) - position_signal(positions)
                x = x + np.asarray(shifted, "float32")
            message = f"start_position={start} does not move the position signal by {start}"
            self.same(outputs, self.call(x, self.prepared), message)

    def steps_equal_call(self):
        # Hypotheses with inputs of their own: equal outputs also mean that they are independent.
        inputs = np.stack([self.x, self.other_x], axis=2)
        expected = np.stack([self.outputs, self.call(self.other_x, self.prepared)], axis=2)
        for room in (self.target_length, self.target_length + 3):
            state = self.decoder.initial_state(self.prepared, self.hypotheses, room)
            specification = [(leaf.shape, leaf.dtype) for leaf in keras.tree.flatten(state)]
            for position in range(self.target_length):
                previous = state
                outputs, state = self.step(inputs[:, position], state, position)
                message = f"step is not call at position {position}"
                self.same(outputs, expected[:, position], message)
                keras.tree.assert_same_structure(state, previous)
                now = [(leaf.shape, leaf.dtype) for leaf in keras.tree.flatten(state)]
                assert now == specification, "a step changes the state's shapes or types"

    def hypotheses_can_be_reordered(self):
        inputs = np.stack([self.x, self.other_x], axis=2)
        state = self.decoder.initial_state(self.prepared, self.hypotheses, self.target_length)
        for position in (0, 1):
            _, state = self.step(inputs[:, position], state, position)
        for position in (2, 3):
            expected, _ = self.step(inputs[:, position], state, position)
            # Other parents in each sentence, one of them twice.
            parents = np.array([[1, 0], [0, 0], [1, 1]])
            chosen = np.take_along_axis(inputs[:, position], parents[..., None], axis=1)
            state = self.decoder.reorder_state(state, ops.convert_to_tensor(parents, "int32"))
            outputs, state = self.step(chosen, state, position)
            message = "a reordered state does not continue the chosen hypotheses"
            expected = np.take_along_axis(expected, parents[..., None], axis=1)
            self.same(outputs, expected, message)

    def growing_equals_given_room(self):
        state = self.decoder.growing_state(self.prepared, self.hypotheses)
        if state is None:
            return
        inputs = np.stack([self.x, self.other_x], axis=2)
        expected = self.decoder.initial_state(self.prepared, self.hypotheses, self.target_length)
        parents = ops.convert_to_tensor([[1, 0], [0, 0], [1, 1]], "int32")
        for position in range(self.target_length):
            if position % 2 == 0:
                steps = min(2, self.target_length - position)
                state = self.decoder.grow_state(state, steps)
            outputs, state = self.step(inputs[:, position], state, position)
            same, expected = self.step(inputs[:, position], expected, position)
            self.same(outputs, same, "a state that grows gives other outputs")
            state, expected = (self.decoder.reorder_state(s, parents) for s in (state, expected))

    def segments_are_rows(self):
        if not self.decoder.supports_packing:
            return
        # Of two rows, each cut to two source and two target positions.
        memory, x = self.memory[:2, :2], self.x[:2, :2]
        apart = self.call(x, self.prepare(memory, np.ones((2, 2), "bool")))
        segments = ops.convert_to_tensor([[1, 1, 2, 2]], "int32")
        prepared = self.decoder.prepare(
            ops.convert_to_tensor(memory.reshape(1, 4, self.width)),
            ops.ones((1, 4), "bool"),
            memory_segment_ids=segments,
            segment_ids=segments,
            positions=ops.convert_to_tensor([[0, 1, 0, 1]], "int32"),
        )
        packed = self.call(x.reshape(1, 4, self.width), prepared)
        message = "segments of a packed row see each other: set supports_packing to False"
        self.same(packed.reshape(2, 2, self.width), apart, message)

    def config_round_trip(self):
        written = json.dumps(keras.saving.serialize_keras_object(self.decoder))
        copy = keras.saving.deserialize_keras_object(json.loads(written))
        assert copy.get_config() == self.decoder.get_config(), "get_config is not its own inverse"
        self._takes_the_weights(copy)

    def clone_is_another_decoder(self):
        config = {**self.decoder.get_config(), "name": "clone"}
        clone = type(self.decoder).from_config(config)
        self._takes_the_weights(clone)
        for weight in clone.weights:
            weight.assign(weight + 1.0)
        outputs = self.call(self.x, self.prepare(self.memory, self.mask))
        self.same(outputs, self.outputs, "a clone shares weights with its original")

    def _takes_the_weights(self, copy):
        if not copy.built:
            copy.build(None)
        # Below the decoder's own, which a clone does not share.
        paths, expected = (
            [(weight.path.removeprefix(decoder.path), weight.shape) for weight in decoder.weights]
            for decoder in (copy, self.decoder)
        )
        assert paths == expected, "a decoder made from the config has weights of other paths"
        assert len({*paths}) == len(paths), "two weights have the same path"
        copy.set_weights(self.decoder.get_weights())
        prepared = copy.prepare(
            ops.convert_to_tensor(self.memory), ops.convert_to_tensor(self.mask)
        )
        outputs = self.call(self.x, prepared, decoder=copy)
        self.same(outputs, self.outputs, "a copy with the same weights gives other outputs")
