"""The written formats of reasoning: one file each, found by listing this folder. A file has a FORMAT."""

import importlib
import pkgutil

from kvforge.gateway.reasoning_format import ReasoningFormat


def reasoning_formats() -> dict[str, ReasoningFormat]:
    """All formats by name."""
    modules = (importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules}


def recognised_reasoning(template: str) -> ReasoningFormat | None:
    """The one format that a chat template speaks; None where that is not clear."""
    found = [entry for entry in reasoning_formats().values() if entry.recognises(template)]
    return found[0] if len(found) == 1 else None
