"""Drafts that claim to be drawn from what is no distribution fail no step."""

import pytest
import torch

from kvforge.runtime import SamplingParams
from kvforge.runtime.speculation.drafter import Draft
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.fake import FakeSession

PROBS = {
    "double": torch.Tensor.double,
    "bfloat16": torch.Tensor.bfloat16,
    "array": torch.Tensor.numpy,
    "nowhere": lambda probs: probs.to("meta"),
    "nan": lambda probs: probs * torch.nan,
    "negative": lambda probs: -probs,
    "zero": torch.zeros_like,
    "too much": lambda probs: 100 * probs,
}


class Drafter:
    def __init__(self, made, vocab_size):
        self._made, self._vocab_size = made, vocab_size

    def draft(self, sequences, counts):
        size = self._vocab_size
        return [Draft((5, 6, 7)[:count], self._made(torch.full((count, size), 1 / size))) for count in counts]

    def forget(self, sequence):
        pass


@pytest.mark.parametrize("name", PROBS)
def test_probabilities_that_are_none(name):
    session = FakeSession(max_draft_len=3)
    engine = speculative_engine(session, Drafter(PROBS[name], session.manifest.vocab_size))
    for index in range(3):
        engine.add_request(str(index), [3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))
    counts = [0, 0, 0]
    while engine.has_unfinished():
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.stop_reason
            assert all(0 <= token < session.manifest.vocab_size for token in output.new_token_ids)
            counts[int(output.request_id)] += len(output.new_token_ids)
    assert counts == [12, 12, 12] and engine.stats()["num_failed_steps"] == 0


def test_chances_of_other_tokens_than_the_drafts():
    class Wrong(Drafter):
        def draft(self, sequences, counts):
            return [Draft((5, 6), chances=(0.9,) * (index % 4)) for index in range(len(counts))]

    drafting = speculative_engine(FakeSession(max_draft_len=3), Wrong(None, 9)).drafting
    asked = drafting._ask(drafting.drafter, dict.fromkeys("abcd", 2))
    assert list(asked) == ["c"] and asked["c"].first(1).chances == (0.9,)
