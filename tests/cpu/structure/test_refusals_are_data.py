"""A refusal travels as data: nobody reads the sentence of an error to learn what it says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
READERS = {"startswith", "endswith", "partition", "rpartition", "split", "removeprefix", "removesuffix", "replace"}
"""Methods of a text that look into it with an argument; ``splitlines``, or ``split`` at blanks, only shape it."""
FILES = sorted(path for folder in ("kvforge", "triton_repo") for path in (ROOT / folder).rglob("*.py"))


def reads_of_sentences(tree: ast.AST) -> list[int]:
    """The lines where the text of an exception is looked into: by a method, or by ``words in str(error)``."""
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}

    def is_sentence(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "str"
            and bool(node.args)
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id in caught
        )

    found = []
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) and node.args else None
        by_method = isinstance(called, ast.Attribute) and called.attr in READERS and is_sentence(called.value)
        by_in = isinstance(node, ast.Compare) and any(map(is_sentence, node.comparators))
        if by_method or by_in:
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


def full_stops(tree: ast.AST) -> list[int]:
    """The lines of a refusal whose parts are sentences with a full stop, which each face adds or leaves out."""

    def ends_in_stop(node: ast.AST) -> bool:
        if isinstance(node, ast.JoinedStr):
            return bool(node.values) and ends_in_stop(node.values[-1])
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".")

    names = ("RequestError", "Refusal", "guide_error", "refuse")
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return [call.lineno for call in calls if call.func.id in names and any(map(ends_in_stop, call.args))]  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", [
    "try: pass\nexcept E as error:\n  str(error).partition(', but')",
    "try: pass\nexcept E as error:\n  x = 'queue is full' in str(error)",
])  # fmt: skip
def test_such_a_read_is_found(source: str) -> None:
    assert reads_of_sentences(ast.parse(source)) == [3]


def test_a_full_stop_is_found() -> None:
    assert full_stops(ast.parse("RequestError(f'is {x}.')\nguide_error('a', 'b')")) == [1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_read(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert reads_of_sentences(tree) == [] and full_stops(tree) == []
