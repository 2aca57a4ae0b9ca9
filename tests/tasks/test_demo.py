import datetime
import hashlib
import os
import random
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import demo_generator, demo_phrases
from tf_teaforn.task import get_task

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def corpus():
    return {
        (language, split): demo_generator.pairs(language, split)
        for language in ("fr", "de")
        for split in SPLITS
    }


@pytest.mark.parametrize("language", ["fr", "de"])
def test_sizes_and_sentences_of_one_split_only(corpus, language):
    splits = [corpus[language, split] for split in SPLITS]
    assert [len(pairs) for pairs in splits] == [20_000, 500, 500]
    for side in (0, 1):
        sentences = [pair[side] for pairs in splits for pair in pairs]
        assert len(set(sentences)) == len(sentences)


NUMBER_WORD = (
    "(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen"
    "|sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
    "|hundred|thousand)"
)


@pytest.mark.parametrize(
    "pattern, in_test",
    [
        (r"\b[A-Z][a-z]+ \d{1,2}, \d{4}\b", 100),
        (r"\b\d{1,2}:\d\d [AP]M\b", 40),
        (rf"\b{NUMBER_WORD}(?:(?:-|, | and | ){NUMBER_WORD})*\b", 30),
    ],
    ids=["dates", "times", "spelled numbers"],
)
@pytest.mark.parametrize("language", ["fr", "de"])
def test_dates_times_and_spelled_numbers_of_one_split_only(corpus, language, pattern, in_test):
    found = [
        {
            match.lower()
            for source, _ in corpus[language, split]
            for match in re.findall(pattern, source, re.IGNORECASE)
        }
        for split in SPLITS
    ]
    assert len(found[2]) >= in_test
    assert found[0].isdisjoint(found[1] | found[2])
    assert found[1].isdisjoint(found[2])


@pytest.mark.parametrize("language", ["fr", "de"])
def test_sentences_are_short_and_plainly_spaced(corpus, language):
    for split in SPLITS:
        for pair in corpus[language, split]:
            for sentence in pair:
                assert 4 <= len(sentence.split(" ")) <= 16, sentence
                assert re.fullmatch(r"[^\s{}]+( [^\s{}]+)*", sentence), ascii(sentence)
                assert sentence.endswith((".", "?")) and sentence[0].isupper(), sentence


def test_another_process_with_another_hash_seed_makes_the_same_pairs(corpus):
    def digest(pairs):
        return hashlib.sha256(repr(pairs).encode()).hexdigest()

    script = (
        "import hashlib\n"
        "from tasks import demo_generator\n"
        # The first of them come first however many follow.
        "demo_generator.SIZES['train'] = 1000\n"
        "pairs = demo_generator.pairs('de', 'test') + demo_generator.pairs('de', 'train')\n"
        "print(hashlib.sha256(repr(pairs).encode()).hexdigest())"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split()[-1] == digest(corpus["de", "test"] + corpus["de", "train"][:1000])


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="no split 'dev'; there are test, validation, train"):
        demo_generator.pairs("fr", "dev")


def test_templates_have_the_same_fields_in_every_language():
    for template in demo_phrases.TEMPLATES:
        english, french, german = (
            sorted(field for _, field, _, _ in string.Formatter().parse(text) if field)
            for text in template
        )
        assert english == french == german, template


MAY_DAY = datetime.date(2021, 5, 1)
MONDAY = datetime.date(2021, 5, 3)
EVENING = datetime.time(21, 5)


