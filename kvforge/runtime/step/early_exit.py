"""Early exit at decode (arXiv 2410.03960, appendices E and F): a token whose exit is sure enough skips what is above.

K and V of all layers are complete at the cut, so nothing is lost for later tokens.
"""

from collections.abc import Callable

import numpy as np
import torch

from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.sessions.inputs import UpperStep
from kvforge.runtime.sessions.session import Session
from kvforge.runtime.step.batch import StepBatch
from kvforge.runtime.step.survivors import all_rows, gather, starts


class EarlyExitDecode:
    """Gives survivors whose early exit is sure of a token the exit's logits, and ``upper`` the others.

    A row may exit if it is of a generated token, never if it is of a prompt's last one, and if its request asks for no
    log-probabilities and no logits. That depends on the row alone, so texts depend on chunks, preemptions, drafts and
    neighbours as little as without exits. ``threshold`` is of the largest probability by the exit's own logits.
    """

    def __init__(self, session: Session, threshold: float) -> None:
        self._session, self._threshold = session, threshold
        self.num_exits = 0
        """Rows that took the exit's logits, those of drafts that were not accepted included."""

    def logits(
        self, hidden: torch.Tensor, plan: Schedule, batch: StepBatch, upper: Callable[[UpperStep], torch.Tensor]
    ) -> torch.Tensor:
        """Return the logits [R, vocab_size] of ``batch``'s survivors, R >= 1; ``hidden`` is ``lower``'s. ``upper``
        gives those of what does not exit and is not called where nothing is left."""
        index = batch.survivor_index.numpy()
        candidates = np.flatnonzero(may_exit(plan, batch))
        exits = np.zeros(len(index), dtype=bool)
        exit_logits = torch.empty(0)
        if len(candidates):
            exit_logits = self._session.early_exit(hidden, torch.from_numpy(index[candidates]))
            exits[candidates] = (confidence(exit_logits) > self._threshold).numpy()
        self.num_exits += int(exits.sum())
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


def may_exit(plan: Schedule, batch: StepBatch) -> np.ndarray:
    """Return bool [R]: whether each survivor is a generated token of a request that does not ask for its logits."""
    positions = batch.lower.positions.numpy()[batch.survivor_index.numpy()]
    sequences = plan.survivors
    first = np.array(
        [
            s.num_prompt_tokens if s.params.logprobs is None and not s.params.return_logits else s.max_length
            for s in sequences
        ]
    )
    counts = np.diff(batch.survivor_start.numpy())
    return positions >= np.repeat(first, counts[counts > 0])


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
