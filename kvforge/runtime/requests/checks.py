"""Checks of single sampling parameters; every refusal is one sentence with the parameter's name and a remedy.

Lengths are looked at before entries, so that refusing a list costs nothing that grows with it.
"""

import math
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.common.number_checks import is_number, shown
from kvforge.common.refusals import CONTEXT_LENGTH, PROMPT

MAX_WORDS = 4096
"""Stop strings or bad words of a request; also in the lists of words that other protocols have."""
MAX_ID_WORDS = 2 * MAX_WORDS
"""The same as token ids (a word has two spellings, see `bad_words`), and stop tokens: the gateway sends these so."""
MAX_SYMBOLS = 1 << 14
"""Characters or token ids of all words of a list together; each takes a microsecond and 250 bytes."""
MAX_BIAS_TOKENS = 1 << 19
"""Above every vocabulary: a bias may be given for all tokens."""
MAX_DRAFT_TOKENS = 1 << 13
MAX_RANGES = 1000
MAX_NAME = 128


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own, a list as a tuple."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(value) if isinstance(value, list) else value


def plain_list(name: str, value: Any, maximum: int) -> Any:
    """A list of at most ``maximum`` entries as a tuple of plain ones; None as no entries.

    What is no list stays as it is, for a check with the right words.

    Raises:
        RequestError: there are more entries.
    """
    if value is None:
        return ()
    if getattr(value, "shape", ()) or isinstance(value, (list, tuple)):
        check_count(name, len(value), maximum)
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


def check_count(name: str, count: int, maximum: int) -> None:
    """Raise RequestError where ``count`` entries are more than ``maximum``."""
    if count > maximum:
        raise RequestError(f"has {count} entries", f"give at most {maximum}", field=name)


def check_symbols(name: str, count: int, unit: str) -> None:
    """Raise RequestError where the words of a list have ``count`` characters or token ids together, too many."""
    if count > MAX_SYMBOLS:
        raise RequestError(f"has {count} {unit} together", f"give at most {MAX_SYMBOLS}", field=name)


def check_prompt_length(count: int, max_seq_len: int) -> None:
    """Raise RequestError where a prompt of ``count`` tokens leaves no room to generate one."""
    if count > max_seq_len - 1:
        raise too_many_tokens(str(count), max_seq_len)


def too_many_tokens(number: str, max_seq_len: int) -> RequestError:
    """The refusal of a prompt of so many tokens."""
    return RequestError(
        f"has {number} tokens, but the engine takes at most {max_seq_len - 1} (sequences of {max_seq_len} less one to "
        "generate)",
        "shorten it",
        field=PROMPT,
        code=CONTEXT_LENGTH,
        operator=longer_sequences(max_seq_len),
    )


def longer_sequences(max_seq_len: int) -> str:
    """What helps where sequences of ``max_seq_len`` tokens are too short, as a Refusal's ``operator`` has it."""
    return f"give a larger --max-seq-len, to the build too, if the model has more than {max_seq_len} positions"


