"""What a request asks of the sampler, validated once, in vLLM's parameter names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.common.number_checks import check_integer, check_number, check_sampling
from kvforge.common.sampling_fields import MIN_TOP_P, SAMPLING_FIELDS
from kvforge.runtime.requests.checks import (
    MAX_DRAFT_TOKENS,
    MAX_ID_WORDS,
    MAX_RANGES,
    MAX_WORDS,
    check_flag,
    check_ids,
    check_name,
    check_retention,
    checked_bias,
    checked_id_words,
    checked_texts,
    plain,
    plain_list,
)
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.requests.word_automaton import WordAutomaton

MAX_LOGPROBS = 100
MAX_SEQUENCES = 256
MAX_BIAS = float(np.float32(1e30))
"""The same for those who send float32."""
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Order of the operations on the logits: ``logit_bias``, repetition, frequency and presence penalties, bad
    words, ``guided_decoding``, minimum length, temperature, ``min_p``, ``top_k``, ``top_p`` (on the renormalised
    rest).

    Attributes:
        n: sequences to generate; they share the prompt's pages and take the seeds ``seed + i``.
        temperature: below 1e-6 is greedy; at most 1e4.
        top_p: keep the fewest tokens whose probability reaches this, in (0, 1]; below 1e-6 it is 1e-6, which keeps
            the most probable token alone.
        top_k: keep this many tokens; 0 or -1 is off.
        min_p: drop tokens below this fraction of the most probable token's probability, in [0, 1].
        max_tokens: generated tokens at most; the engine's ``max_seq_len`` also ends a sequence, as "length".
        min_tokens: no end-of-text, stop token, stop string or stop word ends a sequence before this length,
            except an end-of-text or stop token where bad words forbid every other token.
        stop: strings that end the text; the string itself is not part of the text.
        stop_token_ids: tokens that end the sequence; kept in the token ids, not in the text.
        stop_words_ids: the same with sequences of tokens.
        bad_words: strings never generated (as the tokenizer writes them, with and without a leading space); a
            sequence that they leave no token ends with finish reason "error".
        bad_words_ids: the same as sequences of token ids.
        ignore_eos: go on after the end-of-text token.
        logit_bias: added to the logits of these token ids, before everything else: at most 1e30; -inf, and what is
            below -1e30, forbids a token.
        guided_decoding: the form of every generated text; a mapping of its fields will do.
        top_p_decay, top_p_min, top_p_reset_id: after every token ``top_p`` becomes
            ``max(top_p * top_p_decay, top_p_min)``, and its first value again after the token ``top_p_reset_id``
            (arXiv 2206.04624, section 3.2); -1 is no token. The first two are in (0, 1], and ``top_p_min`` is at
            least 1e-6 as ``top_p`` is.
        seed: repeats a sequence's random numbers, one a token, whatever else is in the batch.
        logprobs: log-probabilities of this many most probable tokens beside the chosen one (0: only the
            chosen one) under the model's own distribution: before bias, penalties, temperature and filters.
        return_logits: give out the model's logits behind every generated token, before any change.
        presence_penalty: subtracted from the logit of every token generated so far, in [-1e4, 1e4].
        frequency_penalty: subtracted once per occurrence among the generated tokens, in [-1e4, 1e4].
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and of the
            generated text (arXiv 1909.05858, section 4.1), in [1e-3, 1e3].
        priority: lower is served earlier and preempted later.
        deadline_s: seconds after arrival at which the request is given up with finish reason "abort".
        draft_token_ids: a guess of the first generated tokens, verified in the first generation step.
        draft_scope: requests with the same one, but "", may draft from one another's outputs: see
            ``SpeculativeConfig.suffix_sharing``; at most 128 characters.
        retention: (start, end, priority) of ranges of prompt tokens: pages of a higher priority, 0 to 100, stay
            longer in the prefix cache; others have 35, and an end of -1 is the prompt's.
        prompt_logprobs: the same of the prompt's own tokens, all but the first. All of the prompt goes past the cut
            then, and nothing of it comes of the prefix cache.

    Lists are bounded, see ``kvforge.runtime.requests.checks``; of equal entries of stop and bad words one is kept.

    Raises:
        RequestError: a value is out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    stop_words_ids: Sequence[Sequence[int]] = ()
    bad_words: Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    guided_decoding: GuidedDecoding | None = None
    top_p_decay: float = 1.0
    top_p_min: float = MIN_TOP_P
    top_p_reset_id: int = -1
    seed: int | None = None
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    return_logits: bool = False
    draft_token_ids: Sequence[int] = ()
    draft_scope: str = ""
    retention: Sequence[tuple[int, int, int]] = ()
    priority: int = 0
    deadline_s: float | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value, maximum = getattr(self, item.name), _LISTS.get(item.name)
            if item.name == "stop" and isinstance(value, str):
                value = (value,)
            object.__setattr__(
                self, item.name, plain(value) if maximum is None else plain_list(item.name, value, maximum)
            )
        for name, (minimum, maximum) in INTEGERS.items():
            if not (name in _OPTIONAL and getattr(self, name) is None):
                check_integer(name, getattr(self, name), minimum, maximum)
        for name in SAMPLING_FIELDS:
            check_sampling(name, getattr(self, name))
        if self.deadline_s is not None:
            check_number("deadline_s", self.deadline_s, 0.0, 1e9, True)
        check_flag("return_logits", self.return_logits)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"is {self.min_tokens}, above the {self.max_tokens} tokens to generate",
                "lower it or raise {max_tokens}",
                field="min_tokens",
            )
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, checked_texts(name, getattr(self, name)))
        for name in ("stop_words_ids", "bad_words_ids"):
            object.__setattr__(self, name, checked_id_words(name, getattr(self, name)))
        check_ids("stop_token_ids", self.stop_token_ids)
        check_ids("draft_token_ids", self.draft_token_ids)
        check_retention("retention", self.retention)
        check_name("draft_scope", self.draft_scope)
        object.__setattr__(self, "logit_bias", checked_bias("logit_bias", self.logit_bias, MAX_BIAS))
        object.__setattr__(self, "guided_decoding", GuidedDecoding.of(self.guided_decoding))
        for name in ("top_p", "top_p_min"):
            object.__setattr__(self, name, max(getattr(self, name), MIN_TOP_P))

    @property
    def greedy(self) -> bool:
        """The most probable token is always taken."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @cached_property
    def stop_automaton(self) -> WordAutomaton | None:
        """What finds ``stop``, for all sequences; None without."""
        return WordAutomaton(self.stop) if self.stop else None

    @cached_property
    def stop_words_automaton(self) -> WordAutomaton | None:
        """What finds ``stop_words_ids``, for all sequences; None without."""
        return WordAutomaton(self.stop_words_ids) if self.stop_words_ids else None


_LISTS = {
    "stop": MAX_WORDS,
    "stop_token_ids": MAX_ID_WORDS,
    "stop_words_ids": MAX_ID_WORDS,
    "bad_words": MAX_WORDS,
    "bad_words_ids": MAX_ID_WORDS,
    "draft_token_ids": MAX_DRAFT_TOKENS,
    "retention": MAX_RANGES,
}
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
INTEGERS = {
    "n": (1, MAX_SEQUENCES),
    "max_tokens": (1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "priority": (-(2**63), 2**63 - 1),
}
"""Ranges of the whole numbers that are not of SAMPLING_FIELDS."""
