"""What the sampler keeps of a sequence between steps."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from kvforge.runtime.guides.guide import Guide
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.word_automaton import START
from kvforge.runtime.sampling.bad_words import BadWords


class RequestSampling:
    """What the sampler keeps of a request: its sequences share it, and nothing of it changes.

    Attributes:
        bias_ids, bias: int64 and float32, the biased tokens and what is added to their logits.
        stop_ids: int64, tokens that end a sequence; ``late_stop_ids`` end a guided one only where nothing else can
            follow.
        in_prompt: [vocab_size] bool, tokens of the prompt; None without penalties.
        needs_host: more than a token, or of more than logits, filters and a random number: ``sample`` alone does it.
        draws_ahead: a token depends on its logits, temperature, filters and random number alone, so that those after
            drafts can be drawn before it is known whether the drafts are right.
        may_reject: its tokens may come of drafts that were drawn: nobody asked for more than their distribution.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        stop_ids: frozenset[int],
        bad_words: Sequence[tuple[int, ...]],
        guide: Guide | None = None,
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.guide = guide
        self.ends = stop_ids
        bias = params.logit_bias or {}
        self.bias_ids = torch.from_numpy(np.fromiter(bias, np.int64, len(bias)))
        self.bias = torch.from_numpy(np.fromiter(bias.values(), np.float32, len(bias)))
        self.bad_words = BadWords(bad_words) if bad_words else None
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long)
        late = stop_ids - set(params.stop_token_ids) if guide is not None and params.ignore_eos else ()
        self.late_stop_ids = torch.tensor(sorted(late), dtype=torch.long)
        self.has_penalties = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.in_prompt: torch.Tensor | None = None
        if self.has_penalties:
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self.in_prompt[torch.tensor(prompt_token_ids, dtype=torch.long)] = True
        asked = bool(bias or bad_words) or guide is not None or params.min_tokens > 0
        self.adjusts_logits = asked or self.has_penalties
        changes_top_p = params.top_p_decay != 1 or params.top_p_min > params.top_p
        reports = params.logprobs is not None or params.return_logits
        self.needs_host = self.adjusts_logits or reports
        self.draws_ahead = not (params.greedy or changes_top_p or self.needs_host)
        self.may_reject = self.draws_ahead and params.seed is None
        self._needs_state = not params.greedy or self.needs_host

    def state(self, index: int) -> "SamplingState | None":
        """Return what sequence ``index`` needs; None if it only ever takes the most probable token."""
        return SamplingState(self, index) if self._needs_state else None


class SamplingState:
    """Random numbers, token counts, place in its guide and among its bad words of one sequence; survives preemption."""

    def __init__(self, request: RequestSampling, index: int) -> None:
        params = request.params
        self.request = request
        self.params = params
        self.random = random.Random(None if params.seed is None else (params.seed + index) % 2**64)
        """One number per sampled token, so seeded tokens do not depend on the rest of the batch. See ``take``."""
        self._ahead: list[float] = []
        self.top_p = params.top_p
        """Of the next token."""
        self.guide = None if request.guide is None else request.guide.start()
        self.counts: torch.Tensor | None = None
        """[vocab_size] float32, how often each token was generated; None without penalties."""
        if request.has_penalties:
            # Memory that numpy zeroes is taken when it is used: waiting sequences have none.
            self.counts = torch.from_numpy(np.zeros(request.vocab_size, dtype=np.float32))
        self.bad_node = START
        """In ``request.bad_words``."""
        self.adjusts_logits = request.adjusts_logits
        self.draws_ahead = request.draws_ahead
        self.may_reject = request.may_reject

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
        if self.request.bad_words is not None:
            self.bad_node = self.request.bad_words.step(self.bad_node, token)
        if self.guide is not None and token not in self.request.ends:
            self.guide.accept(token)
