"""The tokenizer files of a checkpoint or engine, and texts cut into sequences with them."""

import reprlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvforge.common.checkpoint_files import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from kvforge.common.errors import CheckpointError, CheckpointWarning, first_line
from kvforge.common.json_files import read_json
from kvforge.common.lfs import fetch_it, is_lfs_pointer
from kvforge.common.native_calls import panics_as

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a ``tokenizer.json``, without its cutting and padding of texts; raises
    CheckpointError where it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no tokenizer.json; save the tokenizer in fast (Rust) format there.")
    try:
        with panics_as(CheckpointError, f"{path} makes the tokenizers library fail; save the tokenizer again."):
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing more precise
        if is_lfs_pointer(path):
            raise CheckpointError(fetch_it(path)) from None
        raise CheckpointError(f"{path} is not a readable tokenizer ({first_line(error)}); save it again.") from None


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, empty where there is none; as in transformers, ``special_tokens_map.json`` goes
    before it where it has no ``added_tokens_decoder``. Raises CheckpointError where one cannot be read."""
    config, legacy = _object(directory / TOKENIZER_CONFIG), _object(directory / SPECIAL_TOKENS_MAP)
    return config if "added_tokens_decoder" in config else {**config, **legacy}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a ``tokenizer_config.json`` names, as text by their names: ``eos_token`` and the
    like, a model's own ``…_token``, and those of an object ``extra_special_tokens``. Raises CheckpointError where one
    of the first is no token."""
    more = config.get("extra_special_tokens")
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    named |= more if isinstance(more, Mapping) else {}
    found = {}
    for name, token in named.items():
        text = _text_of(token)
        if text is not None:
            found[name] = text
        elif isinstance(token, str) or (name in SPECIAL_TOKENS and token is not None):
            raise CheckpointError(
                f"{name} is {reprlib.repr(token)} in {TOKENIZER_CONFIG} or {SPECIAL_TOKENS_MAP}; it must be a token."
            )
    return found


def _object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def check_tokens(folder: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """Compare the tokens that the files of a checkpoint name with those of its ``tokenizer.json``, which is what texts
    are read with. Warns with CheckpointWarning of tokens that it has not, or has in another place, and of ids that a
    model of ``vocab_size`` has no embedding for. Raises CheckpointError where a file cannot be read."""
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    added = config.get("added_tokens_decoder")
    stated = {_text_of(token): number for number, token in (added.items() if isinstance(added, Mapping) else ())}
    stated |= {text: stated.get(text) for text in special_tokens(config).values()}
    for text, number in stated.items():
        found = tokenizer.token_to_id(text) if text else None
        if text and (found is None or number not in (None, str(found))):
            place = "has no such token" if found is None else f"has it as {found}"
            warnings.warn(
                f"{TOKENIZER_CONFIG} or {SPECIAL_TOKENS_MAP} of {folder} names the token {reprlib.repr(text)}"
                f"{'' if number is None else f' as {number}'}, but tokenizer.json {place}; tokenizer.json is used.",
                CheckpointWarning,
                stacklevel=3,
            )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        warnings.warn(
            f"tokenizer.json of {folder} has token {largest}, but the model has {vocab_size} embeddings; texts with "
            "such tokens are refused.",
            CheckpointWarning,
            stacklevel=3,
        )


def _text_of(token: Any) -> str | None:
    """A token's text, of which it may be a description; None where there is no Unicode text."""
    text = token.get("content") if isinstance(token, Mapping) else token
    has_surrogates = isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text)
    return text if isinstance(text, str) and not has_surrogates else None


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
