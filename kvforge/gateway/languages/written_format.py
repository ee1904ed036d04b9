"""What written formats of tool calls and of reasoning have in common: each is one file of a folder, with a FORMAT, and
a chat template shows which one a model speaks."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvforge.runtime.requests.reasoning import Mark

TokenOf = Callable[[str], int | None]
"""The id of a marker that is one token, which no other tokens may write; None where it is plain text."""


@dataclass(frozen=True)
class WrittenFormat:
    """A chat template that has all of ``signs`` and none of ``foreign`` speaks it."""

    name: str
    signs: tuple[str, ...]
    foreign: tuple[str, ...]

    def recognises(self, template: str) -> bool:
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.foreign)


Format = TypeVar("Format", bound=WrittenFormat)


def formats_in(package: str, folder: Iterable[str]) -> dict[str, Any]:
    """The formats of a package whose path is ``folder``, by name."""
    modules = (importlib.import_module(f"{package}.{entry.name}") for entry in pkgutil.iter_modules(folder))
    return {module.FORMAT.name: module.FORMAT for module in modules}


def spelled(text: str, markers: Collection[str], token_of: TokenOf) -> list[Mark]:
    """A text in pieces: its markers that are tokens, and what stands between them."""
    tokens = {mark: token for mark in markers if (token := token_of(mark)) is not None}
    if not tokens:
        return [text] if text else []
    parts = re.split("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")", text)
    return [tokens.get(part, part) for part in parts if part]


def the_recognised(known: Mapping[str, Format], template: str) -> Format | None:
    """The one format that a chat template speaks; None where that is not clear."""
    found = [entry for entry in known.values() if entry.recognises(template)]
    return found[0] if len(found) == 1 else None
