"""Texts that tokenizers disagree about, drawn from a seed: scripts, spaces, digits, code, marks, special tokens."""

import random
from collections.abc import Sequence

_WORDS = (
    "the", "Hello", "WORLD", "don't", "I'LL", "we've", "it's", "'S", "naïve", "façade", "Straße", "ﬁne", "Ελλάδα",
    "Москва", "한국어", "日本語", "カタカナ", "中文", "मराठी", "ไทย", "עברית", "العربية", "Tiếng", "e\u0301te\u0301",
    "A\u030angstro\u0308m", "x", "camelCaseWord", "HTTPServer", "snake_case", "ſ", "'ſ", "Ⅷ", "½", "²", "٣٤", "१२३",
    "1234567", "3.14", "10,000", "0x1F", "2026-11-27", "😀", "👩‍👩‍👧", "🏳️‍🌈", "\u200d", "\ufeff", "\u00ad", "\u2028",
    "if(x==1){", "</div>", "print('a')", "#include", "->", "!!!", "...", "…", "—", "«»", "“quoted”", "(", ")", "[]",
    "$", "€", "@user", "\\n", "\\", "/", "///", "&&", "||", "%20", "http://a.b/c?d=e", "\x00", "\x07", "\x7f",
)  # fmt: skip
_SPACES = (" ", " ", " ", "", "  ", "   ", "\n", "\n\n", " \n", "\t", "\t\t", "\r\n", "\u00a0", "\u3000", " " * 17)
_RANGES = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x900, 0xDFF), (0x1E00, 0x27BF), (0x3040, 0x9FFF), (0x1F300, 0x1FAFF),
)  # fmt: skip


def odd_texts(count: int, seed: int, special: Sequence[str] = ()) -> list[str]:
    """Return ``count`` texts; every fifth has some of the ``special`` tokens in it. No text is empty."""
    rng = random.Random(seed)
    texts: list[str] = []
    while len(texts) < count:
        pieces = [_piece(rng) for _ in range(rng.choice((1, 2, 3, 5, 8, 13, 30)))]
        if special and len(texts) % 5 == 0:
            for _ in range(rng.randint(1, 3)):
                pieces.insert(rng.randint(0, len(pieces)), rng.choice(special))
        if text := "".join(pieces):
            texts.append(text)
    return texts


def _piece(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.7:
        return rng.choice(_WORDS) + rng.choice(_SPACES)
    if kind < 0.8:
        return rng.choice(_SPACES) + rng.choice(_SPACES)
    low, high = rng.choice(_RANGES)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))
