"""Gap sentences: literal documents, and rouge-score as the reference."""

import collections
import itertools
import random

import hypothesis
import pytest
from hypothesis import strategies
from rouge_score import rouge_scorer

from tests import documents
from tf_teaforn.data.gaps import (
    MASK,
    GapSettings,
    document_hash,
    gap_example,
    select_sentences,
    sentence_scores,
    split_sentences,
)
from tf_teaforn.errors import UserError

NEWS = (
    "The river rose on Monday. Dr. Lee said the river may flood the town.\n"
    "Nobody was hurt.  Schools stay closed. The town waits for the river to fall."
)
NEWS_SENTENCES = [
    "The river rose on Monday. ",
    "Dr. Lee said the river may flood the town.\n",
    "Nobody was hurt.  ",
    "Schools stay closed. ",
    "The town waits for the river to fall.",
]


def test_the_splitter_is_told_the_language(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "sentencex.segment", lambda language, text: asked.append(language) or [text]
    )
    gap_example(NEWS, GapSettings(language="fr"))
    assert asked == ["fr"]


def test_split_sentences():
    assert split_sentences(NEWS) == NEWS_SENTENCES
    assert split_sentences("  One. \n\n Two!\n") == ["  One. \n\n", " Two!\n"]
    assert split_sentences("Plan B\xa0.[1 fails. So\u2028what?") == [
        "Plan B\xa0.[1 fails. ",
        "So\u2028what?",
    ]
    assert split_sentences("") == split_sentences(" \n ") == []


@hypothesis.given(
    strategies.text(alphabet="aB .!?\n\r\t\u3002\u00e9\u2028\xa0<\U0001f600", max_size=80),
    strategies.sampled_from((1, 400)),
)
@hypothesis.settings(deadline=None)
def test_sentences_joined_are_the_text(text, times):
    text *= times
    sentences = split_sentences(text)
    assert "".join(sentences) == (text if text.strip() else "")
    assert all(sentence.strip() for sentence in sentences)


@pytest.mark.parametrize("blank", ["\n\n", "\n\r\n", "\n\n\n", " \n\n"])
@pytest.mark.parametrize("count", [3, 600])
def test_sentences_of_long_texts_begin_where_they_begin(blank, count):
    lines = [f"Sentence number {i} is here." for i in range(count)]
    text = f"\n\nA short title{blank}{' '.join(lines)}{blank}The end.{blank}"
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    stripped = [sentence.strip() for sentence in sentences]
    assert stripped == ["A short title", *lines, "The end."]


def rouge(sentences):
    scorer = rouge_scorer.RougeScorer(["rouge1"], use_stemmer=False)
    return [
        scorer.score(" ".join(sentences[:i] + sentences[i + 1 :]), sentence)["rouge1"].fmeasure
        for i, sentence in enumerate(sentences)
    ]


@pytest.mark.parametrize("document", documents.DOCUMENTS)
def test_scores_are_those_of_rouge_score(document):
    sentences = split_sentences(document)
    assert sentence_scores(sentences) == pytest.approx(rouge(sentences), abs=1e-12)


@hypothesis.given(
    strategies.lists(strategies.text(alphabet="abÀß1 _-\u2028\u0130", max_size=30), min_size=1)
)
@hypothesis.settings(deadline=None)
def test_scores_of_any_text_are_those_of_rouge_score(sentences):
    assert sentence_scores(sentences) == pytest.approx(rouge(sentences), abs=1e-12)


def test_the_sentences_of_the_highest_score_are_masked():
    settings = GapSettings(intact=0)
    # 2 of 5 sentences: those about the river and the town.
    assert gap_example(NEWS, settings) == (
        f"The river rose on Monday. {MASK}\nNobody was hurt.  Schools stay closed. {MASK}",
        "Dr. Lee said the river may flood the town. The town waits for the river to fall.",
    )
    lead = GapSettings(intact=0, selection="lead", ratio=0.6)
    assert gap_example("One two. Three four. Five six. Seven. Eight.", lead) == (
        f"{MASK} {MASK} {MASK} Seven. Eight.",
        "One two. Three four. Five six.",
    )
    assert gap_example("One two. Three.", GapSettings(intact=1)) == ("One two. Three.", "One two.")


@pytest.mark.parametrize("document", documents.DOCUMENTS)
def test_examples_are_those_of_a_brute_force_search(document):
    """Of all ways to take 45% of the sentences, the one of the highest scores by rouge-score."""
    sentences = split_sentences(document)
    scores = rouge(sentences)
    ways = itertools.combinations(range(len(sentences)), max(1, int(0.45 * len(sentences))))
    # Of equal ones, `max` takes the first: that of earlier sentences.
    best = max(ways, key=lambda way: round(sum(scores[i] for i in way), 9))
    gaps = [sentences[i].strip() for i in best]
    expected = document
    for sentence in gaps:
        assert expected.count(sentence) == 1
        expected = expected.replace(sentence, MASK)
    assert gap_example(document, GapSettings(intact=0)) == (expected.strip(), " ".join(gaps))


