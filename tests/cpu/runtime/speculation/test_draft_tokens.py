"""A request's own draft tokens: what one step gives, where they end, what stays in the cache, what is refused."""

import dataclasses
import random

import numpy as np
import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.sampling.sampler import sample
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 6, 7, 8, 9, 10]


def serve(params, session=None, prompt=PROMPT, **options):
    """(tokens of each step by sequence, its last output) of one request; the invariants hold after every step."""
    engine = LLMEngine(session=session or FakeSession(max_draft_len=8), **{"num_pages": 60, **options})
    engine.add_request("a", prompt, SamplingParams(**params))
    steps, last = {}, {}
    while engine.has_unfinished():
        for output in engine.step():
            steps.setdefault(output.index, []).append(output)
            last[output.index] = output
        engine.check_invariants()
    assert engine.stats()["num_used_pages"] == 0 and not engine.scheduler.drafts.proposals
    return steps, last, engine


def text(outputs):
    return [token for output in outputs for token in output.new_token_ids]


GREEDY = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}
KINDS = {
    "greedy": GREEDY,
    "logprobs": {**GREEDY, "logprobs": 3, "return_logits": True},
    "seeded": {**GREEDY, "temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 1},
    "adjusted": {
        **GREEDY,
        "temperature": 0.8,
        "seed": 4,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "min_tokens": 5,
        "bad_words_ids": [[4], [8, 10]],
        "logit_bias": {11: 2.0, 12: -3.0},
        "top_p": 0.8,
        "top_p_decay": 0.9,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_right", [0, 1, 4, 8])
def test_right_drafts_and_one_token_more_come_in_one_step(kind, num_right):
    params = KINDS[kind]
    plain, _, _ = serve(params)
    expected = text(plain[0])
    wrong = [(expected[num_right] + 1) % 64, 3] if num_right < 8 else []
    steps, last, engine = serve({**params, "draft_token_ids": [*expected[:num_right], *wrong]})
    assert text(steps[0]) == expected
    assert len(steps[0][0].new_token_ids) == num_right + 1 and len(steps[0]) == 9 - num_right
    metrics = last[0].metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (num_right + len(wrong), num_right)
    stats = engine.stats()
    assert (stats["num_draft_tokens"], stats["num_accepted_draft_tokens"]) == (num_right + len(wrong), num_right)
    assert stats["num_generated_tokens"] == 9 and stats["histograms"]["inter_token_s"]["count"] == 8
    for name in ("logprobs", "logits"):
        got = [entry for output in steps[0] for entry in getattr(output, name) or ()]
        want = [entry for output in plain[0] for entry in getattr(output, name) or ()]
        assert len(got) == len(want) and all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_every_sequence_of_a_request_verifies_on_its_own():
    params = {**GREEDY, "temperature": 1.2, "seed": 5, "n": 3}
    plain, _, _ = serve(params)
    steps, last, _ = serve({**params, "draft_token_ids": text(plain[1])[:4]})
    assert {index: text(outputs) for index, outputs in steps.items()} == {i: text(plain[i]) for i in range(3)}
    assert len(steps[1][0].new_token_ids) == 5 and last[0].metrics.num_draft_tokens == 12
    assert len(steps[0][0].new_token_ids) < 5


@pytest.mark.parametrize(
    "changes", [{"stop_token_ids": 3}, {"stop_words_ids": 3}, {"max_tokens": 4}, {"eos": 3}, {"max_seq_len": 10}]
)
def test_a_sequence_ends_within_its_drafts(changes):
    plain, _, _ = serve(GREEDY)
    expected = text(plain[0])
    assert expected[3] not in expected[:3]
    session, options, params = FakeSession(max_draft_len=8), {}, {**GREEDY}
    for name in changes:
        if name == "stop_token_ids":
            params[name] = [expected[3]]
        elif name == "stop_words_ids":
            params[name] = [expected[2:4]]
        elif name == "eos":
            session = FakeSession(eos_token_ids=(expected[3],), max_draft_len=8)
            params["ignore_eos"] = False
        elif name == "max_tokens":
            params[name] = 4
        else:
            options[name] = len(PROMPT) + 4
    steps, last, _ = serve({**params, "draft_token_ids": expected[:8]}, session, **options)
    assert [output.new_token_ids for output in steps[0]] == [expected[:4]]
    assert last[0].finish_reason == ("length" if changes.keys() & {"max_tokens", "max_seq_len"} else "stop")


def test_drafts_take_only_what_the_step_has_left():
    plain, _, _ = serve(GREEDY)
    expected = text(plain[0])
    drafted = {**GREEDY, "draft_token_ids": expected[:5]}
    for num_tokens, num_drafts in ((6, 0), (7, 1), (8, 2), (11, 5), (20, 5)):
        steps, last, _ = serve(drafted, max_num_tokens=num_tokens)
        assert text(steps[0]) == expected and last[0].metrics.num_draft_tokens == num_drafts
    steps, last, _ = serve(drafted, num_pages=4)
    assert text(steps[0]) == expected and last[0].metrics.num_accepted_draft_tokens == 5
    params = {**drafted, "max_tokens": 3}
    assert serve(params, num_pages=2)[1][0].metrics.num_draft_tokens == 2, "eight tokens fit two pages"


def test_the_cache_knows_only_what_was_accepted():
    plain, _, _ = serve(GREEDY)
    expected = text(plain[0])
    session = FakeSession(max_draft_len=8)
    wrong = [*expected[:3], *([60] * 9)]
    _, _, engine = serve({**GREEDY, "max_tokens": 5, "draft_token_ids": wrong}, session)
    session.poison_pages(engine.scheduler.pool.free_pages)

    def reused(prompt):
        engine.add_request("again", prompt, SamplingParams(temperature=0.0, max_tokens=1))
        return engine.step()[0].metrics.num_reused_pages

    assert reused([*PROMPT, *wrong]) == 2, "6 prompt tokens and 3 right drafts fill two pages of four"
    assert reused([*PROMPT, *expected]) == 2


class BrokenAfter(FakeSession):
    """Contexts of ``length`` tokens get NaN logits."""

    length = 0

    def upper(self, step, pools):
        logits = super().upper(step, pools)
        logits[step.positions[step.survivor_index.long()] + 1 == self.length] = float("nan")
        return logits


def test_logits_that_are_not_finite_after_a_draft_end_the_sequence_there(caplog):
    expected = text(serve(GREEDY)[0][0])
    session = BrokenAfter(max_draft_len=8)
    session.length = len(PROMPT) + 3
    steps, last, engine = serve({**GREEDY, "draft_token_ids": expected[:8]}, session)
    assert text(steps[0]) == expected[:3] and len(steps[0]) == 1
    assert (last[0].finish_reason, last[0].stop_reason) == ("error", "the model's logits are not finite")
    assert engine.stats()["num_cached_pages"] == 2, "the token before had good logits"
    assert engine.stats()["histograms"]["generated_tokens"]["sum"] == 3 == engine.stats()["num_generated_tokens"]


def test_more_drafts_than_a_step_verifies_are_refused():
    engine = LLMEngine(session=FakeSession(max_num_seqs=2, max_draft_len=1), num_pages=60)
    refused = SamplingParams(draft_token_ids=[3, 4, 5, 6])
    with pytest.raises(RequestError, match=r"has 4 tokens, but a step of this engine verifies at most 3; give fewer"):
        engine.add_request("a", PROMPT, refused)
    with pytest.raises(RequestError, match="draft_token_ids holds token id 64"):
        engine.add_request("a", PROMPT, SamplingParams(draft_token_ids=[64]))
    assert not engine.has_unfinished() and not engine.scheduler.drafts.proposals
    engine.add_request("a", PROMPT, SamplingParams(draft_token_ids=[3, 4, 5]))
    assert engine.abort("a") and not engine.scheduler.drafts.proposals


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": ["ab", "q"]},
        {"stop": ["c"], "min_tokens": 6, "temperature": 1.0, "seed": 2},
        {"guided_decoding": {"kind": "regex", "guide": "[a-d]{9}[0-9]+x"}},
        {"guided_decoding": {"kind": "regex", "guide": "(cat|dog|bird)+"}, "temperature": 1.0, "seed": 9},
        {"guided_decoding": {"kind": "json"}, "temperature": 0.8, "seed": 11, "logprobs": 2},
    ],
)
def test_stop_strings_and_guides_see_every_token_once_and_in_order(changes):
    if "guided_decoding" in changes:
        pytest.importorskip("llguidance")
    rng = random.Random(0)
    llm = LLM(session=FakeSession(vocab_size=300, max_draft_len=12), tokenizer=byte_level(), num_pages=100)
    allowed = {token: 6.0 for letter in "abcqx 1" for token in llm.tokenizer.encode(letter, add_special_tokens=False)}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "logit_bias": allowed, **changes})
    (plain,) = llm.generate([5, 6], params, use_tqdm=False)[0].outputs
    for num_right in (0, 1, 3, 12, 30):
        drafts = [*plain.token_ids[:num_right], *(rng.randrange(3, 300) for _ in range(3))]
        drafted = dataclasses.replace(params, draft_token_ids=drafts)
        output = llm.generate([5, 6], drafted, use_tqdm=False)[0]
        assert output.outputs == [plain]
        assert output.metrics.num_accepted_draft_tokens >= min(num_right, len(plain.token_ids) - 1)
    llm.engine.check_invariants()


def test_an_error_while_sampling_after_a_draft_ends_the_sequences_that_got_there(caplog, monkeypatch):
    expected = text(serve(GREEDY)[0][0])
    calls = iter(range(100))
    monkeypatch.setattr(
        "kvforge.runtime.speculation.verification.sample", lambda *a: 1 // 0 if next(calls) == 2 else sample(*a)
    )
    # Both prompts in one step: neither waits for the other's pages.
    engine = LLMEngine(session=FakeSession(max_draft_len=8), num_pages=60, enable_prefix_cache=False)
    walked = {**GREEDY, "logprobs": 0}
    engine.add_request("right", PROMPT, SamplingParams(**walked, draft_token_ids=expected[:5]))
    engine.add_request("wrong", PROMPT, SamplingParams(**walked, draft_token_ids=[expected[0], 3]))
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["right"].finish_reason == "error" and outputs["right"].new_token_ids == expected[:2]
    assert "ZeroDivisionError" in outputs["right"].stop_reason
    assert outputs["wrong"].new_token_ids == expected[:2] and not outputs["wrong"].finished
    engine.check_invariants()
    rest = [token for _ in range(7) for output in engine.step() for token in output.new_token_ids]
    assert rest == expected[2:] and not engine.has_unfinished()
