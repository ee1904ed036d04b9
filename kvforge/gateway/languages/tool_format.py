"""What a written format of tool calls consists of; kvforge.gateway.languages.tool_formats has one file for each."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.gateway.languages.asked_forms import Calls
from kvforge.gateway.languages.call_reader import CallReader, Notation
from kvforge.gateway.languages.function import Function
from kvforge.gateway.languages.written_format import TokenOf, WrittenFormat
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.tokenization.conversation import TemplateId, same_id

WHITESPACE = {"x-guidance": {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}}
TEXT_RULE = "TEXT: /(.|\\n)*/"
"""Of a grammar: any text."""


def _same_ids() -> TemplateId:
    return same_id


@dataclass(frozen=True)
class ToolFormat(WrittenFormat):
    """How a family of models writes calls.

    Attributes:
        notation: how calls are marked, which is how they are found.
        template_ids: makes, for one conversation, what gives calls their ids as the chat template takes them.
    """

    notation: Notation
    template_ids: Callable[[], TemplateId] = _same_ids

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must be seen all the same."""
        raise NotImplementedError

    @property
    def prefix(self) -> str:
        """What an answer that must be a call begins with: it is put at the end of the prompt."""
        raise NotImplementedError

    def reader(self, asked: Calls) -> CallReader:
        """What reads an answer."""
        raise NotImplementedError

    def forced(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        """After the prefix, calls of these functions and nothing else. Raises RequestError."""
        raise NotImplementedError

    @property
    def writes_reasoning(self) -> bool:
        """Whether guides of free answers say where the reasoning is."""
        return False

    def free(self, functions: Sequence[Function], parallel: bool, token_of: TokenOf) -> GuidedDecoding:
        """Any text, and in it calls of these functions. Raises RequestError."""
        raise NotImplementedError

    def unguided(self, function: Function) -> Collection[str]:
        """The keywords of the function's schema that the guides of this format do not keep."""
        return ()


def quoted(text: str) -> str:
    """A text inside a grammar."""
    return json.dumps(text, ensure_ascii=False)


def with_whitespace(schema: dict[str, Any]) -> str:
    """A schema inside a grammar."""
    return json.dumps({**schema, **WHITESPACE}, ensure_ascii=False)
