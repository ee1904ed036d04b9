"""What a step and a request give back."""

from dataclasses import dataclass, field

import numpy as np

from kvforge.common.refusals import NO_TOKEN_LEFT, Refusal
from kvforge.runtime.requests.prompt_scores import PromptScores
from kvforge.runtime.requests.sequence import FinishReason, RequestMetrics

NOTHING_LEFT = Refusal("bias, bad words and guide leave no token to generate", "relax them", code=NO_TOKEN_LEFT)
"""Why a sequence ends that its request lets go on with nothing."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural log, the model's own distribution) at one generated token.

    ``rank`` is 1 for the most probable token. ``top`` maps the ``SamplingParams.logprobs`` most probable
    token ids to their log-probability, most probable first.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


def prompt_logprobs(scores: PromptScores, prompt_token_ids: list[int]) -> list[TokenLogprobs | None]:
    """Return an entry for each token of the prompt, None for the first, which nothing comes before."""
    columns = (column.tolist() for column in (scores.logprobs, scores.ranks, scores.top_ids, scores.top))
    return [
        None,
        *(
            TokenLogprobs(token, logprob, rank, dict(zip(ids, values, strict=True)))
            for token, logprob, rank, ids, values in zip(prompt_token_ids[1:], *columns, strict=True)
        ),
    ]


@dataclass(slots=True)
class SequenceOutput:
    """News of one sequence after a step.

    ``stop_reason`` is the stop string, stop token id or stop word that ended it, "deadline" for a passed
    deadline, the error's message for "error", and None for end of text. The token that ends a sequence is in
    ``new_token_ids`` also where it is not part of the text. ``metrics`` is the request's, shared and live.
    ``logits`` are the model's own behind each new token, [vocab_size] float32, if asked for. ``prompt_scores`` come
    with the first token, if asked for. ``refusal`` is the error as data.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | tuple[int, ...] | None = None
    metrics: RequestMetrics | None = None
    logits: list[np.ndarray] | None = None
    prompt_scores: PromptScores | None = None
    refusal: Refusal | None = None


@dataclass
class CompletionOutput:
    """One generated sequence of a request; ``cumulative_logprob`` sums the chosen tokens' if asked for, ``logits``
    are those of ``SequenceOutput``."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | tuple[int, ...] | None = None
    logits: list[np.ndarray] | None = None


@dataclass
class RequestOutput:
    """A request with all its sequences, finished or (when streamed) still growing.

    ``prompt_logprobs`` has an entry for each token of the prompt, if asked for: None for the first; None as a whole
    until they are computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
