import csv
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import sacrebleu

from tf_teaforn.errors import UserError
from tf_teaforn.metrics import (
    compare,
    compute_metrics,
    default_metrics,
    newline_warning,
    script_warning,
    tokenized_warning,
)

HYPOTHESES = [
    "The cat sat on the mat.",
    "He said: \"it's 3,000 km away\" - isn't it?",
    "Where are the keys of the red car",
    "",
    "Der Zug fährt um 8.30 Uhr in München ab.",
]
REFERENCES = [
    "The cat is sitting on the mat.",
    "He said: \"it's 3,000 miles away\", isn't it?",
    "Where are the keys to the red car?",
    "Nothing at all.",
    "Der Zug fährt um 8.30 Uhr aus München ab.",
]


def test_scores_and_signatures_equal_the_sacrebleu_command_line(tmp_path):
    (tmp_path / "hypotheses").write_text("\n".join(HYPOTHESES) + "\n", encoding="utf-8")
    (tmp_path / "references").write_text("\n".join(REFERENCES) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses", "-w", "10"]
    names = ("bleu", "chrf", "ter", "bleu_lc")
    result = compute_metrics(names, HYPOTHESES, REFERENCES)
    for flags, found in ((["-m", "bleu", "chrf", "ter"], names[:3]), (["-lc"], names[3:])):
        done = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, check=True)
        expected = json.loads(done.stdout)
        for name, score in zip(found, expected if len(found) > 1 else [expected], strict=True):
            assert 0 < score["score"] < 100
            assert result.values[name] == pytest.approx(score["score"], abs=1e-9)
            assert result.signatures[name] == score["signature"]
    assert "case:lc" in result.signatures["bleu_lc"] and "tok:13a" in result.signatures["bleu"]


def test_chrf_tells_unsegmented_texts_apart_and_bleu_does_not():
    references = ["私は猫を見ます。", "ฉันเห็นแมวตัวหนึ่ง", "我看见了一只猫。"]
    worse = [text[::-1] for text in references]
    better = [text[:-2] for text in references]
    outputs = (worse, better, references)
    found = [compute_metrics(["bleu", "chrf"], texts, references) for texts in outputs]
    assert [result.values["bleu"] for result in found] == [0, 0, 0]
    expected = [sacrebleu.corpus_chrf(texts, [references]).score for texts in outputs]
    assert [result.values["chrf"] for result in found] == expected
    assert expected == sorted(expected) and expected[0] < 25 and expected[1] > 60


def test_default_metrics_name_each_once():
    assert default_metrics(["bleu", "exact_match"]) == ("bleu", "exact_match", "chrf", "ter")
    assert default_metrics(["chrf", "bleu"]) == ("chrf", "bleu", "ter")
    assert default_metrics(["chrf"]) == ("chrf",)


def test_rouge_equals_the_rouge_score_command_line(tmp_path):
    (tmp_path / "targets").write_text("\n".join(REFERENCES) + "\n", encoding="utf-8")
    (tmp_path / "predictions").write_text("\n".join(HYPOTHESES) + "\n", encoding="utf-8")
    types = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    command = [
        *("-m", "rouge_score.rouge", "--use_stemmer", "--noaggregate"),
        *("--target_filepattern=targets", "--prediction_filepattern=predictions"),
        *("--output_filename=scores.csv", f"--rouge_types={','.join(types)}"),
    ]
    subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, check=True)
    rows = list(csv.DictReader((tmp_path / "scores.csv").open()))
    values = compute_metrics(["rouge"], HYPOTHESES, REFERENCES).values
    for name in types:
        expected = np.mean([float(row[f"{name}-F"]) for row in rows])
        assert values[name] == pytest.approx(100 * expected, abs=1e-3)


def subsequences(tokens):
    return {
        chosen
        for length in range(len(tokens) + 1)
        for chosen in itertools.combinations(tokens, length)
    }


def f_measure(hits, hypothesis_length, reference_length):
    if not hits:
        return 0.0
    precision, recall = hits / hypothesis_length, hits / reference_length
    return 2 * precision * recall / (precision + recall)


def brute_force_rouge_l(hypothesis, reference):
    hypothesis, reference = hypothesis.split(), reference.split()
    longest = max(map(len, subsequences(hypothesis) & subsequences(reference)))
    return f_measure(longest, len(hypothesis), len(reference))


