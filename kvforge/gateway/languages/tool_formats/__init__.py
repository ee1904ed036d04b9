"""The written formats of tool calls: one file each, found by listing this folder. A file has a FORMAT."""

from collections.abc import Mapping
from functools import cache

from kvforge.gateway.languages.tool_format import ToolFormat
from kvforge.gateway.languages.written_format import formats_in, the_recognised


@cache
def formats() -> Mapping[str, ToolFormat]:
    """All formats by name."""
    return formats_in(__name__, __path__)


def recognised(template: str) -> ToolFormat | None:
    """The one format that a chat template speaks; None where that is not clear."""
    return the_recognised(formats(), template)
