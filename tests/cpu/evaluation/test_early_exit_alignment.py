"""Early-exit alignment: counted by hand, and through an engine against the plain-torch reference."""

from pathlib import Path

import pytest
import torch

from kvforge.common.errors import EngineError, KvforgeError
from kvforge.evaluation.early_exit import (
    alignment,
    alignment_table,
    confidence_and_agreement,
    count_alignment,
    generated,
    plot_alignment,
)
from kvforge.evaluation.score import wilson
from kvforge.runtime import LLM, SamplingParams
from kvforge.runtime.scoring.score import stream_logits
from model_defs.reference import reference_early_exit, reference_logits
from tests.support.models.checkpoints import load_weights
from tests.support.models.engines import EARLY_EXIT, SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.rounding import assert_near, config_of, model_error

TOKENS = 130
"""Of the longest document."""
CONFIDENCE = torch.tensor([0.1, 0.2, 0.5, 0.6, 0.95, 0.96, 0.99, 1.0])
AGREES = torch.tensor([False, True, False, True, True, False, True, True])


def test_a_case_counted_by_hand() -> None:
    """A bound belongs to the higher bin, 1 to the last; a threshold itself is not above it."""
    result = count_alignment(CONFIDENCE, AGREES, bins=4, thresholds=(0.5, 0.95, 0.99))
    assert [(b.low, b.high, b.num_tokens, b.num_agree) for b in result.bins] == [
        (0.0, 0.25, 2, 1),
        (0.25, 0.5, 0, 0),
        (0.5, 0.75, 2, 1),
        (0.75, 1.0, 4, 3),
    ]
    assert (result.all.num_tokens, result.all.num_agree, result.all.alignment) == (8, 5, 5 / 8)
    assert [(a.low, a.num_tokens, a.num_agree) for a in result.above] == [(0.5, 5, 4), (0.95, 3, 2), (0.99, 1, 1)]
    assert result.above[0].share == 5 / 8 and result.above[0].interval == wilson(4, 5)
    empty = result.bins[1]
    assert (empty.share, empty.alignment, empty.interval) == (0.0, None, None)
    assert sum(b.share for b in result.bins) == 1 and sum(b.num_tokens for b in result.bins) == 8
    lines = alignment_table(result).splitlines()
    assert lines[1].split() == ["all", "8", "100.0%", "62.5%", "30.6", "to", "86.3"]
    assert lines[3].split()[:5] == ["above", "0.95", "3", "37.5%", "66.7%"]
    assert len(lines) == 1 + 1 + 3 + 3  # a bin without tokens is left out


def test_confidence_is_the_exits_and_ties_go_to_the_lowest_token() -> None:
    exits = torch.tensor([[0.0, 0.0, -100.0], [0.0, 100.0, 0.0]])
    logits = torch.tensor([[5.0, 5.0, 0.0], [1.0, 0.0, 0.5]])
    confidence, agrees = confidence_and_agreement(exits, logits)
    # Half is exp(0) / (exp(0) + exp(0) + 0), and one is 1 / (1 + 0): nothing is rounded.
    assert confidence.tolist() == [0.5, 1.0] and agrees.tolist() == [True, False]
    for rows in ((exits * float("nan"), logits), (exits, logits * float("nan"))):
        with pytest.raises(EngineError, match="not finite"):
            confidence_and_agreement(*rows)


def test_what_cannot_be_counted_is_refused(engines: EngineShelf) -> None:
    with pytest.raises(KvforgeError, match="0 bins"):
        count_alignment(CONFIDENCE, AGREES, bins=0)
    with pytest.raises(EngineError, match="no early exit"):
        alignment(LLM(engines.engine(SWIFTKV), num_pages=8), [([3], [4])])
    with pytest.raises(KvforgeError, match="no tokens"):
        alignment(LLM(engines.engine(EARLY_EXIT), num_pages=8), [([3], [])])


def test_an_engine_counts_what_the_reference_counts(engines: EngineShelf, tmp_path: Path) -> None:
    """Documents of several lengths in steps of a few tokens; only the continuations count."""
    llm, checkpoint = LLM(engines.engine(EARLY_EXIT), num_pages=64, max_num_tokens=50), engines.checkpoint(EARLY_EXIT)
    config, weights = config_of(checkpoint), load_weights(checkpoint)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (TOKENS, 2, 41)]
    documents = [(texts[0][:60], texts[0][60:]), (texts[1][:1], texts[1][1:]), (texts[2][:1], texts[2][1:])]
    exits, full = (
        [reference(config, weights, torch.tensor([*given, *rest]))[len(given) - 1 : -1] for given, rest in documents]
        for reference in (reference_early_exit, reference_logits)
    )
    for chunk in stream_logits(llm, documents, early_exit=True):
        rows = slice(chunk.start, chunk.start + len(chunk.logits))
        assert chunk.exit_logits is not None
        for got, expected in ((chunk.exit_logits, exits), (chunk.logits, full)):
            assert_near(got, expected[chunk.request][rows], model_error(config, TOKENS))
    expected = count_alignment(*confidence_and_agreement(torch.cat(exits), torch.cat(full)), bins=10)
    result = alignment(llm, documents, bins=10)
    assert result.all.num_tokens == 70 + 1 + 40 and result.all == expected.all
    # A confidence may lie within float32's error of a bound.
    pairs = list(zip(result.bins, expected.bins, strict=True))
    assert sum(abs(one.num_tokens - other.num_tokens) for one, other in pairs) <= 2
    plot_alignment(result, tmp_path / "alignment.svg")
    assert (tmp_path / "alignment.svg").read_text().startswith("<?xml")


def test_generated_documents_are_the_full_models_answers(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(engines.engine(EARLY_EXIT), num_pages=64)
    prompts = [[5, 6, 7, 8], [100]]
    documents = generated(llm, prompts, 12)
    assert [list(given) for given, _ in documents] == prompts
    params = SamplingParams(temperature=0.0, max_tokens=12)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert [list(rest) for _, rest in documents] == answers
    for chunk in stream_logits(llm, documents, early_exit=True):
        # What the model decodes is what it says of its own answer, so alignment is with the tokens themselves.
        assert torch.equal(chunk.logits.argmax(-1), chunk.token_ids)
    assert alignment(llm, documents).all.num_tokens == sum(len(answer) for answer in answers)
    monkeypatch.setattr(llm.engine.runner, "run", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="a prompt failed"):
        generated(llm, prompts, 12)


def test_an_exit_that_is_the_full_models_head_is_always_right(engines: EngineShelf) -> None:
    """Both heads of this session are the exit's: alignment 1 with an interval that says how many tokens there were."""
    llm = LLM(engines.engine(EARLY_EXIT), num_pages=8)
    session = llm.engine.runner._session
    upper = session.upper
    session.upper = lambda step, pools: session.early_exit(step.hidden, step.survivor_index)  # type: ignore[method-assign]
    try:
        result = alignment(llm, [([3], list(range(4, 54)))])
    finally:
        session.upper = upper  # type: ignore[method-assign]
    assert (result.all.alignment, result.all.interval) == (1.0, wilson(50, 50))
