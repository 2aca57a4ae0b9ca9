"""From texts to texts: order, blank texts, scores, what load refuses."""

import keras
import numpy as np
import pytest

import tf_teaforn
from tf_teaforn.decoding import SearchConfig
from tf_teaforn.errors import UserError
from tf_teaforn.inference import search_config
from tf_teaforn.tf_backend import inference

SOURCES = [
    "I see the cat",
    "you have the bird",
    "the cat",
    "the dog the dog the dog the dog the dog the dog the dog the dog the dog the dog",
]


def test_load_and_call(translator):
    outputs = translator(SOURCES)
    assert [type(text) for text in outputs] == [str] * len(SOURCES)
    assert outputs[:2] == ["je vois le chat", "tu as le oiseau"]
    assert outputs == [hypotheses[0][0] for hypotheses in translator.decode(SOURCES)]


def test_no_text(translator):
    assert translator([]) == []
    assert translator.decode(["", " "]) == [[("", 0.0, 0.0)]] * 2
    assert translator.score([], []).shape == (0,)


def test_order_and_company_do_not_matter(translator):
    words = "I see the cat you have bird".split()
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, size)) for size in random.integers(1, 9, 40)]
    together = translator.decode(texts)
    for index in range(0, 40, 13):
        ((text, score, penalized),) = translator.decode([texts[index]])[0]
        assert together[index][0][0] == text
        np.testing.assert_allclose(together[index][0][1:], (score, penalized), rtol=1e-4)


def test_the_number_of_sentences_at_a_time_does_not_matter(trained, monkeypatch):
    translator = tf_teaforn.load(trained.model_dir, beam_size=2)
    texts = [*SOURCES, "", "the bird"]
    targets = ["je vois le chat", "le chien", "", "x", "le", "tu as le oiseau"]
    rows = []

    def counted(name):
        function = getattr(translator, name)

        def run(source_ids, *others):
            rows.append(len(source_ids))
            return function(source_ids, *others)

        monkeypatch.setattr(translator, name, run)

    counted("_search")
    counted("_score")
    assert translator.batch_size == 32
    decoded, scores = translator.decode(texts), translator.score(texts, targets)
    # Up to a power of two; pairs of one shape.
    assert max(rows) > 2
    rows.clear()
    translator.batch_size = 2
    again, scores_again = translator.decode(texts), translator.score(texts, targets)
    assert len(rows) >= 6 and max(rows) == 2
    assert [best[0][0] for best in again] == [best[0][0] for best in decoded]
    found, expected = ([best[0][1:] for best in results] for results in (again, decoded))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    np.testing.assert_allclose(scores_again, scores, rtol=1e-4)


def test_blank_texts_have_blank_answers(translator):
    blank = ["", "  ", "\t", "\n", "<n>", " <n> ", "\u00a0", "\u2028\u3000"]
    filled = ["the cat", "\u200b", ".", "<"]
    results = translator.decode([*blank, *filled])
    assert results[: len(blank)] == [[("", 0.0, 0.0)]] * len(blank)
    assert all(score < 0 for ((_, score, _),) in results[len(blank) :])


def test_newline_in_files_is_newline(translator):
    assert translator.decode(["cat<n>cat"]) == translator.decode(["cat\ncat"])
    assert translator.decode(["cat<n>cat"]) != translator.decode(["cat cat"])


def test_long_sources_are_cut(translator):
    # 24 subwords, the end of sentence being one.
    long = "the dog sees " * 20
    ids = translator.tokenizer.tokenize([long])[0, :23]
    cut = translator.tokenizer.detokenize(ids[None]).numpy()[0].decode()
    assert translator.decode([long]) == translator.decode([cut])


def test_n_best(n_best_translator):
    translator = n_best_translator
    for text, hypotheses in zip(SOURCES[:2], translator.decode(SOURCES[:2]), strict=True):
        texts, scores, penalized = zip(*hypotheses, strict=True)
        assert list(penalized) == sorted(penalized, reverse=True)
        assert len(set(texts)) == 2
        np.testing.assert_allclose(
            translator.score([text] * 2, texts), scores, rtol=1e-4, atol=1e-4
        )
        tokens = translator.tokenizer.tokenize(texts).row_lengths().numpy() + 1
        np.testing.assert_allclose(penalized, scores / ((5 + tokens) / 6), rtol=1e-5)


