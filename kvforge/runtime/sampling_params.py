"""What a request asks of the sampler, validated once, in vLLM's parameter names."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvforge.errors import RequestError

MAX_LOGPROBS = 100
MAX_SEQUENCES = 256
MAX_PENALTY = 1e4


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Order of the operations on the logits: repetition, frequency and presence penalties, minimum length, bad
    words, temperature, ``min_p``, ``top_k``, ``top_p`` (on the renormalised rest).

    Attributes:
        n: sequences to generate; they share the prompt's pages and take the seeds ``seed + i``.
        temperature: 0 is greedy; at most 1e4.
        top_p: keep the fewest tokens whose probability reaches this, in (0, 1].
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
        seed: repeats a sequence's random numbers, one a token, whatever else is in the batch.
        logprobs: log-probabilities of this many most probable tokens beside the chosen one (0: only the
            chosen one) under the model's own distribution: before penalties, temperature and filters.
        presence_penalty: subtracted from the logit of every token generated so far, in [-1e4, 1e4].
        frequency_penalty: subtracted once per occurrence among the generated tokens, in [-1e4, 1e4].
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and of the
            generated text (arXiv 1909.05858, section 4.1), in [1e-3, 1e3].
        priority: lower is served earlier and preempted later.
        deadline_s: seconds after arrival at which the request is given up with finish reason "abort".
        prompt_logprobs: not offered, because prompt tokens do not run through the upper layers: must be None.

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
    seed: int | None = None
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(field.name, getattr(self, field.name)))
        for name in _INTEGERS:
            _check_integer(name, getattr(self, name), *_INTEGERS[name])
        for name in _NUMBERS:
            _check_number(name, getattr(self, name), *_NUMBERS[name])
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens; lower it.")
        if self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not offered, because prompt tokens skip the upper layers; leave it out."
            )
        _check_words("stop", self.stop, str)
        _check_words("bad_words", self.bad_words, str)
        _check_ids("stop_token_ids", self.stop_token_ids)
        for name in ("stop_words_ids", "bad_words_ids"):
            _check_words(name, getattr(self, name), tuple)
            for word in getattr(self, name):
                _check_ids(name, word)

    @property
    def greedy(self) -> bool:
        """The most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1


_SEQUENCES = ("stop", "stop_token_ids", "stop_words_ids", "bad_words", "bad_words_ids")
_OPTIONAL = ("seed", "logprobs", "deadline_s")
_INTEGERS = {
    "n": (1, MAX_SEQUENCES),
    "top_k": (-1, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "priority": (-(2**63), 2**63 - 1),
}
_NUMBERS = {
    "temperature": (0.0, 1e4, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY, False),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY, False),
    "repetition_penalty": (1e-3, 1e3, False),
    "deadline_s": (0.0, 1e9, True),
}


def _plain(name: str, value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own; lists as tuples; None as no entries; one stop string as one."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if name in _SEQUENCES:
        if value is None:
            return ()
        if name == "stop" and isinstance(value, str):
            return (value,)
        if isinstance(value, (list, tuple)):
            return tuple(_plain("", entry) for entry in value)
    return tuple(value) if name == "" and isinstance(value, list) else value


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bound = f"of at least {low}" if high >= 2**31 - 1 else f"from {low} to {high}"
        raise RequestError(f"{name} is {value!r}; give a whole number {bound}.")


def _check_number(name: str, value: Any, low: float, high: float, open_low: bool) -> None:
    if value is None and name in _OPTIONAL:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        above = "above" if open_low else "of at least"
        raise RequestError(f"{name} is {value!r}; give a finite number {above} {low:g} and at most {high:g}.")


def _check_words(name: str, values: Any, kind: type) -> None:
    if not isinstance(values, tuple):
        raise RequestError(f"{name} is {values!r}; give a list.")
    for value in values:
        if not isinstance(value, kind) or len(value) == 0:  # type: ignore[arg-type]
            raise RequestError(f"{name} holds {value!r}; give non-empty entries only.")


def _check_ids(name: str, values: Any) -> None:
    if not isinstance(values, tuple):
        raise RequestError(f"{name} is {values!r}; give lists of token ids.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"{name} holds {value!r}; give token ids of at least 0.")
