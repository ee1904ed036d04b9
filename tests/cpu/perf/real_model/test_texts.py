"""What students of a real model are distilled and judged on: nothing is in both, and prompts are short enough."""

import json
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.real_model import texts


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder as ``texts`` wants it, with a few lines of each."""
    wiki = "examples/word_language_model/data/wikitext-2"
    files = {
        f"{wiki}/valid.txt": " = Title = \n a well @-@ known word , 1 @,@ 000 ( x ) .\n",
        f"{wiki}/test.txt": "another text . \n",
        "char-rnn/data/tinyshakespeare/input.txt": "".join(f"Line {number}\n" for number in range(100)),
        "grade-school-math/grade_school_math/data/train.jsonl": _rows([{"question": "1 + 1?", "answer": "2"}]),
        "grade-school-math/grade_school_math/data/test.jsonl": _rows([{"question": "2 + 2?", "answer": "4"}] * 2),
        "stanford_alpaca/seed_tasks.jsonl": _instruction("Name a colour.", ""),
        "self-instruct/human_eval/user_oriented_instructions.jsonl": _instruction("Say it shorter.", "A long text."),
        "self-instruct/data/finetuning/t0_train_50k/data_per_template/a.jsonl": _rows(
            [{"prompt": f"Question {number}?", "completion": ""} for number in range(9)] + [{"prompt": "x" * 3000}]
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _rows(rows: list[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _instruction(text: str, given: str) -> str:
    return _rows([{"instruction": text, "instances": [{"input": given, "output": ""}]}])


def asked(path: Path) -> set[str]:
    return {json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()}


def test_nothing_that_is_held_out_is_trained_on(sources: Path, tmp_path: Path) -> None:
    found = texts.write_texts(sources, tmp_path / "out", 4)
    train, held_out = tmp_path / "out/train", tmp_path / "out/held-out"
    assert {*found} == {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*")}
    assert asked(held_out / "prompts.jsonl") == {"Name a colour.", "Say it shorter.\n\nA long text.", "2 + 2?"}
    assert len(asked(train / "prompts.jsonl")) in (4, 5) and "1 + 1?" in asked(train / "prompts.jsonl")
    assert all(len(prompt) <= texts.LONGEST_PROMPT for prompt in asked(train / "prompts.jsonl"))
    assert (train / "book.txt").read_text() + (held_out / "book.txt").read_text() == "".join(
        f"Line {number}\n" for number in range(100)
    )
    assert "class ArgumentParser(" in (held_out / "code.txt").read_text()
    assert "class ArgumentParser(" not in (train / "code.txt").read_text()


def test_rows_have_as_much_of_each_text(sources: Path, tmp_path: Path) -> None:
    texts.write_texts(sources, tmp_path / "out", 4)
    train = tmp_path / "out/train"
    rows = [json.loads(line)["text"] for line in (train / "texts.jsonl").read_text().splitlines()]
    whole = [(train / f"{kind}.txt").read_text() for kind in ("book", "code", "wiki")]
    least = min(map(len, whole))
    assert rows == [text[:least] for text in whole] and least < texts.ROW


def test_wiki_is_running_text(sources: Path) -> None:
    folder = sources / "examples/word_language_model/data/wikitext-2"
    assert texts.wiki(folder / "valid.txt") == " = Title = \n a well-known word, 1,000 (x).\n"


def test_a_missing_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["texts", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(KvforgeError, match=r"tinyshakespeare.*SOURCES needs it"):
        texts.main()
