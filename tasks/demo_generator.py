"""Sentence pairs composed from locale data: English to French, English to German.

Dates, times, durations, units, money, countries, languages and currencies come from the Unicode
CLDR (https://cldr.unicode.org) as Babel ships it, spelled-out numbers from num2words. A sentence is
a template whose fields are filled with the same values in both languages, so that every reference
is exact. `pairs` depends on its arguments and the releases of the two libraries alone.
"""

import datetime
import functools
import hashlib
import random
import re
import string
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import num2words
from babel import Locale, dates, lists, numbers, units

from tasks import demo_phrases as phrases

VERSION = 1  # raised with any change of what `pairs` yields
SIZES = {"test": 500, "validation": 500, "train": 20_000}
MAX_WORDS = 16


def pairs(language: str, split: str) -> list[tuple[str, str]]:
    """(English, `language`) sentences: "fr" or "de"; "train", "validation" or "test".

    No sentence of either side occurs twice, be it in one split or in two. A date, a time of day or
    a spelled-out number occurs in one split only.
    """
    if split not in SIZES:
        raise ValueError(f"no split {split!r}; there are {', '.join(SIZES)}")
    seen: set[str] = set()
    for name, size in SIZES.items():
        # A string seeds `random` through SHA-512, alike in every process.
        candidates = _compose(language, name, random.Random(f"demo {name}"))
        chosen: list[tuple[str, str]] = []
        while len(chosen) < size:
            pair = next(candidates)
            if seen.isdisjoint(pair):
                seen.update(pair)
                chosen.append(pair)
        if name == split:
            break
    return chosen


def is_well_spelled(number: int) -> bool:
    """Whether num2words 0.5.14 spells `number`, 1 to 999,999, right in all three languages.

    In German it writes "eins" for "ein" before "tausend": "einhunderteinstausend" for 101,000,
    which is "einhunderteintausend".
    """
    thousands = number // 1000
    return thousands < 100 or thousands % 100 != 1


def spell(number: int, language: str) -> str:
    """`number` in words."""
    return num2words.num2words(number, lang=language)


