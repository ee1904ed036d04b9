"""The tokenizer files of a checkpoint or engine, and texts cut into sequences with them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvforge.common.errors import CheckpointError, KvforgeError, first_line
from kvforge.common.lfs import fetch_it, is_lfs_pointer
from kvforge.common.native_calls import panics_as

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a ``tokenizer.json``; raises CheckpointError where it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no tokenizer.json; save the tokenizer in fast (Rust) format there.")
    try:
        with panics_as(CheckpointError, f"{path} makes the tokenizers library fail; save the tokenizer again."):
            return Tokenizer.from_file(str(path))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing more precise
        if is_lfs_pointer(path):
            raise CheckpointError(fetch_it(path)) from None
        raise CheckpointError(f"{path} is not a readable tokenizer ({first_line(error)}); save it again.") from None


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, empty where there is none. Raises KvforgeError where it cannot be read."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KvforgeError(f"{path} is not JSON ({first_line(error)}); write it again.") from None
    if not isinstance(config, dict):
        raise KvforgeError(f"{path} is no JSON object; write it again.")
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a ``tokenizer_config.json`` names, as text by their role (``eos_token``, …)."""
    found = {name: config[name] for name in SPECIAL_TOKENS if config.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}


def tokens_before_text(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    encoding = tokenizer.encode("a")
    mask = encoding.special_tokens_mask
    return encoding.ids[: mask.index(0) if 0 in mask else 0]


def spread_pieces(prefix: list[int], body: Sequence[int], step: int, num: int) -> list[list[int]]:
    """Return up to ``num`` pieces of ``step`` tokens of ``body``, evenly spread and each behind ``prefix``."""
    available = len(body) // step
    count = min(num, available)
    starts = [index * available // count * step for index in range(count)]
    return [prefix + list(body[start : start + step]) for start in starts]
