import itertools
import json
import subprocess
import sys

import pytest

from tf_teaforn.errors import UserError
from tf_teaforn.metrics import compute_metrics

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


def test_bleu_and_signature_equal_the_sacrebleu_command_line(tmp_path):
    (tmp_path / "hypotheses").write_text("\n".join(HYPOTHESES) + "\n", encoding="utf-8")
    (tmp_path / "references").write_text("\n".join(REFERENCES) + "\n", encoding="utf-8")
    command = ["-m", "sacrebleu", "references", "-i", "hypotheses", "-m", "bleu", "-w", "10"]
    finished = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = json.loads(finished.stdout)

    result = compute_metrics(["bleu"], HYPOTHESES, REFERENCES)

    assert 0 < expected["score"] < 100
    assert result.values == {"bleu": pytest.approx(expected["score"], abs=1e-9)}
    assert result.signatures == {"bleu": expected["signature"]}
    assert "tok:13a" in expected["signature"]


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