@pytest.mark.parametrize(
    ("count", "ratio", "expected"),
    [(2, 0.45, 1), (3, 0.01, 1), (5, 0.45, 2), (20, 0.45, 9), (20, 0.99, 19), (7, 0.5, 3)],
)
@pytest.mark.parametrize("selection", ["ind_orig", "random", "lead"])
def test_how_many_sentences_are_selected(count, ratio, expected, selection):
    sentences = [f"Word {i}. " for i in range(count)]
    settings = GapSettings(ratio=ratio, selection=selection)
    gaps = select_sentences(sentences, settings, random.Random(1))
    assert len(gaps) == expected
    assert gaps == sorted(set(gaps)) and 0 <= gaps[0] and gaps[-1] < count


def test_of_equal_scores_the_earlier_sentences_win():
    sentences = [f"same {i}." for i in range(10)]
    assert select_sentences(sentences, GapSettings(), random.Random(1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("document", ["", "One sentence only.", "  \n"])
def test_a_document_without_a_rest_has_no_example(document):
    assert gap_example(document, GapSettings()) is None


def test_the_first_sentences_are_used():
    long = "One two three. Four five. Six seven eight. Nine ten."
    source, target = gap_example(long, GapSettings(intact=0, max_words=8, ratio=0.6))
    assert (source, target) == (f"{MASK} Four five. Six seven eight.", "One two three.")
    assert gap_example(long, GapSettings(max_words=4)) is None


def test_a_mask_in_the_document_is_no_mask():
    example = gap_example(f"It says {MASK} here.\tNothing else.", GapSettings(intact=0))
    assert example == (f"{MASK} Nothing else.", "It says mask_1 here.")


def many_documents(count):
    draw = random.Random(0)
    return [
        " ".join(f"S{draw.randrange(50)} w{draw.randrange(50)} {i}." for _ in range(20))
        for i in range(count)
    ]


def test_a_share_of_the_selected_sentences_stays():
    masked = selected = 0
    for document in many_documents(300):
        source, target = gap_example(document, GapSettings())
        masked += source.count(MASK)
        selected += target.count(".")
        for sentence in target.split(". "):
            assert sentence.strip(".") in document
    assert selected == 300 * 9
    # Binomial, standard deviation 0.8%.
    assert abs(masked / selected - 0.8) < 0.03


def test_examples_depend_on_document_and_seed_alone():
    text = many_documents(40)
    settings = GapSettings(stochastic=True)
    first = [gap_example(document, settings) for document in text]
    random.seed(3)
    assert [gap_example(d, settings) for d in reversed(text)] == first[::-1]
    other = [gap_example(d, GapSettings(stochastic=True, seed=1)) for d in text]
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5
    # A hash that changed would change what a continued run sees.
    assert document_hash("A b. C d.", 0) == 62700927437114315


def test_random_selection_is_even():
    settings = GapSettings(selection="random", ratio=0.25)
    counts = collections.Counter()
    sentences = ["a."] * 8
    for seed in range(4000):
        counts.update(select_sentences(sentences, settings, random.Random(seed)))
    assert sum(counts.values()) == 8000
    # Standard deviation 27.
    assert all(abs(counts[i] - 1000) < 140 for i in range(8))


def test_the_stochastic_variant_draws_ratio_and_scores():
    sentences = [f"w{i % 7} common thing {i}." for i in range(100)]
    settings = GapSettings(stochastic=True)
    found = [select_sentences(sentences, settings, random.Random(seed)) for seed in range(200)]
    sizes = [len(gaps) for gaps in found]
    # Even from 15 to 45.
    assert min(sizes) in (14, 15, 16) and max(sizes) in (43, 44)
    assert abs(sum(sizes) / len(sizes) - 29.5) < 2
    # Noise of 20% turns the order of scores that are close, not of those that are far apart.
    far = ["x y z a b c", "a b c x y z", *(f"q{i}" for i in range(8))]
    assert sentence_scores(far)[:3] == [6 * 2 / 20, 6 * 2 / 20, 0]
    narrow = GapSettings(stochastic=True, ratio=0.2)
    picks = collections.Counter(
        tuple(select_sentences(far, narrow, random.Random(seed))) for seed in range(200)
    )
    assert picks.keys() == {(0,), (1,)}
    assert min(picks.values()) > 60


@pytest.mark.parametrize(
    ("name", "value"),
    [("ratio", 0), ("ratio", 1), ("intact", -0.1), ("selection", "best"), ("max_words", 1)]
    + [("seed", -1), ("seed", 2**64)],
)
def test_settings_out_of_range(name, value):
    with pytest.raises(UserError, match=rf"^--gap_{name}={value}: write "):
        GapSettings(**{name: value})


@pytest.mark.parametrize("language", ["english", "Egyptian Arabic", "", "?", "e"])
def test_a_language_that_is_none(language):
    """sentencex takes any for English."""
    with pytest.raises(UserError) as error:
        GapSettings(language=language)
    assert str(error.value) == (
        f"--gap_language={language}: write the ISO 639 code of a language, such as en."
    )


@pytest.mark.parametrize("language", ["en", "fr", "arz", "mhr", "pt-br", "be-tarask"])
def test_a_language_that_is_one(language):
    assert GapSettings(language=language).language == language
