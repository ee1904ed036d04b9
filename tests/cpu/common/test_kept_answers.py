"""Answers that are kept with the engines of tests: asked once, and again when anything that decides them changes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import kept_answers
from tests.support.models.kept_answers import kept_answer, sources


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a program and what it imports, and an empty shelf."""
    folder = tmp_path / "tests" / "support"
    folder.mkdir(parents=True)
    (folder / "program.py").write_text("from tests.support.part import answer\nfrom kvforge.compiler import build\n")
    (folder / "part.py").write_text("def answer():\n    from tests.support import inner\n")
    (folder / "inner.py").write_text("import torch\n")
    (folder / "other.py").write_text("import kvforge.runtime\n")
    monkeypatch.setattr(kept_answers, "ROOT", tmp_path)
    monkeypatch.setattr(kept_answers, "shared_folder", lambda: tmp_path)
    return folder


def test_it_is_asked_once_until_something_changes(shelf: Path) -> None:
    asked: list[Any] = []

    def answer_to(question: Any, *distributions: str) -> Any:
        def ask() -> dict[str, int]:
            asked.append(question)
            return {"number": len(asked)}

        return kept_answer("tests.support.program", question, ask, distributions)["number"]

    assert [answer_to("a"), answer_to("a"), answer_to("b"), answer_to("a")] == [1, 1, 2, 1]
    (shelf / "other.py").write_text("import kvforge.serving\n")
    assert answer_to("a") == 1
    (shelf / "inner.py").write_text("import numpy\n")
    assert [answer_to("a"), answer_to("a"), answer_to("a", "numpy")] == [3, 3, 4]


def test_of_several_questions_the_new_ones_are_asked_together(shelf: Path) -> None:
    asked: list[list[str]] = []

    def ask(questions: Sequence[str]) -> list[str]:
        asked.append(list(questions))
        return [question.upper() for question in questions]

    for questions in (["a", "b"], ["b", "c", "a", "d"], ["d", "a"]):
        assert kept_answers.kept_answers("tests.support.program", questions, ask) == [one.upper() for one in questions]
    assert asked == [["a", "b"], ["c", "d"]]
    assert kept_answer("tests.support.program", "c", lambda: "asked again") == "C"
    (shelf / "inner.py").write_text("import numpy\n")
    assert kept_answers.kept_answers("tests.support.program", ["a"], ask) == ["A"] and asked[-1] == ["a"]


def test_what_was_answered_before_a_failure_is_kept(shelf: Path) -> None:
    asked: list[int] = []

    def ask(questions: Sequence[int]) -> Iterator[int]:
        for number in questions:
            asked.append(number)
            if asked == [0, 1, 2]:
                raise RuntimeError("stopped")
            yield number

    with pytest.raises(RuntimeError, match="stopped"):
        kept_answers.kept_answers("tests.support.program", range(4), ask)
    assert kept_answers.kept_answers("tests.support.program", range(4), ask) == [0, 1, 2, 3]
    assert asked == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(("answers", "wrong"), [([1], "shorter"), ([1, 2, 3], "longer")])
def test_a_wrong_number_of_answers_is_an_error(shelf: Path, answers: list[int], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        kept_answers.kept_answers("tests.support.program", ["a", "b"], lambda questions: answers)


def test_what_fails_is_not_kept(shelf: Path) -> None:
    def fail() -> None:
        raise AssertionError("no answer")

    with pytest.raises(AssertionError, match="no answer"):
        kept_answer("tests.support.program", None, fail)
    assert kept_answer("tests.support.program", None, lambda: 1) == 1


def test_a_program_consists_of_what_it_imports(shelf: Path) -> None:
    assert [file.name for file in sources("tests.support.program")] == ["inner.py", "part.py", "program.py"]
    with pytest.raises(ValueError, match=r"tests.support.other imports kvforge.runtime, .* add it to BUILT_FROM"):
        sources("tests.support.other")