def brute_force_rouge_n(hypothesis, reference, n):
    def ngrams(text):
        tokens = text.split()
        return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]

    hypothesis, reference = ngrams(hypothesis), ngrams(reference)
    unmatched = list(reference)
    for ngram in hypothesis:
        if ngram in unmatched:
            unmatched.remove(ngram)
    return f_measure(len(reference) - len(unmatched), len(hypothesis), len(reference))


def test_rouge_equals_brute_force_mean_over_examples():
    hypotheses = ["a b c d a", "b a", "c c c", "a b d c", "d"]
    references = ["a c b d a b", "a b", "c a c", "a b c d", "a"]
    pairs = list(zip(hypotheses, references, strict=True))

    values = compute_metrics(["rouge"], hypotheses, references).values

    mean_l = 100 * sum(brute_force_rouge_l(*pair) for pair in pairs) / len(pairs)
    assert values["rougeL"] == pytest.approx(mean_l)
    assert values["rougeLsum"] == pytest.approx(mean_l)  # each text is one sentence
    for n in (1, 2):
        mean_n = 100 * sum(brute_force_rouge_n(*pair, n) for pair in pairs) / len(pairs)
        assert values[f"rouge{n}"] == pytest.approx(mean_n)


def test_rouge_lsum_takes_lines_as_sentences():
    # Lin (2004), section 3.2: the union of both sentences' common subsequences is w1 w2 w3 w5.
    reference = "w1 w2 w3 w4 w5"
    hypothesis = "w1 w3 w8 w9 w5\nw1 w2 w6 w7 w8"

    values = compute_metrics(["rouge"], [hypothesis], [reference]).values

    assert values["rougeLsum"] == pytest.approx(100 * f_measure(4, 10, 5))
    assert values["rougeL"] == pytest.approx(100 * f_measure(3, 10, 5))


def test_rouge_stems_and_ignores_case_and_punctuation():
    values = compute_metrics(["rouge"], ["Dogs were running!"], ["dog were runs"]).values
    assert values["rouge1"] == pytest.approx(100)


def test_rouge_signature_names_settings_and_version():
    signatures = compute_metrics(["rouge"], ["a"], ["a"]).signatures
    assert set(signatures) == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    (signature,) = set(signatures.values())
    settings = dict(item.split(":") for item in signature.split("|"))
    assert settings["stemmer"] == "porter"
    assert settings["measure"] == "f1"
    assert settings["lsum"] == "newline"
    assert settings["version"].startswith("rouge-score-")


def test_exact_match_is_a_percentage_of_equal_texts():
    result = compute_metrics(["exact_match"], ["a b", "A b", "a b ", "c"], ["a b"] * 3 + ["c"])
    assert result.values == {"exact_match": 50.0}


def test_identical_texts_score_100_in_everything():
    text = ["The quick brown fox jumps over the lazy dog."]
    result = compute_metrics(("bleu", "rouge", "exact_match"), text, text)
    assert set(result.values) == set(result.signatures)
    assert list(result.values.values()) == pytest.approx([100] * len(result.values))


def test_unusable_input_is_refused():
    with pytest.raises(ValueError, match="2 hypotheses for 1 references"):
        compute_metrics(["bleu"], ["a", "b"], ["a"])
    with pytest.raises(ValueError, match="no texts"):
        compute_metrics(["bleu"], [], [])
    with pytest.raises(UserError, match="'meteor'.*bleu, rouge, exact_match"):
        compute_metrics(["meteor"], ["a"], ["a"])
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        compare("bleu", ["a"], ["a", "b"], ["a", "b"])


BASELINE = ["A cat is on the mat.", "He said: it is far away.", "Where are they?", "Nothing", "Der"]


def test_paired_bootstrap_equals_brute_force():
    """From scores of the resampled texts themselves, on sacreBLEU's random indices."""
    indices = np.random.default_rng(12345).choice(5, size=(1000, 5), replace=True)

    def corpus(texts, rows):
        chosen = [[texts[i] for i in rows], [[REFERENCES[i] for i in rows]]]
        return sacrebleu.BLEU().corpus_score(*chosen).score

    def mean(texts, rows):
        chosen = [[texts[i] for i in rows], [REFERENCES[i] for i in rows]]
        return compute_metrics(["rouge"], *chosen).values["rougeL"]

    for value, score, count in (("bleu", corpus, 1000), ("rougeL", mean, 1000)):
        cache = {}
        differences = []
        for rows in map(tuple, np.sort(indices[:count], axis=1)):
            if rows not in cache:
                cache[rows] = abs(score(HYPOTHESES, rows) - score(BASELINE, rows))
            differences.append(cache[rows])
        real = score(HYPOTHESES, range(5)) - score(BASELINE, range(5))
        extreme = np.sum(np.array(differences) - np.mean(differences) > abs(real))
        found = compare(value, BASELINE, HYPOTHESES, REFERENCES)
        assert found.system - found.baseline == pytest.approx(real)
        assert found.p_value == pytest.approx((extreme + 1) / 1001, abs=0.003)
        assert "bs:1000" in found.signature and "seed:12345" in found.signature
    assert compare("bleu", HYPOTHESES, HYPOTHESES, REFERENCES).p_value == 1
    # As bad as each other.
    assert compare("bleu", ["x"] * 5, ["y"] * 5, REFERENCES).p_value == 1


