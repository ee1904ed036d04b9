"""Drafts by an EAGLE-3 head: those of the published head, and the tokens of plain decoding whatever they are."""

from pathlib import Path

import pytest

from kvforge.compiler.options import BuildOptions
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import ReferenceHead, make_head, streams
from tests.support.sessions.eager import EagerSession, eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"dtype": "float32", "page_size": 4, "max_num_tokens": 64, "max_num_seqs": 8, "max_seq_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def as_long_as_possible(monkeypatch):
    """Draft lengths that do not depend on times."""
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: True)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences, available: dict(available))


def session_of(target: Path, head: Path | None) -> EagerSession:
    more = {} if head is None else {"draft_head": str(head)}
    return eager_session(target, BuildOptions(**OPTIONS, max_draft_len=7, **more))


def decode(session, prompts, count, params=GREEDY, **options):
    """Tokens of each prompt, and the drafts of each step with the tokens that they follow."""
    speculative = None if count == 0 else SpeculativeConfig("eagle3", num_speculative_tokens=count)
    engine = LLMEngine(session=session, num_pages=100, speculative=speculative, **options)
    seen = []
    if count:
        run = engine.runner.head_draft.draft

        def draft(plan, slots):
            run(plan, slots)
            seen.extend((s.tokens[: s.length].tolist(), list(found)) for s, found in plan.drafts.items())

        engine.runner.head_draft.draft = draft
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    texts = {}
    while engine.has_unfinished():
        for output in engine.step():
            texts.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check_invariants()
    return texts, seen, engine


PROMPTS = [[5, 6, 7], [9] * 11, [5, 6, 7, 8, 30, 40, 50]]


@pytest.mark.parametrize("draft_vocab, fields", [(50, {}), (320, {"norm_before_residual": True})])
def test_drafts_are_the_published_head_s(tmp_path, draft_vocab, fields):
    target = make_checkpoint(tmp_path / "target")
    head = make_head(
        tmp_path / "head", target, draft_vocab=draft_vocab, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **fields
    )
    plain, _, _ = decode(session_of(target, None), PROMPTS, 0)
    texts, seen, _ = decode(session_of(target, head), PROMPTS, 4)
    assert texts == plain
    reference = ReferenceHead(head, target)
    assert len(seen) > 20
    for tokens, drafts in seen:
        assert drafts == reference.draft(tokens, streams(target, tokens[:-1], (1, 2, 3)), len(drafts))
