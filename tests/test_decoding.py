"""Search against enumeration, a NumPy beam search and itself in other batches and backends."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from tests.toy_language import EOS, ToyLanguage, length_penalty
from tf_teaforn import decoding
from tf_teaforn.decoding import SearchConfig, search
from tf_teaforn.errors import UserError
from tf_teaforn.models.catalog import build_model

# Language = sum of ids modulo languages; lengths 2, 3, 4 and 6.
SOURCES = [[2, 1], [3, 4, 1], [4, 4, 3, 1], [2, 3, 2, 4, 2, 1]]
WORDS = 3
VOCABULARY_SIZE = WORDS + 2


def pad(sources, length=None):
    sources = list(sources)
    length = length or max(map(len, sources))
    return np.array([source + [0] * (length - len(source)) for source in sources], "int32")


def run(model, sources, config, length=None):
    """[(tokens without padding, score, penalised score), …] for each sentence."""
    result = search(model, {"encoder_token_ids": pad(sources, length)}, config)
    return unpack(result)


def unpack(result):
    tokens, scores, penalized = (ops.convert_to_numpy(x) for x in result)
    return [
        [
            (tuple(int(t) for t in row if t), float(score), float(rank))
            for row, score, rank in zip(*sentence, strict=True)
        ]
        for sentence in zip(tokens, scores, penalized, strict=True)
    ]


def assert_same(actual, expected, rtol=1e-5):
    for actual_rows, expected_rows in zip(actual, expected, strict=True):
        assert [row[0] for row in actual_rows] == [row[0] for row in expected_rows]
        np.testing.assert_allclose(
            [row[1:] for row in actual_rows], [row[1:] for row in expected_rows], rtol=rtol
        )


def small_language(seed=0, contexts=(VOCABULARY_SIZE**4)):
    """Ends are neither rare nor certain; language 0 cannot end, language 1 not before word 2."""
    tables = ToyLanguage.random(4, contexts, VOCABULARY_SIZE, seed=seed).tables
    tables[..., EOS] -= 1.0
    tables[0, :, EOS] = -np.inf
    tables[1, :VOCABULARY_SIZE, EOS] = -np.inf
    return ToyLanguage(tables)


def best_of(candidates, alpha, n_best):
    ranked = [
        (tokens, score, score / length_penalty(len(tokens), alpha)) for score, tokens in candidates
    ]
    ranked = sorted(ranked, key=lambda row: -row[2])[:n_best]
    return ranked + [((), -np.inf, -np.inf)] * (n_best - len(ranked))


def enumerated(model, sources, limits, alpha, n_best, keep=lambda tokens: True):
    expected = []
    for source, limit in zip(sources, limits, strict=True):
        finished, unfinished = (
            [row for row in group if keep(row[1])] for group in model.enumerate(source, limit)
        )
        expected.append(best_of(finished or unfinished, alpha, n_best))
    return expected


@pytest.mark.parametrize("alpha", [-0.7, 0.0, 0.6, 2.0])
@pytest.mark.parametrize("max_length", [1, 2, 3, 4])
def test_widest_beam_equals_enumeration(alpha, max_length):
    model = small_language()
    config = SearchConfig(WORDS**max_length, alpha, n_best=3, max_length=max_length)
    expected = enumerated(model, SOURCES, [max_length] * len(SOURCES), alpha, 3)
    assert_same(run(model, SOURCES, config), expected)


def test_only_unfinished_hypotheses_are_returned_without_an_end():
    model = small_language()
    source = next(s for s in SOURCES if sum(s) % model.languages == 0)
    [rows] = run(model, [source], SearchConfig(4, n_best=2, max_length=3))
    assert all(len(tokens) == 3 and EOS not in tokens for tokens, _, _ in rows)
    for tokens, score, penalized in rows:
        assert score == pytest.approx(model.score(source, tokens), rel=1e-5)
        assert penalized == pytest.approx(score / length_penalty(3, 0.6), rel=1e-5)


def test_relative_maximum_differs_within_a_batch():
    model = small_language()
    sources = [[2, 1], [3, 1], [4, 1], [2, 3, 4, 1], [2, 4, 1]]
    limits = [len(source) for source in sources]
    config = SearchConfig(WORDS**4, 0.6, n_best=2, max_length=None, max_length_offset=0)
    assert_same(run(model, sources, config), enumerated(model, sources, limits, 0.6, 2))


def has_repeat(tokens, n):
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    return len(set(grams)) < len(grams)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_repeat_ngram_equals_enumeration(n):
    model = small_language()
    config = SearchConfig(WORDS**4, 0.6, n_best=3, max_length=4, no_repeat_ngram=n)
    expected = enumerated(
        model, SOURCES, [4] * len(SOURCES), 0.6, 3, keep=lambda tokens: not has_repeat(tokens, n)
    )
    assert_same(run(model, SOURCES, config), expected)


def test_min_length_equals_enumeration():
    model = small_language()
    config = SearchConfig(WORDS**4, 0.0, n_best=3, max_length=4, min_length=3)
    expected = enumerated(
        model, SOURCES, [4] * len(SOURCES), 0.0, 3, keep=lambda tokens: len(tokens) >= 3
    )
    assert_same(run(model, SOURCES, config), expected)


def reference_beam(model, source, width, alpha, n_best, limit):
    """Beam search with 2K candidates that never stops before the maximum length."""
    alive, finished = [(0.0, ())], []
    for _ in range(limit):
        candidates = []
        for score, tokens in alive:
            log_probs = model.log_probabilities(source, tokens)
            candidates += [
                (score + log_probs[t], (*tokens, t)) for t in range(1, model.vocabulary_size)
            ]
        candidates = sorted((c for c in candidates if c[0] > -np.inf), reverse=True)[: 2 * width]
        finished += [c for c in candidates if c[1][-1] == EOS]
        alive = [c for c in candidates if c[1][-1] != EOS][:width]
    return best_of(finished or alive, alpha, n_best)


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 3.0])
@pytest.mark.parametrize(("width", "n_best"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 3)])
def test_leaving_early_loses_nothing(alpha, width, n_best):
    model = small_language(seed=1, contexts=997)
    sources = [[i, 1] for i in range(2, 10)] + SOURCES
    config = SearchConfig(width, alpha, n_best=n_best, max_length=12)
    limits_and_room = (np.full(len(sources), 12, "int32"), 12)
    prepared = model.prepare(*model.encode({"encoder_token_ids": pad(sources)}))
    actual = unpack(decoding.beam_search(model, prepared, *limits_and_room, config))
    expected = [reference_beam(model, s, width, alpha, n_best, 12) for s in sources]
    assert_same(actual, expected)


class CountingLanguage(ToyLanguage):
    steps = 0

    def step(self, *args):
        self.steps += 1
        return super().step(*args)


@pytest.mark.parametrize("config", [SearchConfig(1, max_length=50), SearchConfig(4, max_length=50)])
def test_search_leaves_when_all_sentences_are_done(config):
    tables = np.zeros((1, 1, 8))
    tables[..., EOS] = 9.0
    model = CountingLanguage(tables)
    run(model, SOURCES, config)
    assert model.steps == 1


def test_padding_rows_cost_no_step():
    tables = np.zeros((1, 1, 8))
    tables[..., EOS] = -np.inf
    model = CountingLanguage(tables)
    sources = [[1], [0], [0]]
    rows = run(model, sources, SearchConfig(2, max_length=None, max_length_offset=2))
    assert model.steps == 3
    assert len(rows[0][0][0]) == 3
    assert rows[1][0] == rows[2][0] == ((), 0.0, 0.0)


def test_greedy_takes_the_most_probable_token():
    model = small_language(seed=2, contexts=997)
    config = SearchConfig(1, alpha=0.6, max_length=8)
    for source, [(tokens, score, penalized)] in zip(
        SOURCES, run(model, SOURCES, config), strict=True
    ):
        expected = []
        while len(expected) < 8 and EOS not in expected:
            log_probs = model.log_probabilities(source, expected)
            expected.append(1 + int(np.argmax(log_probs[1:])))
        assert tokens == tuple(expected)
        assert score == pytest.approx(model.score(source, expected), rel=1e-5)
        assert penalized == pytest.approx(score / length_penalty(len(expected), 0.6), rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_general_search_with_one_hypothesis_is_never_below_greedy(alpha):
    model = ToyLanguage.random(60, 997, 8, seed=3)
    sources = [[i, 1] for i in range(2, 62)]
    config = SearchConfig(1, alpha, max_length=20)
    prepared = model.prepare(*model.encode({"encoder_token_ids": pad(sources)}))
    arguments = (model, prepared, np.full(len(sources), 20, "int32"), 20, config)
    greedy = unpack(decoding.token_by_token(*arguments))
    general = unpack(decoding.beam_search(*arguments))
    ended = [
        (low, high)
        for [(tokens, _, low)], [(_, _, high)] in zip(greedy, general, strict=True)
        if tokens[-1] == EOS
    ]
    assert len(ended) > 30
    # The two may round the penalty differently.
    assert all(high >= low - 1e-6 * abs(low) for low, high in ended)
    assert any(high > 0.9 * low for low, high in ended)


def test_padding_id_keeps_its_probability_and_is_never_produced():
    tables = ToyLanguage.random(1, 997, 6, seed=4).tables
    tables[..., 0] = tables.max(-1) + 3.0
    model = ToyLanguage(tables)
    for config in (
        SearchConfig(1, max_length=6),
        SearchConfig(3, max_length=6, n_best=3),
        SearchConfig(1, max_length=6, n_best=3, temperature=2.0),
    ):
        result = search(model, {"encoder_token_ids": pad(SOURCES)}, config)
        for tokens, scores in zip(*map(ops.convert_to_numpy, result[:2]), strict=True):
            for row, score in zip(tokens, scores, strict=True):
                length = np.count_nonzero(row)
                assert np.all(row[:length] > 0)
                assert score == pytest.approx(model.score([1], row[:length]), rel=1e-5)


def test_nothing_allowed_gives_no_hypothesis():
    model = ToyLanguage.random(1, 997, 3, seed=4)
    # One word, which may come once, and no end before length 4.
    for width, temperature in ((1, 0.0), (2, 0.0), (1, 1.0)):
        config = SearchConfig(
            width, max_length=5, min_length=4, no_repeat_ngram=1, temperature=temperature
        )
        assert run(model, [[2, 1]], config) == [[((), -np.inf, -np.inf)]]


@pytest.mark.parametrize("size", [1280, 1283])
@pytest.mark.parametrize("k", [1, 3, 4, 900])
def test_selection_by_blocks_equals_top_k(size, k):
    x = np.random.default_rng(0).integers(0, 40, size=(3, 2, size)).astype("float32")
    x[0, 0] = -np.inf
    x[1, 1, 5:] = -np.inf
    for actual, expected in zip(decoding._top_k(x, k), ops.top_k(x, k), strict=True):
        np.testing.assert_array_equal(actual, expected)


CONFIGS = {
    "greedy": SearchConfig(1, max_length_offset=6),
    "beam": SearchConfig(3, n_best=2, max_length_offset=6),
    "constrained": SearchConfig(4, n_best=4, max_length=9, min_length=4, no_repeat_ngram=2),
    "sampled": SearchConfig(1, n_best=3, max_length_offset=6, temperature=1.3, seed=5),
    "filtered": SearchConfig(
        1, max_length_offset=6, temperature=0.8, sample_top_k=5, sample_top_p=0.9, seed=7
    ),
}


def larger_language():
    model = ToyLanguage.random(7, 997, 12, seed=6)
    model.tables[..., EOS] += 0.5
    return model


def many_sources():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 7, size=16)
    return [[*map(int, generator.integers(2, 12, size=length - 1)), 1] for length in lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_result_depends_neither_on_companions_nor_on_padding(name):
    model, sources, config = larger_language(), many_sources(), CONFIGS[name]
    together = run(model, sources, config)
    assert len({tokens for rows in together for tokens, _, _ in rows}) >= len(sources) / 2
    alone = [run(model, [source], config)[0] for source in sources]
    assert_same(alone, together, rtol=1e-6)
    assert_same(run(model, sources[::-1], config, length=11)[::-1], together, rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_eager_graph_and_xla_agree(name):
    import tensorflow as tf

    model, sources, config = larger_language(), many_sources(), CONFIGS[name]
    eager = run(model, sources, config)
    ids = tf.constant(pad(sources))

    def decode(ids):
        return search(model, {"encoder_token_ids": ids}, config)

    dynamic = tf.TensorSpec([None, None], tf.int32)
    graph = tf.function(decode, input_signature=[dynamic])
    assert_same(unpack(graph(ids)), eager)
    assert_same(unpack(graph(ids[:3])), eager[:3])
    compiled = tf.function(decode, jit_compile=True)
    assert_same(unpack(compiled(ids)), eager)


class GrowingLanguage(ToyLanguage):
    """Has its state made longer on demand; counts how often that happens while tracing."""

    grown = 0

    def growing_state(self, prepared, num_hypotheses):
        return self.initial_state(prepared, num_hypotheses, ops.shape(prepared)[0] * 0)

    def grow_state(self, state, steps):
        self.grown += 1
        shape = (*ops.shape(state["tokens"])[:2], steps)
        return {"tokens": ops.concatenate([state["tokens"], ops.zeros(shape, "int32")], axis=2)}


@pytest.mark.parametrize("name", ["greedy", "beam"])
def test_a_growing_state_changes_nothing(name, monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(decoding, "_SEGMENT", 3)
    model, config = larger_language(), CONFIGS[name]
    expected = run(model, many_sources(), config)
    growing = GrowingLanguage(model.tables)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def decode(ids):
        return search(growing, {"encoder_token_ids": ids}, config)

    assert_same(unpack(decode(tf.constant(pad(many_sources())))), expected)
    assert growing.grown == 1
    # Where shapes are static, all room is there from the beginning.
    assert_same(run(growing, many_sources(), config), expected)
    assert growing.grown == 1


def write_results(path):
    """Runs every configuration on the current backend; under JAX, through `jax.jit`."""
    model, ids = larger_language(), pad(many_sources())
    results = {}
    for name, config in CONFIGS.items():

        def decode(ids, config=config):
            return search(model, {"encoder_token_ids": ids}, config)

        if keras.backend.backend() == "jax":
            import jax

            decode = jax.jit(decode)
        for field, value in decode(ops.convert_to_tensor(ids))._asdict().items():
            results[f"{name}/{field}"] = ops.convert_to_numpy(value)
    np.savez(path, **results)


def test_jax_agrees_with_tensorflow(tmp_path):
    pytest.importorskip("jax")
    path = str(tmp_path / "jax.npz")
    subprocess.run(
        [sys.executable, "-c", f"from tests import test_decoding as t; t.write_results({path!r})"],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        cwd=pathlib.Path(__file__).parent.parent,
        check=True,
    )
    write_results(tmp_path / "tensorflow.npz")
    actual, expected = np.load(path), np.load(tmp_path / "tensorflow.npz")
    assert set(actual) == set(expected)
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 2, 1.0), (1.0, 0, 0.7), (1.5, 3, 0.8)],
)
def test_samples_follow_the_distribution(temperature, top_k, top_p):
    model = ToyLanguage.random(5, 997, 6, scale=1.0, seed=8)
    source, count = [3, 1], 4000
    config = SearchConfig(
        1,
        n_best=count,
        max_length=2,
        temperature=temperature,
        sample_top_k=top_k,
        sample_top_p=top_p,
    )

    def distribution(prefix):
        logits = model.log_probabilities(source, prefix) / temperature
        logits[0] = -np.inf
        order = np.argsort(-logits)
        logits[order[top_k or len(order) :]] = -np.inf
        probabilities = np.exp(logits) / np.exp(logits).sum()
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= top_p]] = 0.0
        return probabilities / probabilities.sum()

    first = distribution([])
    expected = {(EOS,): first[EOS]}
    for word in range(2, 6):
        expected |= {(word, t): first[word] * p for t, p in enumerate(distribution([word]))}

    [rows] = run(model, [source], config)
    for tokens, score, _ in rows[:: count // 50]:
        assert score == pytest.approx(model.score(source, tokens), rel=1e-5)
    counts = {tokens: 0 for tokens in expected}
    for tokens, _, _ in rows:
        counts[tokens] += 1
    for tokens, probability in expected.items():
        deviation = np.sqrt(count * probability * (1 - probability))
        assert abs(counts[tokens] - count * probability) <= 4.5 * deviation, tokens


def test_seed_decides_the_samples():
    model, sources = larger_language(), many_sources()
    first, again, other = (
        run(model, sources, SearchConfig(1, temperature=1.0, max_length=10, seed=seed))
        for seed in (1, 1, 2)
    )
    assert first == again
    differing = sum(a[0][0] != b[0][0] for a, b in zip(first, other, strict=True))
    assert differing > len(sources) / 2


@pytest.mark.parametrize(
    "config", [CONFIGS["beam"], CONFIGS["constrained"], CONFIGS["sampled"]], ids=str
)
def test_hypotheses_come_best_first(config):
    for rows in run(larger_language(), many_sources(), config):
        ranks = [penalized for _, _, penalized in rows]
        assert ranks == sorted(ranks, reverse=True)
        for tokens, score, penalized in rows:
            assert penalized == pytest.approx(
                score / length_penalty(len(tokens), config.alpha), rel=1e-5
            )
        if config.temperature == 0:
            assert len({tokens for tokens, _, _ in rows}) == config.n_best


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"beam_size": 0}, "--beam_size=0: write 1 or more"),
        ({"n_best": 5}, "write --beam_size=5 or more, or --n_best=4 or less"),
        ({"beam_size": 1, "n_best": 2}, "write --beam_size=2 or more"),
        ({"temperature": 1.0}, "write --beam_size=1 to sample or --temperature=0 to search"),
        ({"temperature": -1.0}, "--temperature=-1.0: write 0"),
        ({"temperature": float("nan")}, "--temperature=nan: write 0"),
        ({"sample_top_k": 5}, "write --temperature=1 --beam_size=1 to sample"),
        ({"sample_top_p": 0.9}, "write --temperature=1 --beam_size=1 to sample"),
        ({"beam_size": 1, "temperature": 1.0, "sample_top_p": 0.0}, "above 0 and at most 1"),
        ({"alpha": float("inf")}, "--beam_alpha=inf: write a finite number"),
        ({"max_length": 0}, "--max_length=0: write a number from 1"),
        ({"max_length_offset": -1}, "--max_length_offset=-1: write 0 or more"),
        ({"max_length": 5, "min_length": 6}, "--min_length=5 or less, or --max_length=6 or more"),
        ({"min_length": 60}, "write --min_length=51 or less, or --max_length=60 or more"),
        ({"no_repeat_ngram": -1}, "--no_repeat_ngram=-1: write 0 or more"),
    ],
)
def test_impossible_settings_say_what_to_write(settings, advice):
    with pytest.raises(UserError, match="^[^\n]*$") as caught:
        SearchConfig(**settings)
    assert advice in str(caught.value)


@pytest.fixture(scope="module")
def transformer():
    keras.utils.set_random_seed(1)
    model = build_model(
        "transformer_tiny", 40, num_layers=2, hidden_dim=32, intermediate_dim=64, num_heads=4
    )
    for weight in model.trainable_variables:
        weight.assign(weight * 1.5 + 0.02 * keras.random.normal(weight.shape, seed=3))
    return model


TRANSFORMER_SOURCES = [[5, 9, 2, 7, 1], [30, 1], [12, 13, 14, 15, 16, 17, 1], [1]]


@pytest.mark.parametrize(
    "config",
    [
        SearchConfig(1, max_length=8),
        SearchConfig(4, n_best=4, max_length_offset=4),
        SearchConfig(1, n_best=3, max_length=8, temperature=1.0),
    ],
    ids=("greedy", "beam", "sampled"),
)
def test_cached_scores_equal_teacher_forced_ones(transformer, config):
    rows = run(transformer, TRANSFORMER_SOURCES, config)
    for source, hypotheses in zip(TRANSFORMER_SOURCES, rows, strict=True):
        for tokens, score, _ in hypotheses:
            inputs = {
                "encoder_token_ids": pad([source]),
                "decoder_token_ids": pad([[0, *tokens[:-1]]]),
            }
            log_probs = ops.convert_to_numpy(ops.log_softmax(transformer(inputs)))[0]
            teacher_forced = log_probs[np.arange(len(tokens)), list(tokens)].sum()
            assert score == pytest.approx(teacher_forced, rel=1e-5)


def test_transformer_search_is_one_in_all_modes_and_batches(transformer, monkeypatch):
    import tensorflow as tf

    # Outputs of up to 11 tokens fill several pieces of the state.
    monkeypatch.setattr(decoding, "_SEGMENT", 3)
    config = SearchConfig(4, n_best=2, max_length_offset=4)
    together = run(transformer, TRANSFORMER_SOURCES, config)
    alone = [run(transformer, [source], config)[0] for source in TRANSFORMER_SOURCES]
    assert_same(alone, together)
    assert_same(run(transformer, TRANSFORMER_SOURCES, config, length=12), together)
    ids = tf.constant(pad(TRANSFORMER_SOURCES))

    def decode(ids):
        return search(transformer, {"encoder_token_ids": ids}, config)

    graph = tf.function(decode, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    assert_same(unpack(graph(ids)), together)
    assert_same(unpack(tf.function(decode, jit_compile=True)(ids)), together)


GENERATE = pathlib.Path(__file__).parent / "testdata" / "generate"
GENERATE_SIZES = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 24, "num_heads": 2}


def model_of_generate(**settings):
    """The model that Hugging Face's `generate` was run on; see testdata/generate/make.py."""
    model = build_model(
        "transformer_tiny", 30, **GENERATE_SIZES, norm="post", attention_bias=True, **settings
    )
    with np.load(GENERATE / "weights.npz") as weights:
        for weight in model.weights:
            weight.assign(weights[weight.path].astype("float32"))
    return model