@pytest.mark.parametrize(
    "values, english, french, german",
    [
        (
            {"event": demo_phrases.EVENTS[0], "date": MONDAY},
            "The meeting is on Monday, May 3, 2021.",
            "La réunion a lieu le lundi 3 mai 2021.",
            "Das Treffen ist am Montag, dem 3. Mai 2021.",
        ),
        (
            {"event": demo_phrases.EVENTS[2], "date": MAY_DAY, "time": EVENING},
            "The exam begins on Saturday, May 1, 2021 at 9:05 PM.",
            "L’examen commence le samedi 1er mai 2021 à 21 h 05.",
            "Die Prüfung beginnt am Samstag, dem 1. Mai 2021, um 21:05 Uhr.",
        ),
        (
            {"today": datetime.date(1999, 12, 31)},
            "Today is Friday, December 31, 1999.",
            "Aujourd’hui, nous sommes le vendredi 31 décembre 1999.",
            "Heute ist Freitag, der 31. Dezember 1999.",
        ),
        (
            {"woman": "Anna", "inside": "JP", "past": datetime.date(1985, 3, 1)},
            "Anna was born in Japan on March 1, 1985.",
            "Anna est née au Japon le 1er mars 1985.",
            "Anna wurde am 1. März 1985 in Japan geboren.",
        ),
        (
            {"time": datetime.time(0, 30), "inside": "FR"},
            "It is 12:30 AM in France.",
            "Il est 0 h 30 en France.",
            "In Frankreich ist es 00:30 Uhr.",
        ),
        (
            {"name": "Paul", "origin": "IT", "language": "fi"},
            "Paul comes from Italy and speaks Finnish.",
            "Paul vient d’Italie et parle finnois.",
            "Paul kommt aus Italien und spricht Finnisch.",
        ),
        (
            {"name": "Eva", "studied": "ar", "past": MONDAY},
            "Eva has been learning Arabic since May 3, 2021.",
            "Eva apprend l’arabe depuis le 3 mai 2021.",
            "Eva lernt seit dem 3. Mai 2021 Arabisch.",
        ),
        (
            {"goal": "MX", "duration": ((11, "hour"), (25, "minute"))},
            "The flight to Mexico takes 11 hours and 25 minutes.",
            "Le vol pour le Mexique dure 11 heures et 25 minutes.",
            "Der Flug nach Mexiko dauert 11 Stunden und 25 Minuten.",
        ),
        (
            {"origin": "DK", "ago": 3 * 86400},
            "The letter from Denmark arrived 3 days ago.",
            "La lettre du Danemark est arrivée il y a 3 jours.",
            "Der Brief aus Dänemark ist vor 3 Tagen angekommen.",
        ),
        (
            {"event": demo_phrases.EVENTS[1], "soon": 2 * 30 * 86400},
            "The concert begins in 2 months.",
            "Le concert commence dans 2 mois.",
            "Das Konzert beginnt in 2 Monaten.",
        ),
        (
            {"name": "Hugo", "money": (123_450, "CHF"), "goods": demo_phrases.GOODS[0]},
            "Hugo paid 1,234.50 Swiss francs for the book.",
            "Hugo a payé 1 234,50 francs suisses pour le livre.",
            "Hugo hat 1.234,50 Schweizer Franken für das Buch bezahlt.",
        ),
        (
            {"memory": (12_345, "digital-megabyte")},
            "The file takes up 1,234.5 megabytes.",
            "Le fichier occupe 1 234,5 mégaoctets.",
            "Die Datei belegt 1.234,5 Megabyte.",
        ),
        (
            {"count": 80_371, "inside": "IN"},
            "The company employs eighty thousand, three hundred and seventy-one workers in India.",
            "L’entreprise emploie quatre-vingt mille trois cent soixante et onze ouvriers en Inde.",
            "Die Firma beschäftigt in Indien achtzigtausenddreihunderteinundsiebzig Arbeiter.",
        ),
        (
            {"comparison": (21, 2_000)},
            "Twenty-one is less than two thousand.",
            "Vingt et un est inférieur à deux mille.",
            "Einundzwanzig ist kleiner als zweitausend.",
        ),
    ],
)
def test_literal_sentences(values, english, french, german):
    def fields(template):
        return {field for _, field, _, _ in string.Formatter().parse(template) if field}

    # Of the templates with these fields, the one that makes the English sentence.
    made = {
        demo_generator.fill(template[0], values, "en"): [
            demo_generator.fill(text, values, language)
            for text, language in zip(template[1:], ("fr", "de"), strict=True)
        ]
        for template in demo_phrases.TEMPLATES
        if fields(template[0]) == set(values)
    }
    assert made[english] == [french, german]


@pytest.mark.parametrize(
    "code, inside, origin, goal",
    [
        ("FR", "En France", "De France", "Pour la France"),
        ("CA", "Au Canada", "Du Canada", "Pour le Canada"),
        ("AF", "En Afghanistan", "D’Afghanistan", "Pour l’Afghanistan"),
        ("EE", "En Estonie", "D’Estonie", "Pour l’Estonie"),
        ("ET", "En Éthiopie", "D’Éthiopie", "Pour l’Éthiopie"),
        ("KR", "En Corée du Sud", "De Corée du Sud", "Pour la Corée du Sud"),
        ("KH", "Au Cambodge", "Du Cambodge", "Pour le Cambodge"),
        ("ZW", "Au Zimbabwe", "Du Zimbabwe", "Pour le Zimbabwe"),
        ("UY", "En Uruguay", "D’Uruguay", "Pour l’Uruguay"),
        ("SV", "Au Salvador", "Du Salvador", "Pour le Salvador"),
    ],
)
def test_french_prepositions_of_countries(code, inside, origin, goal):
    made = [
        demo_generator.fill(f"{{{field}}}", {field: code}, "fr")
        for field in ("inside", "origin", "goal")
    ]
    assert made == [inside, origin, goal]


@pytest.mark.parametrize(
    "code, studied",
    [("he", "L’hébreu"), ("hu", "Le hongrois"), ("uk", "L’ukrainien"), ("yo", "Le yoruba")],
)
def test_french_articles_of_languages(code, studied):
    assert demo_generator.fill("{studied}", {"studied": code}, "fr") == studied


