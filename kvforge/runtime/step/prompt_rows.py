"""Rows of prompts whose log-probabilities are asked for: past the cut in calls of their own, beside the step's."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from kvforge.runtime.requests.prompt_scores import PromptScores
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.sampling.sampler import chosen_logprobs
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.sessions.inputs import UpperStep
from kvforge.runtime.step.batch import StepBatch
from kvforge.runtime.step.survivors import all_rows, gather


def score_prompts(
    hidden: torch.Tensor,
    plan: Schedule,
    batch: StepBatch,
    max_rows: int,
    upper: Callable[[UpperStep], torch.Tensor],
) -> torch.Tensor:
    """Fill in the ``prompt_scores`` of the plan's chunks; ``hidden`` is ``lower``'s of ``batch``. Returns it, as a copy
    where anything was filled in: sessions may put what goes past the cut where ``lower`` has left the step's own.

    ``upper`` writes nothing else, so that what it computes here changes nothing of the step. Each call has at most
    ``max_rows`` rows of one sequence.
    """
    is_copy = False
    for row, (sequence, count) in enumerate(plan.prefills, start=len(plan.decodes)):
        for start, end in _pieces(sequence, count, max_rows):
            scores = sequence.prompt_scores
            assert scores is not None
            hidden, is_copy = hidden if is_copy else hidden.clone(), True
            step = _rows_of(hidden, batch, row, start - sequence.num_computed, end - sequence.num_computed)
            _fill(scores, start, upper(step), sequence.tokens[start + 1 : end + 1])
    return hidden


def _pieces(sequence: Sequence, count: int, max_rows: int) -> Iterator[tuple[int, int]]:
    """Positions from one to before another, among the next ``count`` tokens, that nothing is known of yet."""
    scores = sequence.prompt_scores
    if scores is None:
        return
    end = min(sequence.num_computed + count, len(scores))
    for start in range(max(sequence.num_computed, scores.num_done), end, max_rows):
        yield start, min(start + max_rows, end)


def _rows_of(hidden: torch.Tensor, batch: StepBatch, row: int, start: int, end: int) -> UpperStep:
    """Return the step in which the tokens from ``start`` to before ``end`` of one sequence's chunk go past the cut."""
    step = batch.lower
    first, last = step.query_start[row : row + 2].tolist()
    index = np.arange(first + start, first + end)
    this = slice(row, row + 1)
    return all_rows(
        gather(hidden, index),
        torch.tensor([0, end - start], dtype=torch.int32),
        step.positions[first + start : first + end],
        step.kv_length[this] - (last - first - end),
        step.page_table[this],
        tuple(tensor[this] for tensor in step.state),
    )


def _fill(scores: PromptScores, start: int, logits: torch.Tensor, token_ids: np.ndarray) -> None:
    """Note what ``logits`` [n, vocab_size] say of ``token_ids`` [n], whose rows begin at ``start``."""
    rows = slice(start, start + len(token_ids))
    values, picked, ranks = chosen_logprobs(logits.float(), torch.from_numpy(token_ids.astype(np.int64)))
    scores.logprobs[rows], scores.ranks[rows] = picked.numpy(), ranks.numpy()
    num_top = min(scores.top.shape[1], values.shape[1])
    if num_top:
        top = values.topk(num_top, dim=-1)
        scores.top[rows, :num_top], scores.top_ids[rows, :num_top] = top.values.numpy(), top.indices.numpy()
    scores.is_finite &= bool(values.amax(-1).isfinite().all())
    scores.num_done = rows.stop
