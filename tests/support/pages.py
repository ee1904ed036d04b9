"""The pages of the documentation and the code that is printed on them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
WITH_COMMANDS = [ROOT / "README.md", *DOCS]
FENCED = re.compile(r"^```.*?^```[^\n]*$", re.MULTILINE | re.DOTALL)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```[^\n]*$", re.MULTILINE | re.DOTALL)
_KVFORGE = re.compile(r"\s*(?:\w+=\S+ )*(?:\S*torchrun .*-m |\S*python\S* -m )?kvforge (.*)")


def name(path: Path) -> str:
    """Return a page as tests are called."""
    return str(path.relative_to(ROOT))


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in these languages."""
    return [code for language, code in _BLOCK.findall(text) if language in languages]


def shell_lines(text: str) -> Iterator[str]:
    """The lines of a page's code that is not Python, fenced or indented; continued ones are joined, and so is what a
    synopsis has in brackets on the next line."""
    text = re.sub(r"\\\n|\n +(?=\[--)", " ", text)
    fenced = (code for language, code in _BLOCK.findall(text) if language != "python")
    for block in (*fenced, *re.findall(r"^    .*$", FENCED.sub("", text), re.MULTILINE)):
        yield from block.splitlines()


def kvforge_lines(text: str) -> Iterator[str]:
    """What follows ``kvforge`` in the shell lines of a page."""
    for line in shell_lines(text):
        if found := _KVFORGE.match(line):
            yield found[1]


def kvforge_spans(text: str) -> Iterator[str]:
    """What follows ``kvforge`` in a page's code within sentences."""
    for span in re.findall(r"`kvforge ([^`]+)`", FENCED.sub("", text)):
        yield " ".join(span.split())