def check_flag(name: str, value: Any) -> None:
    """Raise RequestError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"is {shown(value)}", "give true or false", field=name)


def check_name(name: str, value: Any) -> None:
    """Raise RequestError unless ``value`` is a text of at most ``MAX_NAME`` characters."""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise RequestError(f"is {shown(value)}", f"give a text of at most {MAX_NAME} characters", field=name)


def checked_texts(name: str, values: Any) -> tuple[str, ...]:
    """Return a tuple of non-empty texts without duplicates; raises RequestError."""
    _check_words(name, values, str)
    return tuple(dict.fromkeys(values))


def checked_id_words(name: str, values: Any) -> tuple[tuple[int, ...], ...]:
    """Return a tuple of non-empty tuples of token ids without duplicates; raises RequestError."""
    _check_words(name, values, tuple)
    check_ids(name, tuple(chain.from_iterable(values)))
    return tuple(dict.fromkeys(values))


def check_ids(name: str, values: Any) -> None:
    """Raise RequestError unless ``values`` is a tuple of token ids."""
    if not isinstance(values, tuple):
        raise RequestError(f"is {shown(values)}", "give lists of token ids", field=name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"holds {shown(value)}", "give token ids of at least 0", field=name)


def checked_bias(name: str, values: Any, limit: float) -> dict[int, float] | None:
    """Return a mapping of token ids (also as JSON's text keys) to numbers as ``{int: float}``; None where empty.

    Raises:
        RequestError: a key is no token id, or a number is above ``limit``. One below ``-limit`` becomes -inf.
    """
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise RequestError(f"is of type {type(values).__name__}", "give a mapping of token ids to numbers", field=name)
    check_count(name, len(values), MAX_BIAS_TOKENS)
    ids = _bias_ids(name, values.keys())
    result = dict(zip(ids, _bias_numbers(name, ids, values.values(), limit), strict=True))
    if len(result) < len(ids):
        seen: set[int] = set()
        twice = next(token for token in ids if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise RequestError(f"holds token id {twice} twice", "give each once", field=name)
    return result or None


def check_retention(name: str, values: Any) -> None:
    """Raise RequestError unless ``values`` is a tuple of (start, end, priority) of prompt tokens."""
    if not isinstance(values, tuple):
        raise RequestError(f"is {shown(values)}", "give a list of [start, end, priority]", field=name)
    for entry in values:
        three = isinstance(entry, tuple) and len(entry) == 3
        if not three or not all(isinstance(v, int) and not isinstance(v, bool) for v in entry):
            raise RequestError(f"holds {shown(entry)}", "give whole numbers [start, end, priority]", field=name)
        start, end, priority = entry
        if start < 0 or (end != -1 and end <= start):
            raise RequestError(
                f"holds tokens {start} to {end}", "give a start of at least 0 and an end above it", field=name
            )
        if not 0 <= priority <= 100:
            raise RequestError(f"holds priority {priority}", "give a whole number from 0 to 100", field=name)


def _check_words(name: str, values: Any, kind: type) -> None:
    if not isinstance(values, tuple):
        raise RequestError(f"is {shown(values)}", "give a list", field=name)
    for value in values:
        if not isinstance(value, kind) or len(value) == 0:  # type: ignore[arg-type]
            raise RequestError(f"holds {shown(value)}", "give non-empty entries only", field=name)
    check_symbols(name, sum(map(len, values)), "characters" if kind is str else "token ids")


def _bias_ids(name: str, keys: Collection[Any]) -> list[int]:
    types = set(map(type, keys))
    if types == {int} and min(keys) >= 0:
        return list(keys)
    if types == {str}:
        digits, lengths = "".join(keys), set(map(len, keys))
        if digits.isascii() and digits.isdigit() and 0 not in lengths and max(lengths) < 20:
            return list(map(int, keys))
    return [_bias_id(name, plain(key)) for key in keys]


def _bias_id(name: str, key: Any) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int) or key < 0:
        raise RequestError(f"holds the key {shown(key)}", "give token ids of at least 0", field=name)
    return key


def _bias_numbers(name: str, ids: list[int], values: Collection[Any], limit: float) -> list[float]:
    if set(map(type, values)) == {float}:
        numbers = np.fromiter(values, np.float64, len(values))
        if (numbers <= limit).all():
            return np.where(numbers >= -limit, numbers, -math.inf).tolist()
    return [_bias_number(name, token, plain(value), limit) for token, value in zip(ids, values, strict=True)]


def _bias_number(name: str, token: int, value: Any, limit: float) -> float:
    if not is_number(value) or not value <= limit:
        raise RequestError(f"of token {token} is {shown(value)}", f"give a number up to {limit:g}, or -inf", field=name)
    return float(value) if value >= -limit else -math.inf
