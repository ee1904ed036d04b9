"""What every engine does with a new request: check all of it, then make its sequences."""

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from kvforge.runtime import request_check
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.prompt_scores import PromptScores
from kvforge.runtime.requests.sequence import Request, RequestMetrics, Sequence
from kvforge.runtime.text.stop import Stopper
from kvforge.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CheckedRequest:
    """A request that can be served: its prompt, int32; the longest that a sequence of it may become; the tokens that
    end one; the token sequences that must not be generated."""

    prompt: np.ndarray
    max_length: int
    stop_ids: frozenset[int]
    bad_words: list[tuple[int, ...]]


def check_request(
    prompt_token_ids: SequenceOf[int], params: SamplingParams, config: RuntimeConfig, tokenizer: Tokenizer | None
) -> CheckedRequest:
    """Return what an engine with ``config`` and ``tokenizer`` makes of a request, its guide left aside.

    Raises:
        RequestError: it can never be served as asked.
    """
    prompt = request_check.checked_prompt(prompt_token_ids, config)
    max_length = request_check.max_length(len(prompt), params, config)
    request_check.check_token_ids(params, config)
    stop_ids = request_check.stop_ids(params, config)
    bad_words = request_check.bad_word_ids(params, config, tokenizer)
    request_check.check_stop_strings(params, tokenizer)
    request_check.check_prompt_logprobs(len(prompt), params, config)
    return CheckedRequest(prompt, max_length, stop_ids, bad_words)


def new_request(
    request_id: str, params: SamplingParams, checked: CheckedRequest, arrival: int, tokenizer: Tokenizer | None
) -> Request:
    """Return a request that arrives now, the ``arrival``-th, with its ``params.n`` sequences, whose ``sampling`` is
    left to the engine."""
    metrics = RequestMetrics(time.time_ns(), time.monotonic_ns())
    scores = None if params.prompt_logprobs is None else PromptScores(len(checked.prompt), params.prompt_logprobs)
    request, prompt = Request(request_id, params, metrics), checked.prompt
    ids = prompt.tolist()
    for index in range(params.n):
        order = (params.priority, arrival, index)
        sequence = Sequence(request_id, index, order, prompt, params, checked.max_length, metrics)
        sequence.siblings, sequence.stop_ids = request.sequences, checked.stop_ids
        sequence.prompt_scores = scores
        if params.stop or params.stop_words_ids:
            sequence.stopper = Stopper(params, tokenizer, ids)
        request.sequences.append(sequence)
    return request
