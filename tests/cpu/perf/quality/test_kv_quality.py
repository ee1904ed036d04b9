"""The quality grid: answers are kept and extended, the report counts what the paper counts."""

from pathlib import Path
from typing import Any

import pytest

from kvforge.tasks.prompt import Example
from perf.quality import answers, kv
from perf.quality.kv import plot, summarise
from perf.training import student


class Echo:
    """Answers every prompt with itself and counts."""

    asked: list[str] = []  # noqa: RUF012

    def __init__(self, engine: Path, length: int, show_progress: bool) -> None:
        pass

    def __call__(self, prompts: list[str]) -> list[str]:
        self.asked.extend(prompts)
        return list(prompts)


def test_answers_are_kept_and_only_new_prompts_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "EngineGenerator", Echo)
    monkeypatch.setattr(answers, "CHUNK", 4)
    examples = [Example(f"prompt {index}", str(index)) for index in range(11)]
    Echo.asked = []
    first = answers.answer(tmp_path / "engine", {"t": examples[:6]}, 500, 1, tmp_path)
    assert first == {"t": [f"prompt {index}" for index in range(6)]} and len(Echo.asked) == 6
    second = answers.answer(tmp_path / "engine", {"t": examples}, 500, 1, tmp_path)
    assert second == {"t": [f"prompt {index}" for index in range(11)]}
    assert Echo.asked == second["t"], "a prompt was asked twice"
    assert answers.answer(tmp_path / "engine", {"t": examples[:2]}, 500, 1, tmp_path) == {"t": second["t"][:2]}
    assert len(Echo.asked) == 11


def test_a_finished_student_is_not_distilled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("distilled")

    monkeypatch.setattr(student, "distill_checkpoint", fail)
    checkpoint = tmp_path / "students" / "group-4" / "checkpoint"
    with pytest.raises(AssertionError, match="distilled"):
        kv.checkpoint_of(4, tmp_path)
    checkpoint.mkdir()
    assert kv.checkpoint_of(4, tmp_path) == checkpoint
    assert kv.checkpoint_of(2, tmp_path).name == "tiny-swiftkv"
    assert kv.checkpoint_of(None, tmp_path).name == "tiny-teacher"


def make_cell(model: str, kv_dtype: str, elements: int, right: list[bool]) -> dict[str, Any]:
    return {
        "model": model,
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": elements + 8,
        "kv_element_bytes_per_token": elements,
        "texts": {"t": [str(value) for value in right]},
        "correct": {"t": right},
    }


def test_the_report(tmp_path: Path) -> None:
    half = [True, False] * 50
    worse = [False] * 4 + half[4:]
    cells = [
        make_cell("no cut", "bfloat16", 4096, half),
        make_cell("cut, 2-way", "bfloat16", 3072, half),
        make_cell("cut, 2-way", "fp8", 1536, worse),
    ]
    rows = summarise(cells)
    assert [row["kv_reduction"] for row in rows] == [0, 0.25, 0.625]
    assert "versus_first" not in rows[0] and "versus_bfloat16" not in rows[1]
    assert rows[1]["versus_first"]["texts_changed"] == 0 and rows[2]["versus_first"] == rows[2]["versus_bfloat16"]
    paired = rows[2]["versus_bfloat16"]
    assert paired["texts_changed"] == 2
    assert (paired["gained"], paired["lost"], paired["difference"], paired["p_value"]) == (0, 2, -0.02, 0.5)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report = {"command": "c", "prompt_tokens": 500, "seed": 1, "rows": rows}
    table = kv.EXPERIMENT.show(report).splitlines()
    plot(report, tmp_path / "out.png")
    assert table[-1].startswith("| cut, 2-way | fp8 | 1544 | 62.50% | 48.0 (38.5 to 57.7) | -2.00 (")
    assert table[-1].endswith("+0 −2, p 0.5, 2 texts | 48.0 |")
    assert (tmp_path / "out.png").stat().st_size > 1000
