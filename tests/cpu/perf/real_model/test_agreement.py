"""Greedy answers of engines and of transformers: the same weights, the same tokens; gaps where they are not."""

import json
from pathlib import Path

import pytest
import torch

from kvforge.checkpoint.model import open_model
from perf.harness.engines import TEACHER_DIR
from perf.real_model import agreement
from perf.real_model.sampled import as_transformers
from tests.support.models.chat import with_chat_template
from tests.support.models.engines import PLAIN


def two_answers() -> agreement.Answers:
    """Tokens 5, 6 and 7, with 8 behind each by 1, 2 and 3."""
    best = [torch.tensor([[5, 8], [6, 8]]), torch.tensor([[7, 8]])]
    return agreement.Answers([[5, 6], [7]], best, [torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[3.0, 0.0]])])


def test_differences_and_gaps_by_hand() -> None:
    """The second token of the first answer is another one, whose gap was 2 and moves by 2.5."""
    reference = two_answers()
    logits = torch.full((3, 9), -9.0)
    logits[0, 5], logits[0, 8], logits[1, 6], logits[1, 8], logits[2, 7], logits[2, 8] = 1.0, 0.0, 0.0, 0.5, 3.0, 0.0
    given = [(0, 0, logits[:2]), (1, 0, logits[2:])]
    row = agreement.row_of("one", iter(given), reference)
    assert (row["same"], row["num_answers"], row["num_tokens"]) == (1, 2, 3)
    assert row["gap"] == [2.0, 2.0] and row["moved"][0] == 0 and row["moved"][-1] == 2.5
    assert row["agreement"]["value"] == pytest.approx(2 / 3)
    told = agreement.row_of("two", iter(given), reference, [[5, 6], [7]])
    assert told["same"] == 2 and told["gap"] == []
    assert reference.gap(0, 1, 3) == 2.0  # not among those kept: at least the last one's


@torch.inference_mode()
def test_verified_answers_are_those_of_transformers_own_decoding() -> None:
    """Whatever the drafts are: up to the first other token, which is the model's own."""
    model = as_transformers(open_model(TEACHER_DIR), "cpu", torch.float32)
    prompts = [list(range(5, 25)), list(range(30, 37))]
    greedy = [
        model.generate(torch.tensor([each]), do_sample=False, max_new_tokens=6, eos_token_id=None)[0, len(each) :]
        for each in prompts
    ]
    right = [each.tolist() for each in greedy]
    wrong = [[*right[0][:3], right[0][3] + 1, *right[0][4:]], right[1]]
    for drafts, lengths in ((right, [6, 6]), (wrong, [4, 6])):
        found = agreement.verified(agreement.given_to_model(model, prompts, drafts), drafts)
        assert found.tokens == [own[:length] for own, length in zip(right, lengths, strict=True)]
        assert [best[:, 0].tolist() for best in found.best] == found.tokens
        row = agreement.row_of("itself", agreement.given_to_model(model, prompts, found.tokens), found)
        assert row["same"] == 2 and row["agreement"]["value"] == 1


def test_an_engine_answers_as_transformers_and_a_second_run_keeps_rows(
    engines, tmp_path: Path, monkeypatch, capsys
) -> None:
    engine = with_chat_template(engines.engine(PLAIN), tmp_path / "chat")
    asked = ("Who?", "What is it that a fox does?", "Where?")
    lines = (json.dumps({"messages": [{"role": "user", "content": text}]}) for text in asked)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    given = ["agreement", str(engines.checkpoint(PLAIN)), str(tmp_path / "prompts.jsonl"), "--max-tokens", "8"]
    given += ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "found"), "--kv-cache-gib", "0.1"]
    for name in ("one", "two"):
        monkeypatch.setattr("sys.argv", [*given, f"{name}={engine}"])
        assert agreement.EXPERIMENT.run() == 0
        monkeypatch.setattr(agreement, "verified", None)  # kept by the first run
    report = json.loads((tmp_path / "found.json").read_text())
    assert [row["name"] for row in report["rows"]] == [agreement.PEER, "one", "two"]
    assert all(row["num_answers"] == 3 and row["same"] >= 2 for row in report["rows"])
    assert capsys.readouterr().out.endswith((tmp_path / "found.md").read_text() + "\n")
