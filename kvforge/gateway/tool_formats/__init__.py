"""The written formats of tool calls: one file each, found by listing this folder. A file has a FORMAT."""

import importlib
import pkgutil

from kvforge.gateway.tool_format import ToolFormat


def formats() -> dict[str, ToolFormat]:
    """All formats by name."""
    modules = (importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules}


def recognised(template: str) -> ToolFormat | None:
    """The one format that a chat template speaks; None where that is not clear."""
    found = [entry for entry in formats().values() if entry.recognises(template)]
    return found[0] if len(found) == 1 else None
