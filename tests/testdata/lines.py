"""Lines of text that tokenizers stumble over, the same wherever and whenever they are made."""

import random

_WORDS = (
    "the of and train leaves station at noon my brother's we're I'll don't can't it's never sells "
    "bread milk river ABC U.S. e-mail 12 3.50 1999 2,000 50% (see below) [1] «oui» “so” – … ? "
    "! ; : "
    "Größe straße être ça œuvre naïve niño Ångström Łódź čeština İstanbul Москва привет Ελλάδα "
    "שלום עולם مرحبا العالم हिन्दी नमस्ते ไทย 日本語 漢字かな 한국어 ½ ² ﬁn Ａ１ e\u0301 a\u0308"
).split(" ")

_ODD = (
    "",
    " ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    " \n ",
    "a",
    " a",
    "a ",
    "  a  b   c  ",
    "a\tb",
    "a\t\tb",
    "\ta",
    "a \t b",
    "a\nb",
    "a\n\nb",
    "a \n b",
    "one\r\ntwo",
    "no\u00a0break",
    "thin\u2009space\u3000wide",
    "line\u2028separator",
    "zero\u200bwidth",
    "soft\u00adhyphen",
    "it's we'll I'm you've he'd they're can't",
    "IT'S WE'LL",
    " 's",
    "x's's",
    "''",
    "'",
    "don''t",
    "...",
    "!!!???",
    "a.b.c",
    "1234567890",
    "1 2  3",
    "３４５",
    "x=1+2*3/4",
    '<tag attr="v">&amp;</tag>',
    "https://example.org/a_b?c=d&e=f#g",
    "🙂",
    "🙂🙂",
    "a🙂b",
    "👩‍👩‍👧‍👦 family",
    "🇫🇷 flag",
    "👍🏽",
    "שלום, עולם!",
    "مرحبا (العالم)",
    "\u200fright-to-left mark",
    "☃ snow ☂",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "\u0378 unassigned",
    "▁ underline ▁▁ two",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "antidisestablishmentarianism",
)


def text_lines(count=1000):
    """`count` lines, the odd ones first, then sentences with odd spaces here and there."""
    draw = random.Random(0)
    lines = list(_ODD)
    while len(lines) < count:
        words = [draw.choice(_WORDS) for _ in range(draw.randint(1, 7))]
        gaps = [draw.choice((" ",) * 12 + ("  ", "\t", "\n", "", "   ")) for _ in words]
        line = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
        lines.append(line if draw.random() < 0.1 else line.strip())
    return lines[:count]


def plain_lines(count=1000):
    """Sentences to train a vocabulary on; not all characters of `text_lines` occur."""
    draw = random.Random(1)
    words = _WORDS[:60]
    return [" ".join(draw.choices(words, k=draw.randint(2, 12))) for _ in range(count)]
