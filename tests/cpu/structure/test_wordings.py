"""Wordings that stopped readers do not come back, in what the product says and on the pages."""

import re
from pathlib import Path

import pytest

from kvforge.gateway.errors import ApiError
from kvforge.gateway.requests.request_fields import screen
from tests.support.pages import ROOT, TOP, WITH_COMMANDS, name

STOPPED = re.compile(
    r"presets are|ideas real|stop half-way|is no checkpoint, so|is not a field of this|bad words are not|is saved again"
    r"|Tokens at most|Tokens a second|a square is|For whoever|This page answers|nobody's|what it is worth|is_elsewhere"
)
ON_PAGES = re.compile(
    r"[Nn]obody|(?:was|were) wanted|(?:one|another) sitting|its kin\b|half-way|worth a look|as they lie"
    r"|where it lies|[Pp]resent tiny|present student|to be had|is held against|likeliest token"
)
"""Riddles and history, where the field has a word: other requests, target, run, current, compared with."""
PRODUCT = [file for kind in ("*.py", "*.html", "*.js") for file in sorted((ROOT / "kvforge").rglob(kind))]
DOCSTRING = re.compile(r'^ *[rf]?"""(?:(?!""").)*"""$', re.MULTILINE | re.DOTALL)


def said(file: Path) -> str:
    """A file without docstrings and comments of Python."""
    text = file.read_text(encoding="utf-8")
    return DOCSTRING.sub("", text) if file.suffix == ".py" else text


@pytest.mark.parametrize("files", [PRODUCT, [*WITH_COMMANDS, *TOP]], ids=["product", "pages"])
def test_wordings_that_stopped_readers_are_gone(files: list[Path]) -> None:
    assert {file: found for file in files if (found := STOPPED.findall(said(file)))} == {}


@pytest.mark.parametrize("page", [*WITH_COMMANDS, *TOP[1:]], ids=name)
def test_pages_have_the_words_of_the_field(page: Path) -> None:
    assert ON_PAGES.findall(" ".join(page.read_text(encoding="utf-8").split())) == []


@pytest.mark.parametrize(
    ("field", "words"),
    [("max_token", "Unknown field 'max_token'"), ("bad_words", "'bad_words' is not supported: use logit_bias")],
)
def test_a_field_that_is_unknown_or_unsupported_is_said_to_be(field: str, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        screen({field: ["a"]}, set())
