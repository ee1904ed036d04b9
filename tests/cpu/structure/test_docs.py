"""The pages hold together: links lead somewhere, commands and options exist, and each page begins with its subject."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from kvforge.cli import make_parser
from kvforge.suggesting_parser import commands_of, options_below
from tests.support.pages import DOCS, FENCED, ROOT, TOP, WITH_COMMANDS, kvforge_lines, kvforge_spans, name

PAGES = [*TOP, *DOCS]

REGISTRIES = re.compile(
    r"\b(?:[\w-]+\.)*(?:pypi\.org|pythonhosted\.org|nvcr\.io|ngc\.nvidia\.com|docker\.io|ghcr\.io|quay\.io|gcr\.io"
    r"|conda\.anaconda\.org)\b|\bindex-url\b"
)
PATH = re.compile(r"`((?:kvforge|tests|docs|plugins|model_defs|build|triton_repo|perf)/[\w./-]+)`")
LINK = re.compile(r"\]\(([^()\s]+)\)")


def prose(text: str) -> str:
    """``text`` without code: neither blocks nor spans."""
    return re.sub(r"`[^`\n]*`", "``", FENCED.sub("", text))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()) for heading in headings)
    return frozenset(heading.replace(" ", "-") for heading in plain)


def broken(page: Path, text: str) -> Iterator[str]:
    """Links of a page within the repository that lead nowhere."""
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@cache
def options() -> dict[str, frozenset[str]]:
    """The options of each command, with those of commands below it; "" has those of ``kvforge`` itself."""
    parser = make_parser()
    own = {"": frozenset(parser._option_string_actions)}
    return own | {command: frozenset(options_below(each)) for command, each in commands_of(parser).items()}


def command_lines(text: str) -> Iterator[str]:
    """What follows ``kvforge`` in the code of a page: lines and spans."""
    yield from kvforge_lines(text)
    yield from kvforge_spans(text)


def unknown(line: str) -> list[str]:
    """The parts of a command line that the parser does not have."""
    words = shlex.split(line.replace("…", "X").replace("[", " ").replace("]", " "), comments=True)
    if not words:
        return []
    command = "" if words[0].startswith("-") else words[0]
    if command not in options():
        return [command]
    used = (word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word))
    return [option for option in used if option not in options()[command]]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text(encoding="utf-8"))) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/no-such-page.md) [b](docs/serving.md#no-such-heading) [c](docs/serving.md#metrics) `[d](code)`"
    assert list(broken(ROOT / "README.md", text)) == ["docs/no-such-page.md", "docs/serving.md#no-such-heading"]


@pytest.mark.parametrize("page", [*DOCS, *TOP[:2]], ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    lines = list(command_lines(page.read_text(encoding="utf-8")))
    assert {line: found for line in lines if (found := unknown(line))} == {}


def test_an_unknown_command_or_option_is_found() -> None:
    text = "    kvforge bild X --force\n\n`kvforge build X --no-such` and\n```\nkvforge serve X \\\n  --opneai\n```\n"
    assert [unknown(line) for line in command_lines(text)] == [["--opneai"], ["bild"], ["--no-such"]]


def test_the_readme_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert "make demo" in text and "make test" in text
    assert len(list(command_lines(text))) >= 9


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_registry_is_named(page: Path) -> None:
    assert REGISTRIES.findall(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_a_page_begins_with_its_subject(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    top = " ".join(text.split("\n\n", 2)[1].split())
    assert re.match(r"[A-Z`].+\.$", top) and len(top) <= 240, f"{name(page)} begins with {top!r}"
    assert not re.match(r"For |This page", top) and "This page answers" not in text


def test_the_changelog_is_one_screen() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    linked = {link for link in LINK.findall(index) if "/" not in link}
    assert linked == {page.name for page in DOCS} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_counts_the_families(page: Path) -> None:
    """A new one is a file, and pages say "every family"."""
    assert re.findall(r"all \w+ families", prose(page.read_text(encoding="utf-8"))) == []
