"""Greedy decoding with exits by the rule as it is documented, of one sequence alone, and engines to hold against it."""

from typing import NamedTuple

import numpy as np

from kvforge.runtime import LLMEngine
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
