"""JSON that was cut anywhere."""

import json
import random
from typing import Any

import pytest

from kvforge.tokenization.cut_json import cut_object


def any_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return any_object(rng, depth + 1)
    text = "".join(rng.choices('a\\"/{}[],: \né😀', k=rng.randrange(6)))
    return (text, rng.uniform(-9, 9), rng.choice((True, False, None)), rng.randrange(10**6), "")[kind]


def any_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {str(any_value(rng, 3)): any_value(rng, depth) for _ in range(rng.randrange(4))}


def is_beginning(part: Any, whole: Any) -> bool:
    """Whether a value may be what is there of another one: all but the last of what it holds is equal."""
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    if isinstance(part, list) and isinstance(whole, list):
        last = len(part) - 1
        return not part or (last < len(whole) and part[:-1] == whole[:last] and is_beginning(part[-1], whole[last]))
    if isinstance(part, dict) and isinstance(whole, dict):
        names = list(part)
        return names == list(whole)[: len(names)] and is_beginning(list(part.values()), list(whole.values()))
    return part == whole


@pytest.mark.parametrize("seed", range(200))
def test_cut_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    whole = any_object(rng)
    text = json.dumps(whole, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
    assert cut_object(text) == whole
    assert cut_object("") is None
    before: dict[str, Any] = {}
    for end in range(1, len(text)):
        part = cut_object(text[:end])
        assert part is not None and is_beginning(part, whole), text[:end]
        assert is_beginning(before, part), text[:end]
        json.dumps(part, ensure_ascii=False).encode()
        before = part


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "[1]",
        "[",
        "x",
        '{"a" 5}',
        '{"a": oops}',
        "{} {}",
        '{"a": 1}]',
        '{"a": [1}',
        '"a"',
        '"',
        "null",
        '{"a": 1} and',
        '{"a": 1} tr',
        '{"a": 1},',
        '{"a" 5',
        '{"a" "b',
        '{"a"x',
        '{"a": oops',
        '{"a": 01',
        '{"a": "b"c',
        '{"a": 1 2',
        '{"a": [1 2',
        '{"a": [,',
        "{,",
        "{:",
        "{1",
        '{"a": 1, "b" : :',
        "{" * 10**5,
    ],
)
def test_what_is_no_object(text: str) -> None:
    assert cut_object(text) is None
