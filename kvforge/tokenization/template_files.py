"""The chat templates in a checkpoint's files, by their names, as transformers reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvforge.common.checkpoint_files import ADDITIONAL_TEMPLATES, CHAT_TEMPLATE, PROCESSOR_TEMPLATE, TOKENIZER_CONFIG
from kvforge.common.errors import KvforgeError
from kvforge.common.json_files import read_json

DEFAULT = "default"


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a checkpoint whose ``tokenizer_config.json`` is ``config``; empty where there are none.

    Files of templates go before those of ``config``, all together: ``chat_template.jinja`` is the default one, and each
    ``additional_chat_templates/NAME.jinja`` is called NAME. ``chat_template.json``, which processors of images have, is
    read where there are no others.

    Raises:
        KvforgeError: a file cannot be read, or holds what is no template.
    """
    files = sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    found = {file.name.removesuffix(".jinja"): file for file in files}
    if (single := directory / CHAT_TEMPLATE).is_file():
        found = {DEFAULT: single, **found}
    if found:
        return {name: _text(file) for name, file in found.items()}
    if config.get("chat_template") is not None:
        return _by_name(config["chat_template"], directory / TOKENIZER_CONFIG)
    legacy = directory / PROCESSOR_TEMPLATE
    if legacy.is_file():
        return _by_name(read_json(legacy).get("chat_template"), legacy)
    return {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise KvforgeError(f"{file} is not UTF-8 text; write it again.") from None


def _by_name(given: Any, file: Path) -> dict[str, str]:
    """One template, a list of objects with name and template, or an object of templates by name."""
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, list) and all(isinstance(entry, Mapping) for entry in given):
        given = {entry.get("name"): entry.get("template") for entry in given}
    named = given.items() if isinstance(given, Mapping) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in named):
        raise KvforgeError(
            f"{file} has a chat_template that is neither text nor a list of objects with name and template; correct it."
        )
    return dict(named)
