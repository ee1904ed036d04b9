"""What the sampler keeps of a sequence between steps."""

import random

import torch

from kvforge.runtime.guide import Guide
from kvforge.runtime.sampling_params import SamplingParams


class SamplingState:
    """Random numbers, token counts, forbidden words and place in its guide of one sequence; survives preemption.

    A sequence that is greedy and asks for nothing else has no state at all (see ``make_state``).
    """

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        prompt_token_ids: list[int],
        vocab_size: int,
        stop_ids: frozenset[int],
        bad_words: list[tuple[int, ...]],
        guide: Guide | None = None,
    ) -> None:
        self.params = params
        self.random = random.Random(None if params.seed is None else (params.seed + index) % 2**64)
        """One number per sampled token, so seeded tokens do not depend on the rest of the batch. See ``take``."""
        self._ahead: list[float] = []
        bad_tokens = sorted({word[0] for word in bad_words if len(word) == 1})
        self.bad_tokens = torch.tensor(bad_tokens, dtype=torch.long)
        self.bad_sequences = [word for word in bad_words if len(word) > 1]
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long)
        self.top_p = params.top_p
        """Of the next token."""
        bias = params.logit_bias or {}
        self.bias_ids = torch.tensor(list(bias), dtype=torch.long)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self.guide = None if guide is None else guide.start()
        late = stop_ids - set(params.stop_token_ids) if guide is not None and params.ignore_eos else ()
        self.late_stop_ids = torch.tensor(sorted(late), dtype=torch.long)
        """Tokens that end a guided sequence only where nothing else can follow."""
        self._stop_ids = stop_ids
        self.has_penalties = _has_penalties(params)
        self.counts: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None
        if self.has_penalties:
            self.counts = torch.zeros(vocab_size)
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self.in_prompt[torch.tensor(prompt_token_ids, dtype=torch.long)] = True
        self.adjusts_logits = _adjusts_logits(params, bad_words, guide)
        changes_top_p = params.top_p_decay != 1 or params.top_p_min > params.top_p
        reports = params.logprobs is not None or params.return_logits
        self.draws_ahead = not (params.greedy or self.adjusts_logits or changes_top_p or reports)
        """A token depends on its logits, temperature, filters and random number alone, so that those after drafts can
        be drawn before it is known whether the drafts are right."""
        self.may_reject = self.draws_ahead and params.seed is None
        """Its tokens may come of drafts that were drawn: nobody asked for more than their distribution."""

    def peek(self, count: int) -> list[float]:
        """Return the random numbers of the next ``count`` tokens without taking them."""
        while len(self._ahead) < count:
            self._ahead.append(self.random.random())
        return self._ahead[:count]

    def take(self, count: int = 1) -> list[float]:
        """Return the random numbers of the next ``count`` tokens; each is taken once."""
        numbers = self.peek(count)
        del self._ahead[:count]
        return numbers

    def record(self, token: int) -> None:
        """Take note of a generated token; raises KvforgeError where the guide cannot go on with it."""
        params = self.params
        if token == params.top_p_reset_id:
            self.top_p = params.top_p
        else:
            self.top_p = max(self.top_p * params.top_p_decay, params.top_p_min)
        if self.counts is not None:
            self.counts[token] += 1
        if self.guide is not None and token not in self._stop_ids:
            self.guide.accept(token)


def make_state(
    params: SamplingParams,
    index: int,
    prompt_token_ids: list[int],
    vocab_size: int,
    stop_ids: frozenset[int],
    bad_words: list[tuple[int, ...]],
    guide: Guide | None = None,
) -> SamplingState | None:
    """Return the state a sequence needs; None if it only ever takes the most probable token."""
    plain = params.greedy and params.logprobs is None and not params.return_logits
    if plain and not _adjusts_logits(params, bad_words, guide):
        return None
    return SamplingState(params, index, prompt_token_ids, vocab_size, stop_ids, bad_words, guide)


def _has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _adjusts_logits(params: SamplingParams, bad_words: list[tuple[int, ...]], guide: Guide | None) -> bool:
    asked = params.logit_bias or bad_words or guide is not None or params.min_tokens > 0
    return bool(asked or _has_penalties(params))