def test_score_is_the_sum_of_log_probabilities(translator):
    targets = ["je vois le chat", "le chien", "", "x"]
    scores = translator.score(SOURCES, targets)
    assert scores.dtype == np.float32
    for source, target, score in zip(SOURCES, targets, scores, strict=True):
        source_ids = translator.tokenizer.encode([source], 24).numpy()
        target_ids = translator.tokenizer.encode([target], 24).numpy()
        logits = translator.seq2seq(
            {
                "encoder_token_ids": source_ids,
                "decoder_token_ids": np.pad(target_ids, ((0, 0), (1, 0)))[:, :-1],
            }
        )
        (logits,) = keras.ops.convert_to_numpy(logits).astype(np.float64)
        log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = log_probabilities[np.arange(len(target_ids[0])), target_ids[0]].sum()
        np.testing.assert_allclose(score, expected, rtol=1e-4)


def test_average_lies_between(trained):
    table = [
        keras.ops.convert_to_numpy(
            tf_teaforn.load(trained.model_dir, checkpoint).seq2seq.embedding.weights[0]
        )
        for checkpoint in ("30", "latest", "average:2")
    ]
    np.testing.assert_allclose(table[2], (table[0] + table[1]) / 2, atol=1e-7)
    assert not np.array_equal(table[0], table[1])


def test_search_config_takes_the_run_s_settings(trained):
    from tf_teaforn.model_dir import read_config

    decoding = read_config(trained.model_dir).decoding
    search = search_config(decoding, n_best=2)
    assert (search.beam_size, search.alpha, search.max_length, search.n_best) == (4, 0.6, None, 2)


def test_refusals(trained, tmp_path):
    missing = tmp_path / "none"
    with pytest.raises(UserError, match=f"^--model_dir={missing}: there is no such folder"):
        tf_teaforn.load(missing)
    with pytest.raises(UserError, match=f"^--model_dir={tmp_path} has no config.json"):
        tf_teaforn.load(tmp_path)
    with pytest.raises(UserError, match="steps saved: 15, 30, 45$"):
        tf_teaforn.load(trained.model_dir, "20")
    with pytest.raises(UserError, match="^--n_best=5 exceeds --beam_size=4"):
        tf_teaforn.load(trained.model_dir, n_best=5)


def test_arguments_of_the_wrong_kind(translator):
    with pytest.raises(UserError, match="^A list of texts is needed"):
        translator("the cat")
    for pair in (("cat", "dog"), ("cat", list("dog")), (list("cat"), "dog")):
        with pytest.raises(UserError, match="^A list of texts is needed"):
            translator.score(*pair)
    with pytest.raises(UserError, match="^There are 1 sources and 2 targets"):
        translator.score(["the cat"], ["le chat", "le chien"])


def test_generators_are_lists(translator):
    sources, targets = ["I see the cat", "you have the bird"], ["je vois le chat", "le chat"]
    assert translator(source for source in sources) == translator(sources)
    scores = translator.score(iter(sources), iter(targets))
    np.testing.assert_array_equal(scores, translator.score(sources, targets))


@pytest.mark.parametrize("has_tpu", [False, True])
def test_weights_are_read_once_a_search_from_a_tpu(translator, monkeypatch, has_tpu):
    """Each reading is a copy there."""
    monkeypatch.setattr(inference, "_has_tpu", lambda: has_tpu)
    config = SearchConfig(beam_size=2, max_length=5)
    function = inference.search_function(translator.seq2seq, config)
    graph = function.get_concrete_function().graph.as_graph_def()
    # The loops' bodies.
    inside = {node.op for loop in graph.library.function for node in loop.node_def}
    assert {"BatchMatMulV2", "MatMul"} & inside
    assert ("ReadVariableOp" in inside) == (not has_tpu)
    reads = sum(node.op == "ReadVariableOp" for node in graph.node)
    assert (reads == len(translator.seq2seq.weights)) == has_tpu
    monkeypatch.undo()
    ids = translator.tokenizer.encode(SOURCES, 24)
    expected = inference.search_function(translator.seq2seq, config)(ids)
    for value, other in zip(function(ids), expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)