def test_p_value_is_one_sided_and_its_double_is_not():
    """Between systems that are right equally often."""
    rng = np.random.default_rng(0)
    p_values, scores = [], []
    for _ in range(500):
        first, second = (["ab"[wrong] for wrong in rng.integers(2, size=200)] for _ in range(2))
        found = compare("exact_match", first, second, ["a"] * 200)
        p_values.append(found.p_value)
        scores.append(found.system - found.baseline)
    p_values = np.array(p_values)
    assert np.mean(p_values < 0.05) == pytest.approx(0.11, abs=0.03)
    assert np.mean(2 * p_values < 0.05) == pytest.approx(0.05, abs=0.02)
    assert 0.4 < max(p_values[np.array(scores) != 0]) < 0.45


def test_intervals_are_those_of_resampled_examples():
    state = np.random.get_state()[1].copy()
    result = compute_metrics(("bleu", "rouge", "exact_match"), HYPOTHESES, REFERENCES, True)
    assert set(result.intervals) == set(result.values) - {"exact_match"}
    for name, (low, high) in result.intervals.items():
        assert low < result.values[name] < high
    indices = np.random.default_rng(0).choice(5, size=(5000, 5))
    singles = [
        compute_metrics(["rouge"], [hypothesis], [reference]).values["rouge1"]
        for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True)
    ]
    expected = np.percentile(np.array(singles)[indices].mean(axis=1), [2.5, 97.5])
    np.testing.assert_allclose(result.intervals["rouge1"], expected, atol=2)
    np.testing.assert_array_equal(np.random.get_state()[1], state)


def test_scripts_that_rouge_does_not_see_are_noticed():
    russian = ["Это дом.", "Кот спит.", "Поезд 7."]
    assert compute_metrics(["rouge"], russian[:2], russian[:2]).values["rouge1"] == 0
    assert script_warning(["rouge"], russian).startswith("2 of 3 references have none of the ")
    assert script_warning(["bleu", "chrf"], russian) is None
    # Half of them are seen.
    assert script_warning(["rouge"], ["Äh, ja.", "Это"]) is None


def test_tokenised_text_is_noticed():
    plain = ["Yes, he came. No, he left.", "Prix : 3,5 € ; merci !"] * 3
    assert tokenized_warning(plain, plain) is None
    apart = ["Yes , he came .", "No , he left ."] * 3
    assert tokenized_warning(apart, plain).startswith("12 of 12 commas and stops of the hypotheses")
    assert "of the references" in tokenized_warning(plain, apart)
    assert tokenized_warning(["fe@@ w"], plain).startswith("1 of 1 hypotheses have subword marks")
    assert "subword marks" in tokenized_warning(["\u2581few"], plain)
    # Too few to tell.
    assert tokenized_warning(["a , b"], ["a, b"]) is None


def test_newlines_count_as_spaces_for_bleu():
    texts, references = ["a well-\nknown man\nwalks his dog"], ["a well- known man walks his dog"]
    for name in ("bleu", "chrf", "ter"):
        value = compute_metrics([name], texts, references).values[name]
        assert value == pytest.approx(0.0 if name == "ter" else 100.0)
    assert compare("bleu", texts, texts, references).system == pytest.approx(100.0)


def test_lines_against_one_line_are_warned_of():
    lines, line = ["a\nb", "c\nd", "e"], ["a b", "c d", "e"]
    warning = newline_warning(["rouge"], line, lines)
    assert warning.startswith("2 of 3 references have several lines, no hypothesis has: ROUGE-Lsum")
    for names, hypotheses, references in (
        (["bleu"], line, lines),
        (["rouge"], lines, lines),
        (["rouge"], line, ["a", "b", "c\nd"]),
    ):
        assert newline_warning(names, hypotheses, references) is None
