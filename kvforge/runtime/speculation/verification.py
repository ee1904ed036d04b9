"""Which drafts of a step become tokens."""

import logging
from collections.abc import Callable

import torch

from kvforge.runtime.outputs import SequenceOutput
from kvforge.runtime.sampler import SampledTokens, sample
from kvforge.runtime.schedule import Schedule
from kvforge.runtime.scheduler import Scheduler
from kvforge.runtime.sequence import Sequence, Status
from kvforge.runtime.session import StepFunctions
from kvforge.runtime.statistics import EngineStatistics

logger = logging.getLogger(__name__)

Take = Callable[[list[Sequence], SampledTokens, dict[Sequence, SequenceOutput]], None]
"""Gives sequences their tokens; see ``LLMEngine._take``."""


class Verifier:
    """Chooses tokens of steps with drafts: ``sample`` each survivor's first one, ``verify`` those after it."""

    def __init__(self, session: StepFunctions, scheduler: Scheduler, statistics: EngineStatistics, take: Take) -> None:
        self._session, self._scheduler, self._statistics, self._take = session, scheduler, statistics, take
        self._rows: dict[Sequence, int] = {}

    def sample(self, plan: Schedule, logits: torch.Tensor) -> SampledTokens:
        """Choose the first new token of each of ``plan.survivors``, before the plan is committed.

        Args:
            logits: [R, vocab_size] float32, the rows of each survivor followed by those of its drafts.
        """
        survivors, rows = plan.survivors, plan.survivor_rows
        self._rows = dict(zip(survivors, rows, strict=True))
        return sample(logits[rows], survivors)

    def verify(self, plan: Schedule, logits: torch.Tensor, news: dict[Sequence, SequenceOutput]) -> None:
        """Go along each sequence's drafts, sampling the token after every one that is what was sampled for its place.

        The tokens are those of decoding one at a time: the same sampler, with the sequence's own random numbers.
        """
        drafts, rows = plan.drafts, self._rows
        self._statistics.drafted(drafts)
        walking, depth = list(drafts), 0
        while walking:
            right = [s for s in walking if drafts[s][depth : depth + 1] == tuple(news[s].new_token_ids[-1:])]
            self._statistics.accepted(right)
            depth += 1
            walking = [sequence for sequence in right if sequence.status is Status.RUNNING]
            if walking:
                try:
                    sampled = sample(logits[[rows[sequence] + depth for sequence in walking]], walking)
                except Exception as error:
                    logger.exception("sampling after a draft failed")
                    message = f"{type(error).__name__}: {error}"
                    sampled = SampledTokens([0] * len(walking), {}, dict.fromkeys(range(len(walking)), message))
                self._scheduler.accept([s for row, s in enumerate(walking) if row not in sampled.errors])
                self._take(walking, sampled, news)
                walking = [sequence for row, sequence in enumerate(walking) if row not in sampled.errors]
