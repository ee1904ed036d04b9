"""Early exit (arXiv 2410.03960, appendices E and F): a token whose exit is sure enough skips what is above the cut.

K and V of all layers are complete at the cut, so nothing is lost for later tokens: neither behind a generated token
nor behind a prompt's last one, whose logits choose the first token of the answer.
"""

from collections.abc import Callable

import numpy as np
import torch

from kvforge.runtime.requests.sequence import NEVER
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.sessions.inputs import UpperStep
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch
from kvforge.runtime.step.survivors import all_rows, gather, starts

PROMPT_END = -1
"""What ``numbers_of`` says of a prompt's last token."""


class EarlyExits:
    """Gives survivors whose early exit is sure of a token the exit's logits, and ``upper`` the others.

    A row may exit if it is of a generated token, or with ``prompts`` of a prompt's last one, and if its request asks
    for no log-probabilities and no logits. That depends on the row alone, so texts depend on chunks, preemptions,
    drafts and neighbours as little as without exits. ``threshold`` is of the largest probability by the exit's own
    logits.
    """

    def __init__(self, session: Session, threshold: float, prompts: bool = False) -> None:
        self._session, self._threshold, self._prompts = session, threshold, prompts
        self.num_exits = 0
        """Rows that took the exit's logits, those of drafts that were not accepted included."""
        self.num_prompt_exits = 0
        """Those of them that were of a prompt's last token."""

    def logits(
        self, hidden: torch.Tensor, plan: Schedule, batch: StepBatch, upper: Callable[[UpperStep], torch.Tensor]
    ) -> torch.Tensor:
        """Return the logits [R, vocab_size] of ``batch``'s survivors, R >= 1; ``hidden`` is ``lower``'s. ``upper``
        gives those of what does not exit and is not called where nothing is left."""
        index = batch.survivor_index.numpy()
        numbers = numbers_of(plan, batch)
        candidates = np.flatnonzero(numbers >= (PROMPT_END if self._prompts else 0))
        exits = np.zeros(len(index), dtype=bool)
        exit_logits = torch.empty(0)
        if len(candidates):
            exit_logits = self._session.early_exit(hidden, torch.from_numpy(index[candidates]))
            exits[candidates] = (confidence(exit_logits) > self._threshold).numpy()
        self.num_exits += int(exits.sum())
        self.num_prompt_exits += int((exits & (numbers == PROMPT_END)).sum())
        if exits.all():
            return exit_logits
        rows, survivors = without(exits, hidden, batch)
        upper_logits = upper(survivors)
        if not exits.any():
            return upper_logits
        logits = torch.empty(len(index), upper_logits.shape[1])
        logits[torch.from_numpy(rows)] = upper_logits
        logits[torch.from_numpy(exits)] = exit_logits[torch.from_numpy(exits[candidates])]
        return logits


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest probability of each row [R] of logits [R, vocab_size] at temperature 1; NaN where they are not
    finite."""
    return logits.softmax(-1).amax(-1)


def numbers_of(plan: Schedule, batch: StepBatch) -> np.ndarray:
    """Return int64 [R]: the number of each survivor among the generated tokens of its sequence, from 0; ``PROMPT_END``
    for a prompt's last token; less than that where the request asks for logits, which an exit does not give."""
    positions = batch.lower.positions.numpy()[batch.survivor_index.numpy()].astype(np.int64)
    first = np.array(
        [
            s.num_prompt_tokens if s.params.logprobs is None and not s.params.return_logits else NEVER
            for s in plan.survivors
        ]
    )
    counts = np.diff(batch.survivor_start.numpy())
    return positions - np.repeat(first, counts[counts > 0])


def without(exits: np.ndarray, hidden: torch.Tensor, batch: StepBatch) -> tuple[np.ndarray, UpperStep]:
    """Return the rows [N] of a batch's survivors that go past the cut, and what ``upper`` needs for them.

    Survivors of a sequence are consecutive tokens, so of drafts only those before the first and after the last row that
    does not exit are left out. At least one of ``exits`` [R] must be false.
    """
    step, survivor_start = batch.lower, batch.survivor_start.numpy()
    row_of = np.repeat(np.arange(len(survivor_start) - 1), np.diff(survivor_start))
    stays = np.flatnonzero(~exits)
    sequences, first = np.unique(row_of[stays], return_index=True)
    begin, end = stays[first], stays[np.append(first[1:], len(stays)) - 1] + 1
    rows = np.concatenate([np.arange(low, high) for low, high in zip(begin, end, strict=True)])
    kept, index = torch.from_numpy(sequences), batch.survivor_index.numpy()[rows]
    return rows, all_rows(
        gather(hidden, index),
        starts(end - begin),
        torch.from_numpy(step.positions.numpy()[index]),
        step.kv_length[kept] - torch.from_numpy((survivor_start[sequences + 1] - end).astype(np.int32)),
        step.page_table[kept],
        tuple(tensor[kept] for tensor in step.state),
    )