def _compose(language: str, split: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    column = phrases.LANGUAGES.index(language)
    while True:
        template = rng.choice(phrases.TEMPLATES)
        values: dict[str, Hashable] = {}
        for _, field, _, _ in string.Formatter().parse(template[0]):
            if field:
                values[field] = _kind(field).draw(rng, split)
        if len(set(values.values())) < len(values):
            continue  # two equal values, as in "speaks Thai, but not Thai"
        source = fill(template[0], values, "en")
        target = fill(template[column], values, language)
        if max(len(source.split()), len(target.split())) <= MAX_WORDS:
            yield source, target


def fill(template: str, values: Mapping[str, Hashable], language: str) -> str:
    """The sentence of `template` with `values`, field -> value, in "en", "fr" or "de"."""
    texts = {field: _kind(field).render(value, language) for field, value in values.items()}
    # CLDR sets no-break and narrow no-break spaces; `split` takes all white space.
    sentence = " ".join(template.format(**texts).split())
    return sentence[0].upper() + sentence[1:]


# Drawing: (rng, split) -> value.


def _split_of(group: str, value: Hashable) -> str:
    digest = hashlib.sha256(f"{group} {value}".encode()).digest()
    return {0: "test", 1: "validation"}.get(int.from_bytes(digest[:4], "big") % 20, "train")


def _draw_own(split: str, group: str, draw: Callable[[], Any]) -> Any:
    """Draws until the value is one of the split's."""
    while _split_of(group, value := draw()) != split:
        pass
    return value


def _draw_date(
    rng: random.Random, split: str, first_year: int = 1990, last_year: int = 2039
) -> datetime.date:
    first = datetime.date(first_year, 1, 1).toordinal()
    last = datetime.date(last_year, 12, 31).toordinal()
    return _draw_own(split, "date", lambda: datetime.date.fromordinal(rng.randint(first, last)))


def _draw_time(rng: random.Random, split: str) -> datetime.time:
    return _draw_own(split, "time", lambda: datetime.time(rng.randrange(24), rng.randrange(60)))


def _draw_number(rng: random.Random, split: str, max_digits: int = 6) -> int:
    def draw() -> int:
        digits = rng.randint(2, max_digits)
        while not is_well_spelled(number := rng.randrange(10 ** (digits - 1), 10**digits)):
            pass
        return number

    return _draw_own(split, "number", draw)


def _draw_count(rng: random.Random, split: str) -> int:
    # Before a noun German wavers at ...01: "hunderteins", "hundertein" or "hundertundein Wörter".
    while (number := _draw_number(rng, split)) % 100 == 1:
        pass
    return number


def _draw_comparison(rng: random.Random, split: str) -> tuple[int, ...]:
    return tuple(sorted(_draw_number(rng, split, max_digits=4) for _ in range(2)))


# Amounts start at 2: singular forms would need the gender, and in German the case.


def _draw_money(rng: random.Random, split: str) -> tuple[int, str]:
    """Hundredths, currency."""
    return rng.randrange(200, 10 ** rng.randint(3, 6)), rng.choice(phrases.CURRENCIES)


def _draw_measure(kind: str, rng: random.Random, split: str) -> tuple[int, str]:
    """Tenths, unit."""
    unit, largest = rng.choice(phrases.UNITS[kind])
    return rng.randrange(20, 10 * largest), unit


def _draw_duration(
    table: Sequence[tuple[str, int, str, int]], rng: random.Random, split: str
) -> tuple[tuple[int, str], ...]:
    """One or two of (amount, unit)."""
    unit, largest, smaller_unit, smaller_largest = rng.choice(table)
    parts = ((rng.randint(2, largest), unit), (rng.randint(2, smaller_largest), smaller_unit))
    return parts[: rng.randint(1, 2)]


def _draw_offset(rng: random.Random, split: str) -> int:
    """Seconds."""
    seconds, largest = rng.choice(phrases.OFFSETS)
    return seconds * rng.randint(2, largest)


# Rendering: (value, language) -> text.


def _date(date: datetime.date, language: str, width: str) -> str:
    text = dates.format_date(date, width, locale=language)
    if language == "fr" and date.day == 1:  # CLDR has "1 mai" for "1er mai"
        return re.sub(r"\b1 ", "1er ", text, count=1)
    return text


def _weekday_date(date: datetime.date, language: str, article: str) -> str:
    """`article`: the German one before the day."""
    if language == "de":
        return dates.format_date(date, f"EEEE, '{article}' d. MMMM y", locale="de")
    return _date(date, language, "full")


def _time(time: datetime.time, language: str) -> str:
    if language == "fr":
        return dates.format_time(time, "H 'h' mm", locale="fr")
    text = dates.format_time(time, "short", locale=language)
    return f"{text} Uhr" if language == "de" else text


def _comparison(pair: tuple[int, int], language: str) -> str:
    words = phrases.LESS_THAN[phrases.LANGUAGES.index(language)]
    return f"{spell(pair[0], language)} {words} {spell(pair[1], language)}"


def _money(amount: tuple[int, str], language: str) -> str:
    hundredths, currency = amount
    return numbers.format_currency(
        Decimal(hundredths) / 100, currency, locale=language, format_type="name"
    )


def _measure(amount: tuple[int, str], language: str) -> str:
    tenths, unit = amount
    return units.format_unit(Decimal(tenths) / 10, unit, locale=language)


def _duration(parts: tuple[tuple[int, str], ...], language: str) -> str:
    texts = [units.format_unit(n, f"duration-{unit}", locale=language) for n, unit in parts]
    return lists.format_list(texts, locale=language)


def _offset(seconds: int, language: str) -> str:
    return dates.format_timedelta(
        datetime.timedelta(seconds=seconds), threshold=1, add_direction=True, locale=language
    )


def _territory(code: str, language: str) -> str:
    return Locale(language).territories[code]


def _language(code: str, language: str) -> str:
    return Locale(language).languages[code]


def _currency(code: str, language: str) -> str:
    return Locale(language).currencies[code]


def _country(code: str, language: str, forms: dict[str, str]) -> str:
    """A country after a preposition; French has one form before vowels, one for each gender."""
    name = _territory(code, language)
    if language != "fr":
        return forms[language] + name
    if name[0] in "AEÉIÎOU":
        return forms["fr vowel"] + name
    is_feminine = name.split()[0].endswith("e") and code not in phrases.MASCULINE_IN_E
    return forms["fr feminine" if is_feminine else "fr masculine"] + name


def _studied(code: str, language: str) -> str:
    """A language after "to learn", where French has the article."""
    name = _language(code, language)
    if language != "fr":
        return name
    return f"l’{name}" if name[0] in "aeéiou" or name == "hébreu" else f"le {name}"


def _plain_codes(field: str, pattern: str, name: str) -> tuple[str, ...]:
    """The CLDR codes like `pattern` whose names match `name` in all three languages."""
    tables = [getattr(Locale(language), field) for language in phrases.LANGUAGES]
    return tuple(
        code
        for code in sorted(tables[0])
        if re.fullmatch(pattern, code)
        and all(code in table and re.fullmatch(name, table[code]) for table in tables)
    )


class _Kind(NamedTuple):
    """What a field of a template stands for."""

    draw: Callable[[random.Random, str], Hashable]  # (rng, split) -> value
    render: Callable[[Any, str], str]  # (value, language) -> text


def _row(rows: Sequence[tuple[str, str, str]]) -> _Kind:
    return _Kind(
        lambda rng, split: rng.choice(rows),
        lambda row, language: row[phrases.LANGUAGES.index(language)],
    )


def _name(names: Sequence[str]) -> _Kind:
    return _Kind(lambda rng, split: rng.choice(names), lambda name, language: name)


def _code(codes: Sequence[str], render: Callable[[str, str], str]) -> _Kind:
    return _Kind(lambda rng, split: rng.choice(codes), functools.cache(render))


def _after(forms: dict[str, str]) -> _Kind:
    return _code(phrases.COUNTRIES, functools.partial(_country, forms=forms))


# Not the unions and regions (EU, EZ, QO, UN), pseudo-locales (XA, XB) and "unknown" (ZZ).
_TERRITORIES = _plain_codes("territories", "(?!EU|EZ|QO|UN|XA|XB|ZZ)[A-Z]{2}", "[^(),]+")
_LANGUAGES = _plain_codes("languages", "[a-z]{2}", "[^(), ]+")

_KINDS = {
    "event": _row(phrases.EVENTS),
    "building": _row(phrases.BUILDINGS),
    "goods": _row(phrases.GOODS),
    "woman": _name(phrases.WOMEN),
    "man": _name(phrases.MEN),
    "name": _name(phrases.WOMEN + phrases.MEN),
    "date": _Kind(_draw_date, functools.partial(_weekday_date, article="dem")),
    "today": _Kind(_draw_date, functools.partial(_weekday_date, article="der")),
    "weekday": _Kind(_draw_date, functools.partial(_date, width="full")),
    "day": _Kind(_draw_date, functools.partial(_date, width="long")),
    "past": _Kind(
        functools.partial(_draw_date, first_year=1950, last_year=2019),
        functools.partial(_date, width="long"),
    ),
    "time": _Kind(_draw_time, _time),
    "number": _Kind(_draw_number, spell),
    "count": _Kind(_draw_count, spell),
    "comparison": _Kind(_draw_comparison, _comparison),
    "money": _Kind(_draw_money, _money),
    "duration": _Kind(functools.partial(_draw_duration, phrases.DURATIONS), _duration),
    "term": _Kind(functools.partial(_draw_duration, phrases.TERMS), _duration),
    "soon": _Kind(_draw_offset, _offset),
    "ago": _Kind(_draw_offset, lambda seconds, language: _offset(-seconds, language)),
    "territory": _code(_TERRITORIES, _territory),
    "language": _code(_LANGUAGES, _language),
    "studied": _code(_LANGUAGES, _studied),
    "currency": _code(phrases.CURRENCIES, _currency),
    "inside": _after(
        {"en": "in ", "de": "in ", "fr vowel": "en ", "fr feminine": "en ", "fr masculine": "au "}
    ),
    "origin": _after(
        {"en": "from ", "de": "aus ", "fr vowel": "d’", "fr feminine": "de ", "fr masculine": "du "}
    ),
    "goal": _after(
        {
            "en": "to ",
            "de": "nach ",
            "fr vowel": "pour l’",
            "fr feminine": "pour la ",
            "fr masculine": "pour le ",
        }
    ),
    **{kind: _Kind(functools.partial(_draw_measure, kind), _measure) for kind in phrases.UNITS},
}


def _kind(field: str) -> _Kind:
    """The kind of a field: "time" for "time_1"."""
    return _KINDS[field.partition("_")[0]]
