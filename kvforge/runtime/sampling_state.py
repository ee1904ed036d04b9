"""What the sampler keeps of a sequence between steps."""

import random

import torch

from kvforge.runtime.sampling_params import SamplingParams


class SamplingState:
    """Random numbers, token counts and forbidden words of one sequence; survives preemption.

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
    ) -> None:
        self.params = params
        self.random = random.Random(None if params.seed is None else (params.seed + index) % 2**64)
        """One number per sampled token, so seeded tokens do not depend on the rest of the batch."""
        bad_tokens = sorted({word[0] for word in bad_words if len(word) == 1})
        self.bad_tokens = torch.tensor(bad_tokens, dtype=torch.long)
        self.bad_sequences = [word for word in bad_words if len(word) > 1]
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long)
        self.has_penalties = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.counts: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None
        if self.has_penalties:
            self.counts = torch.zeros(vocab_size)
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self.in_prompt[torch.tensor(prompt_token_ids, dtype=torch.long)] = True
        self.adjusts_logits = bool(self.has_penalties or bad_words or params.min_tokens > 0)

    def record(self, token: int) -> None:
        """Count a generated token."""
        if self.counts is not None:
            self.counts[token] += 1


def make_state(
    params: SamplingParams,
    index: int,
    prompt_token_ids: list[int],
    vocab_size: int,
    stop_ids: frozenset[int],
    bad_words: list[tuple[int, ...]],
) -> SamplingState | None:
    """Return the state a sequence needs; None if it only ever takes the most probable token."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    if (
        params.greedy
        and params.logprobs is None
        and penalties == (0, 0, 1)
        and not bad_words
        and params.min_tokens == 0
    ):
        return None
    return SamplingState(params, index, prompt_token_ids, vocab_size, stop_ids, bad_words)
