"""A teacher's answers: one for each conversation, and a run that was ended goes on."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvforge import SamplingParams
from perf.real_model.answers import answer_all


class Echo:
    """Answers with the question and the seed, and counts what it is asked."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def chat(self, conversations: list[Any], params: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        self.groups.append(len(conversations))
        texts = [f"{said[-1]['content']} {one.seed}" for said, one in zip(conversations, params, strict=True)]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=[1, 2])]) for text in texts]


def test_a_run_goes_on_with_the_seeds_it_would_have_had(tmp_path: Path) -> None:
    asked = [{"messages": [{"role": "user", "content": f"q{number}"}]} for number in range(7)]
    whole, parts, llm = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", Echo()
    assert answer_all(llm, asked, whole, 3, SamplingParams(max_tokens=4)) == 14 and llm.groups == [3, 3, 1]
    assert answer_all(llm, asked[:2], parts, 3, SamplingParams(max_tokens=4)) == 4
    assert answer_all(llm, asked, parts, 3, SamplingParams(max_tokens=4)) == 10
    assert parts.read_text() == whole.read_text()
    first = json.loads(whole.read_text().splitlines()[3])["messages"]
    assert [said["role"] for said in first] == ["user", "assistant"] and first[1]["content"] == "q3 3"
