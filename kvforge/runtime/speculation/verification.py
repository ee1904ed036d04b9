"""Which drafts of a step become tokens."""

import logging
from collections.abc import Callable

import torch

from kvforge.common.errors import let_end, refusal_of
from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.sampling.sampler import NOT_FINITE, SampledTokens, sample
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.speculation.draft_runs import DraftProbs, Run, drawn_runs, greedy_runs
from kvforge.runtime.statistics.counters import EngineStatistics

logger = logging.getLogger(__name__)

Take = Callable[[list[Sequence], SampledTokens, dict[Sequence, SequenceOutput]], None]
"""Gives sequences their tokens; see ``LLMEngine._take``."""


class Verifier:
    """Chooses tokens of steps with drafts: ``sample`` each survivor's first one, ``verify`` those after it.

    The engine's graph ``verify`` chooses all tokens of greedy sequences at once, and of those whose drafts were drawn
    and whose tokens may come of rejection. The others' are chosen by the sampler with the sequence's own random
    numbers: they are those of decoding without drafts, whatever the drafts are. Where nothing else bears on them it
    chooses the tokens after all drafts at once, otherwise it goes along the drafts one token at a time.
    """

    def __init__(self, session: Session, scheduler: Scheduler, statistics: EngineStatistics, take: Take) -> None:
        self._scheduler, self._statistics, self._take = scheduler, statistics, take
        manifest = session.manifest
        self._verify = session.verify if manifest.max_draft_len > 0 else None
        self._most_drafts = manifest.max_num_seqs * manifest.max_draft_len
        self._rows: dict[Sequence, int] = {}
        self._runs: dict[Sequence, Run] = {}

    def sample(self, plan: Schedule, logits: torch.Tensor, probs: DraftProbs) -> SampledTokens:
        """Choose the first new token of each of ``plan.survivors``, before the plan is committed.

        Args:
            logits: [R, vocab_size] float32, the rows of each survivor followed by those of its drafts.
            probs: what drafts of ``plan`` were drawn from, where they were.
        """
        survivors = plan.survivors
        self._rows = dict(zip(survivors, plan.survivor_rows, strict=True))
        self._runs = {}
        if self._verify is not None and plan.num_drafts <= self._most_drafts:
            drawn = [s for s in probs if s in plan.drafts and s.sampling is not None and s.sampling.may_reject]
            if drawn:
                self._runs |= drawn_runs(self._verify, plan, logits, probs, drawn)
            if any(sequence.sampling is None for sequence in plan.drafts):
                self._runs |= greedy_runs(self._verify, plan, logits)
        return self._ahead(plan, logits)

    def verify(self, plan: Schedule, logits: torch.Tensor, outputs: dict[Sequence, SequenceOutput]) -> None:
        """Go along each sequence's drafts as far as they are right, and give it the token after every one of them."""
        drafts = plan.drafts
        self._statistics.drafted(drafts)
        walking, depth = list(drafts), 0
        while walking:
            right = [sequence for sequence in walking if self._is_right(sequence, drafts[sequence], depth, outputs)]
            self._statistics.accepted(right)
            depth += 1
            walking = [sequence for sequence in right if sequence.status is Status.RUNNING]
            if walking:
                try:
                    sampled = self._tokens(walking, depth, logits)
                except BaseException as error:
                    let_end(error)
                    logger.exception("sampling after a draft failed")
                    failed = dict.fromkeys(range(len(walking)), refusal_of(error))
                    sampled = SampledTokens([0] * len(walking), {}, failed)
                self._scheduler.accept([s for row, s in enumerate(walking) if row not in sampled.errors])
                self._take(walking, sampled, outputs)
                walking = [sequence for row, sequence in enumerate(walking) if row not in sampled.errors]

    def _ahead(self, plan: Schedule, logits: torch.Tensor) -> SampledTokens:
        """Choose the first token of each survivor, and the runs of those whose tokens can be chosen ahead; these take
        as many of their random numbers as they get tokens."""
        survivors, drafts = plan.survivors, plan.drafts
        others = [sequence for sequence in survivors if sequence not in self._runs]
        counts = [1 + len(drafts.get(s, ())) if s in drafts and _draws_ahead(s) else 1 for s in others]
        if len(others) == sum(counts):
            return self._tokens(survivors, 0, logits)
        states = [sequence.sampling for sequence in others]
        uniform = [
            [0.0] * count if state is None or state.params.greedy else state.peek(count)
            for state, count in zip(states, counts, strict=True)
        ]
        rows = [self._rows[s] + depth for s, count in zip(others, counts, strict=True) for depth in range(count)]
        part = sample(
            logits if len(rows) == len(logits) else logits[rows],
            [sequence for sequence, count in zip(others, counts, strict=True) for _ in range(count)],
            [number for numbers in uniform for number in numbers],
        )
        begin, first = 0, dict[Sequence, int]()
        for sequence, state, count in zip(others, states, counts, strict=True):
            first[sequence] = begin
            num_tokens = 1
            if count > 1:
                run = self._runs[sequence] = _run(part, begin, drafts[sequence])
                num_tokens = len(run)
            if state is not None and not state.params.greedy:
                state.take(num_tokens)
            begin += count
        tokens = [self._runs[s][0] if s in self._runs else part.tokens[first[s]] for s in survivors]
        places = {first[s]: row for row, s in enumerate(survivors) if s in first}
        return SampledTokens(
            [token or 0 for token in tokens],
            {places[row]: value for row, value in part.logprobs.items()},
            {row: NOT_FINITE for row, token in enumerate(tokens) if token is None}
            | {places[row]: value for row, value in part.errors.items() if row in places},
            {places[row]: value for row, value in part.logits.items()},
        )

    def _is_right(
        self, sequence: Sequence, draft: tuple[int, ...], depth: int, outputs: dict[Sequence, SequenceOutput]
    ) -> bool:
        if sequence in self._runs:
            return depth < len(self._runs[sequence]) - 1
        return draft[depth : depth + 1] == tuple(outputs[sequence].new_token_ids[-1:])

    def _tokens(self, sequences: list[Sequence], depth: int, logits: torch.Tensor) -> SampledTokens:
        """Choose the token after ``depth`` drafts of each sequence."""
        runs = self._runs
        sampled = [row for row, sequence in enumerate(sequences) if sequence not in runs]
        if len(sampled) == len(sequences):
            return sample(logits[[self._rows[sequence] + depth for sequence in sequences]], sequences)
        tokens = [0 if sequence not in runs else runs[sequence][depth] for sequence in sequences]
        result = SampledTokens(
            [token or 0 for token in tokens], {}, {row: NOT_FINITE for row, token in enumerate(tokens) if token is None}
        )
        if sampled:
            others = [sequences[row] for row in sampled]
            part = sample(logits[[self._rows[sequence] + depth for sequence in others]], others)
            for index, row in enumerate(sampled):
                result.tokens[row] = part.tokens[index]
            for whole, some in (
                (result.logprobs, part.logprobs),
                (result.errors, part.errors),
                (result.logits, part.logits),
            ):
                whole.update({sampled[index]: value for index, value in some.items()})
        return result


def _draws_ahead(sequence: Sequence) -> bool:
    return sequence.sampling is None or sequence.sampling.draws_ahead


def _run(sampled: SampledTokens, begin: int, draft: tuple[int, ...]) -> Run:
    """Return what a sequence gets whose rows of ``sampled`` start at ``begin``: tokens to the first that is not the
    draft's."""
    run: Run = []
    for depth in range(len(draft) + 1):
        if begin + depth in sampled.errors:
            return [*run, None]
        token = sampled.tokens[begin + depth]
        run.append(token)
        if draft[depth : depth + 1] != (token,):
            break
    return run