@pytest.mark.parametrize("width", [1, 4, 8])
def test_output_of_hugging_face_generate(width):
    stored = json.loads((GENERATE / "outputs.json").read_text())
    model, sources = model_of_generate(), np.array(stored["sources"], "int32")
    theirs = [tuple(row) for row in stored["outputs"][str(width)]]
    inputs = {"encoder_token_ids": sources}
    ours = unpack(search(model, inputs, SearchConfig(width, 0.0, max_length=40)))
    their_scores = ops.convert_to_numpy(decoding.score(model, inputs, pad(map(list, theirs))))
    equal = 0
    for [(tokens, score, _)], expected, their_score in zip(ours, theirs, their_scores, strict=True):
        # It forgets ends of sentence that are candidates k to 2k.
        assert tokens == expected or score > their_score + 1e-4
        equal += tokens == expected
    assert equal == len(theirs) if width == 1 else equal > len(theirs) / 2


def test_bfloat16():
    """Scores within 2% of float32's of the same tokens; tokens equal where rounding cannot decide.

    Activations are rounded, so logits of size 8 may be off by 0.06.
    """
    float32, bfloat16 = model_of_generate(), model_of_generate(dtype="mixed_bfloat16")
    sources = json.loads((GENERATE / "outputs.json").read_text())["sources"]
    inputs = {"encoder_token_ids": np.array(sources, "int32")}
    for width in (1, 4):
        found = unpack(search(bfloat16, inputs, SearchConfig(width, 0.0, max_length=40)))
        targets = pad([list(rows[0][0]) for rows in found])
        expected = ops.convert_to_numpy(decoding.score(float32, inputs, targets))
        actual = np.array([rows[0][1] for rows in found])
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=0.05)
        assert np.mean(np.abs(actual / expected - 1)) < 0.02
        if width == 1:
            previous = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
            logits = float32({**inputs, "decoder_token_ids": previous})
            logits = ops.convert_to_numpy(logits)[..., 1:]
            chosen = np.take_along_axis(logits, np.maximum(targets - 1, 0)[..., None], axis=-1)
            margins = (logits.max(-1) - chosen[..., 0])[targets != 0]
            assert np.all(margins < 0.15)
            assert np.mean(margins == 0) > 0.9


def test_transformer_beam_equals_enumeration():
    keras.utils.set_random_seed(2)
    model = build_model(
        "transformer_tiny", VOCABULARY_SIZE, num_layers=1, hidden_dim=16, intermediate_dim=32
    )
    source, max_length = [3, 2, 4, 1], 3
    words = range(2, VOCABULARY_SIZE)
    candidates = [
        (*prefix, EOS)
        for length in range(max_length)
        for prefix in itertools.product(words, repeat=length)
    ]
    targets = pad([list(tokens) for tokens in candidates])
    previous = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    inputs = {
        "encoder_token_ids": np.repeat(pad([source]), len(candidates), axis=0),
        "decoder_token_ids": previous,
    }
    log_probs = ops.convert_to_numpy(ops.log_softmax(model(inputs)))
    picked = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    scores = (picked * (targets != 0)).sum(axis=1)
    expected = best_of(zip(scores, candidates, strict=True), 0.6, 5)
    config = SearchConfig(WORDS**max_length, 0.6, n_best=5, max_length=max_length)
    assert_same(run(model, [source], config), [expected])
