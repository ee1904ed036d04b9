"""Tokens chosen where the logits are, by work that can be queued: nothing of it waits for the device."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.sampling.draw import draw_queued
from kvforge.runtime.sampling.filters import Filters


class Draws(NamedTuple):
    """Which of R rows are drawn, and how; on the device.

    Attributes:
        columns: [6, R] float32: ``Filters``, random numbers, and 1 for rows that are drawn.
        most_candidates: how many of a row's most probable tokens are looked at, as ``draw_queued``.
    """

    columns: torch.Tensor
    most_candidates: int


def can_queue(sequences: SequenceOf[Sequence]) -> bool:
    """Whether ``choose`` gives each of these what ``sample`` would."""
    return not any(sequence.sampling is not None and sequence.sampling.request.needs_host for sequence in sequences)


def draws_of(
    sequences: SequenceOf[Sequence], vocab_size: int, upload: Callable[[torch.Tensor], torch.Tensor]
) -> Draws | None:
    """Take the random numbers of those of R sequences that are drawn and have not ended; None if nobody is drawn.
    ``upload`` queues a copy to the device."""
    states = [sequence.sampling for sequence in sequences]
    rows = [
        row
        for row, (sequence, state) in enumerate(zip(sequences, states, strict=True))
        if state is not None and not state.params.greedy and sequence.status is not Status.FINISHED
    ]
    if not rows:
        return None
    filters = Filters.of([states[row] for row in rows], torch.empty(0, vocab_size))
    columns = torch.tensor([1.0, vocab_size, 1.0, 0.0, 0.0, 0.0])[:, None].repeat(1, len(sequences))
    uniform = torch.tensor([states[row].take()[0] for row in rows], dtype=torch.float32)
    columns[:, rows] = torch.stack([*(column.float() for column in filters), uniform, torch.ones(len(rows))])
    sorts = filters.sorts(vocab_size)
    return Draws(upload(columns), int(filters.top_k[sorts].max()) if bool(sorts.any()) else 0)


@torch.inference_mode()
def choose(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    """Return the next token of each row of ``logits`` [R, vocab_size]: int32 [R], -1 where the largest logit is not
    finite."""
    best = logits.argmax(-1, keepdim=True)
    is_finite, best = logits.gather(1, best).isfinite()[:, 0], best[:, 0]
    if draws is not None:
        temperature, top_k, top_p, min_p, uniform, is_drawn = draws.columns
        filters = Filters(temperature, top_k.long(), top_p, min_p)
        drawn = draw_queued(logits, filters, uniform, draws.most_candidates)
        best = torch.where(is_drawn > 0, drawn, best)
    return torch.where(is_finite, best, -1).int()
