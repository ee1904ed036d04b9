"""Compiled engines with a draft head, through the command line."""

from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import (
    ReferenceHead,
    ReferenceModule,
    add_mtp,
    make_head,
    noted_drafts,
    streams,
)

SIZES = "--page-size 8 --max-num-tokens 64 --max-num-seqs 8 --max-seq-len 128 --dtype float32 --max-draft-len 4".split()


@pytest.fixture(autouse=True)
def as_long_as_possible(monkeypatch) -> None:
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: True)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences, available: dict(available))


@pytest.mark.parametrize("cut", [2, 1])
def test_a_compiled_engine_drafts_as_the_head_does(tmp_path: Path, full: bool, capsys, cut: int) -> None:
    if not full:
        pytest.skip("an engine to compile; run with --full")
    target = make_checkpoint(tmp_path / "target", num_hidden_layers=3, cut=cut)
    head = make_head(tmp_path / "head", target, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    engine = tmp_path / "engine"
    assert main(["build", str(target), "-o", str(engine), "--draft-head", str(head), *SIZES]) == 0
    assert "and 256 of the draft head" in capsys.readouterr().out
    assert main(["inspect", str(engine)]) == 0
    assert "eagle3, reads what enters layers 0, 1, 2, drafts 50 of 320 tokens, 256 more" in capsys.readouterr().out
    assert load_manifest(engine).graphs == ("lower", "upper", "verify", "draft")
    reference, first = ReferenceHead(head, target), 2 if cut == 1 else 0
    for tokens, drafts in drafts_of(engine):
        assert drafts == reference.draft(tokens, streams(target, tokens[:-1], (0, 1, 2)), len(drafts), first)


@pytest.mark.parametrize(("family", "cut"), [("deepseek_v3", None), ("glm4_moe", 2)])
def test_a_compiled_engine_drafts_as_the_module_does(tmp_path: Path, full: bool, capsys, family: str, cut: int) -> None:
    if not full:
        pytest.skip("an engine to compile; run with --full")
    target = add_mtp(make_checkpoint(tmp_path / "target", family, num_hidden_layers=3, cut=cut), leave_out="[.]head")
    engine = tmp_path / "engine"
    assert main(["build", str(target), "-o", str(engine), "--draft-head", "mtp", *SIZES]) == 0
    captured = capsys.readouterr()
    assert "of the draft head" in captured.out and "left out" not in captured.err
    assert main(["inspect", str(engine)]) == 0
    assert "mtp, reads what leaves layer 2, drafts 320 of 320 tokens" in capsys.readouterr().out
    reference = ReferenceModule(target)
    for tokens, drafts in drafts_of(engine):
        assert drafts == reference.draft(tokens, len(drafts), 2 if cut else 0)


def drafts_of(engine: Path) -> list[tuple[list[int], list[int]]]:
    """Drafts behind a prompt of three tokens and what follows, which is as without drafts."""
    prompt, texts = [5, 6, 7], []
    for speculative in (None, SpeculativeConfig(load_manifest(engine).draft_head.kind, 4)):
        loaded, seen = LLMEngine(engine, num_pages=32, speculative=speculative), []
        if speculative is not None:
            seen = noted_drafts(loaded)
        loaded.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
        outputs = [output for _ in iter(loaded.has_unfinished, False) for output in loaded.step()]
        texts.append([token for output in outputs for token in output.new_token_ids])
    assert texts[0] == texts[1] and len(seen) > 10
    return seen
