"""The written formats of reasoning: one file each, found by listing this folder. A file has a FORMAT."""

from collections.abc import Mapping
from functools import cache

from kvforge.gateway.languages.reasoning_format import ReasoningFormat
from kvforge.gateway.languages.written_format import formats_in, the_recognised


@cache
def reasoning_formats() -> Mapping[str, ReasoningFormat]:
    """All formats by name."""
    return formats_in(__name__, __path__)


def recognised_reasoning(template: str) -> ReasoningFormat | None:
    """The one format that a chat template speaks; None where that is not clear."""
    return the_recognised(reasoning_formats(), template)