ENGLISH = (
    "_ one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
ENGLISH_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
FRENCH = (
    "_ un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize "
    "dix-sept dix-huit dix-neuf"
).split()
FRENCH_TENS = "_ _ vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt"
FRENCH_TENS = FRENCH_TENS.split()
GERMAN = (
    "_ ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
    "sechzehn siebzehn achtzehn neunzehn"
).split()
GERMAN_TENS = "_ _ zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def english(n):
    if n < 20:
        return ENGLISH[n]
    if n < 100:
        return ENGLISH_TENS[n // 10] + (f"-{ENGLISH[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{ENGLISH[n // 100]} hundred" + (f" and {english(n % 100)}" if n % 100 else "")
    rest = n % 1000
    joint = ", " if rest >= 100 else " and "
    return f"{english(n // 1000)} thousand" + (joint + english(rest) if rest else "")


def french(n, at_end=True):
    """The spelling before 1990's: hyphens below one hundred only, where no "et" stands.

    "Vingt" and "cent" take an "s" where multiplied and last, and not before "mille".
    """
    plural = "s" if at_end else ""
    if n < 20:
        return FRENCH[n]
    if n < 100:
        tens = n // 10
        rest = n - 10 * (tens - 1 if tens in (7, 9) else tens)
        if not rest:
            return FRENCH_TENS[tens] + (plural if tens == 8 else "")
        return FRENCH_TENS[tens] + (" et " if rest in (1, 11) and tens < 8 else "-") + FRENCH[rest]
    if n < 1000:
        hundreds = f"{FRENCH[n // 100]} cent" if n >= 200 else "cent"
        if n % 100 == 0:
            return hundreds + (plural if n > 100 else "")
        return f"{hundreds} {french(n % 100, at_end)}"
    thousands = "mille" if n < 2000 else f"{french(n // 1000, at_end=False)} mille"
    return thousands + (f" {french(n % 1000, at_end)}" if n % 1000 else "")


def german(n):
    """One word; "eins" at the very end only, "ein" inside."""

    def inside(n):
        if n < 20:
            return GERMAN[n] if n else ""
        if n < 100:
            unit = f"{GERMAN[n % 10]}und" if n % 10 else ""
            return unit + GERMAN_TENS[n // 10]
        if n < 1000:
            return f"{GERMAN[n // 100]}hundert{inside(n % 100)}"
        return f"{inside(n // 1000)}tausend{inside(n % 1000)}"

    return inside(n) + ("s" if n % 100 == 1 else "")


def test_the_spellers_of_this_test_know_the_hard_cases():
    assert [french(n) for n in (71, 80, 81, 91, 200, 201, 280, 1000, 80_000, 200_000, 21_021)] == [
        "soixante et onze",
        "quatre-vingts",
        "quatre-vingt-un",
        "quatre-vingt-onze",
        "deux cents",
        "deux cent un",
        "deux cent quatre-vingts",
        "mille",
        "quatre-vingt mille",
        "deux cent mille",
        "vingt et un mille vingt et un",
    ]
    assert [german(n) for n in (1, 21, 101, 1001, 21_000, 101_000)] == [
        "eins",
        "einundzwanzig",
        "einhunderteins",
        "eintausendeins",
        "einundzwanzigtausend",
        "einhunderteintausend",
    ]


@pytest.mark.parametrize(
    "language, oracle", [("en", english), ("fr", french), ("de", german)], ids=["en", "fr", "de"]
)
def test_spelled_numbers_follow_the_rules(language, oracle):
    sample = random.Random(0).sample(range(2_000, 1_000_000), 4_000)
    edges = [1000 * n + rest for n in range(1, 1000) for rest in (0, 1, 200)]
    for n in {*range(1, 2_000), *sample, *edges}:
        if demo_generator.is_well_spelled(n):
            assert demo_generator.spell(n, language) == oracle(n)


def test_only_misspelled_numbers_are_left_out():
    left_out = [n for n in range(1, 1_000_000) if not demo_generator.is_well_spelled(n)]
    assert len(left_out) == 9_000
    assert demo_generator.spell(101_000, "de") == "einhunderteinstausend"
    for n in random.Random(0).sample(left_out, 500):
        assert demo_generator.spell(n, "de") != german(n)


@pytest.mark.parametrize("name, language", [("demo_enfr", "fr"), ("demo_ende", "de")])
def test_the_tasks_yield_the_pairs(corpus, name, language):
    task = get_task(name)
    assert task.source.splits == SPLITS
    dataset = task.source.dataset("test").as_numpy_iterator()
    assert [(s.decode(), t.decode()) for s, t in dataset] == corpus[language, "test"]
    assert task.headline_metric in task.metrics


def test_the_tasks_have_fingerprints_of_their_own():
    prints = {
        get_task(name).source.fingerprint(split)
        for name in ("demo_enfr", "demo_ende")
        for split in SPLITS
    }
    assert len(prints) == 6
