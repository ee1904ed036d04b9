"""A request and the sequences it is generating: token ids, counts and page numbers, never tensors."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np

from kvforge.common.exact_intervals import Intervals
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.prompt_scores import PromptScores

NEVER = 2**62
"""More tokens than there are."""

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(Enum):
    """Where a sequence is in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class RequestMetrics:
    """Times of one request in nanoseconds (wall clock, and monotonic for differences) and its page counts.

    0 means "not yet". ``num_reused_pages`` counts pages taken from the prefix cache at first admission,
    ``num_allocated_pages`` pages it was given to write, ``num_new_pages`` those of them that held nothing reusable,
    all over all sequences of the request (TensorRT-LLM's reused, total and new blocks). Of ``num_draft_tokens`` that
    were verified, ``num_accepted_draft_tokens`` became tokens of the text.
    """

    arrival_time_ns: int
    arrival_monotonic_ns: int
    first_scheduled_time_ns: int = 0
    first_scheduled_monotonic_ns: int = 0
    first_token_time_ns: int = 0
    first_token_monotonic_ns: int = 0
    last_token_time_ns: int = 0
    last_token_monotonic_ns: int = 0
    num_reused_pages: int = 0
    num_allocated_pages: int = 0
    num_new_pages: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class PredictedPrompt:
    """A prompt of which an auxiliary model gives K and V of ``num_tokens`` tokens; ``num_done`` of them have these.
    ``intervals`` are what the model still computes once all do, the one that it is in first."""

    num_tokens: int
    num_done: int = 0
    intervals: Intervals = ()


class Sequence:
    """One sequence: prompt and generated token ids, and the pages that hold the K,V of the first of them.

    Invariants: ``num_computed < length`` (at least one token is still to be computed) while not finished;
    ``pages`` cover at least ``cache_offset`` and all tokens that are computed or predicted while running and are empty
    otherwise; ``slot`` is the row of the slot table while running and -1 otherwise.

    Of a prompt that is ``predicted``, ``num_computed`` is 0 until all of it is, and then where the model computes next.
    """

    __slots__ = (
        "cache_offset",
        "digests",
        "first_transition",
        "index",
        "last_token_ns",
        "length",
        "max_length",
        "max_reusable",
        "may_fetch",
        "metrics",
        "next_transition",
        "num_awaited_pages",
        "num_computed",
        "num_counted",
        "num_prompt_tokens",
        "num_published",
        "order",
        "pages",
        "params",
        "predicted",
        "prompt_done",
        "prompt_scores",
        "request_id",
        "sampling",
        "siblings",
        "slot",
        "state_pages",
        "status",
        "stop_ids",
        "stopper",
        "tokens",
        "upper_pages",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        order: tuple[int, int, int],
        prompt: np.ndarray,
        params: SamplingParams,
        max_length: int,
        metrics: RequestMetrics,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.order = order
        """(priority, arrival, index): unique, lower is served earlier and preempted later."""
        self.params = params
        self.metrics = metrics
        self.max_length = max_length
        """Prompt plus generated tokens at most."""
        self.tokens = np.empty(max_length, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.length = len(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_computed = 0
        self.num_counted = len(prompt)
        """Tokens up to the last one that drafts for other sequences are made of: see ``SuffixDrafter``."""
        self.predicted: PredictedPrompt | None = None
        """None where the model computes all of the prompt."""
        self.num_published = 0
        self.num_awaited_pages = 0
        """The longest prefix, in pages, that it put off its admission for."""
        self.may_fetch = True
        """Its prefix was not read from a second tier since it last waited for its admission."""
        self.prompt_done = False
        """The prompt was computed once (a preemption does not undo this)."""
        self.prompt_scores: PromptScores | None = None
        """Where log-probabilities of the prompt are asked for; its siblings have the same."""
        self.siblings: list[Sequence] = [self]
        """All sequences of the request, itself included; the first one computes the prompt."""
        self.pages: list[int] = []
        self.cache_offset = 0
        """Where the token at position p is in the pages, less p: below 0 once a transition has shortened the cache."""
        self.first_transition = self.next_transition = NEVER
        """Numbers of computed tokens: see ``KVPolicy.next_transition``."""
        self.max_reusable = NEVER
        """See ``KVPolicy.max_reusable``."""
        self.state_pages: list[int] = []
        """Pages of the KV policy's own; held from admission on."""
        self.upper_pages: list[int] = []
        """Pages that hold K,V above a blind cut of its tokens that go past it; empty while it does not run."""
        self.digests: list[bytes] = []
        self.slot = -1
        self.was_admitted = False
        self.last_token_ns = 0
        """Monotonic time of the newest generated token, 0 before the first."""
        self.status = Status.WAITING
        self.stop_ids: frozenset[int] = frozenset()
        """Any of these tokens ends the sequence."""
        self.stopper: Any = None
        self.sampling: Any = None

    @property
    def waits_for_leader(self) -> bool:
        """The request's first sequence is still computing the prompt that this one will share."""
        leader = self.siblings[0]
        return leader is not self and not leader.prompt_done and leader.status is not Status.FINISHED

    @property
    def num_reusable(self) -> int:
        """Tokens whose K,V may be another sequence's: all but the last, none after a transition, no more than the
        policy says, and none of a prompt that log-probabilities are still to be computed of."""
        known = NEVER
        if self.prompt_scores is not None and self.prompt_scores.num_done < len(self.prompt_scores):
            known = self.prompt_scores.num_done
        return min(self.length - 1, self.first_transition - 1, self.max_reusable, known)

    @property
    def num_to_predict(self) -> int:
        """Prompt tokens whose K and V an auxiliary model gives."""
        return 0 if self.predicted is None else self.predicted.num_tokens

    @property
    def num_predicted(self) -> int:
        """How many of them have these."""
        return 0 if self.predicted is None else self.predicted.num_done

    @property
    def is_predicting(self) -> bool:
        """An auxiliary model is still to run over some of the prompt."""
        return self.num_predicted < self.num_to_predict

    @property
    def end_of_piece(self) -> int:
        """Where what the model computes now ends: before a part of the prompt that stays predicted, or with the last
        token."""
        intervals = () if self.predicted is None else self.predicted.intervals
        return intervals[0][1] if len(intervals) > 1 else self.length

    @property
    def is_due(self) -> bool:
        """Its cache is to be changed before any other token is computed."""
        return self.num_computed == self.next_transition

    @property
    def is_changed(self) -> bool:
        """Its cache has been changed."""
        return self.next_transition != self.first_transition

    @property
    def num_generated(self) -> int:
        """Generated tokens so far."""
        return self.length - self.num_prompt_tokens

    def compute(self, num_tokens: int) -> None:
        """Record that its next tokens are computed, and go on behind a part of the prompt that stays predicted."""
        end, self.num_computed = self.end_of_piece, self.num_computed + num_tokens
        if self.predicted is not None and self.num_computed == end < self.length:
            self.predicted.intervals = self.predicted.intervals[1:]
            self.num_computed = self.predicted.intervals[0][0]
        self.prompt_done = self.prompt_done or self.num_computed >= self.num_prompt_tokens

    def append(self, token: int) -> None:
        """Add a generated token, whose K,V are not computed yet."""
        self.tokens[self.length] = token
        self.length += 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}/{self.index}, {self.status.value}, length={self.length}, "
            f"computed={self.num_computed}, pages={self.pages})"
        )


@dataclass
class Request:
    """A request and its ``params.n`` sequences."""

    request_id: str
    params: SamplingParams
    metrics: RequestMetrics
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """All sequences are finished."""
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)
