"""Decoding with exits of one sequence alone, greedily by the documented rule, and engines to hold against it."""

import dataclasses
import random
from typing import NamedTuple

import numpy as np

from kvforge.runtime import LLMEngine
from tests.support.schedules.engine_schedules import check_tokens, random_plan, run_on_fake_session
from tests.support.sessions.exit import ExitSession
from tests.support.sessions.fake import context_logits


class Expected(NamedTuple):
    """What the rule gives: the tokens of an answer, how many rows exit, and whether that of the prompt's last does."""

    tokens: list[int]
    num_exits: int
    prompt_exits: bool


def probability(logits):
    """Of the most probable token."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return 1 / weights.sum()


def expected_text(session, prompt, threshold, length=24, prompts=False, eos=None):
    """Greedy decoding of ``session``, an ExitSession, up to ``length`` tokens or the token ``eos``."""
    tokens, num_exits, prompt_exits = list(prompt), 0, False
    for index in range(length):
        logits = context_logits(tokens, session.seed, session.manifest.vocab_size)
        exit_logits = session.exit_logits(tokens)
        if (index > 0 or prompts) and probability(exit_logits) > threshold:
            logits, num_exits = exit_logits, num_exits + 1
            prompt_exits = prompt_exits or index == 0
        tokens.append(int(logits.argmax()))
        if tokens[-1] == eos:
            break
    return Expected(tokens[len(prompt) :], num_exits, prompt_exits)


def serve(session, prompts, params, **options):
    """Tokens of each prompt's sequences, and the engine."""
    engine = LLMEngine(session=session, num_pages=100, **options)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    texts = {}
    while engine.has_unfinished():
        for output in engine.step():
            texts.setdefault((int(output.request_id), output.index), []).extend(output.new_token_ids)
        engine.check_invariants()
    return texts, engine


def random_threshold(seed):
    return random.Random(seed).choice([0.1, 0.3, 0.8])


def check_any_sampling(seed, **options):
    """Hold a schedule of any sampling, with drafts of the requests' own, against each sequence alone; the engine's
    stats."""
    rng, plan = random.Random(seed), random_plan(seed)
    options["early_exit_threshold"] = random_threshold(seed)
    expected = {}
    for request in plan.requests:
        for index in range(request.params.n):
            params = dataclasses.replace(request.params, n=1, seed=request.params.seed + index)
            lonely = LLMEngine(session=ExitSession(page_size=16), num_pages=64, enable_prefix_cache=False, **options)
            lonely.add_request("alone", request.prompt, params)
            outputs = [output for _ in range(params.max_tokens) for output in lonely.step()]
            text = [token for output in outputs for token in output.new_token_ids]
            expected[request.request_id, index] = text, outputs[-1].finish_reason
            assert params.logprobs is None or lonely.stats()["num_early_exits"] == 0
        if rng.random() < 0.5:
            right = expected[request.request_id, 0][0][: rng.randint(0, 5)]
            drafts = tuple([*right, 5, 6][: min(plan.max_num_tokens, 8) - 1])
            request.params = dataclasses.replace(request.params, draft_token_ids=drafts)
    _, engine, *outcome = run_on_fake_session(plan, ExitSession, **options)
    check_tokens(*outcome, expected, seed)
    assert engine.stats()["num_failed_steps"] == 0
    return engine.stats()
