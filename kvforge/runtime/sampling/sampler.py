"""From logits to tokens: greedy rows in one call, sampled rows in one batch."""

import logging
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from kvforge.common.errors import KvforgeError, let_end, refusal_of
from kvforge.common.refusals import Refusal
from kvforge.runtime.requests.outputs import NOTHING_LEFT, TokenLogprobs
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.sampling.adjustment import adjust_logits
from kvforge.runtime.sampling.draw import draw_tokens
from kvforge.runtime.sampling.filters import Filters
from kvforge.runtime.sampling.state import SamplingState

logger = logging.getLogger(__name__)

NOT_FINITE = Refusal("the model's logits are not finite")
_BLOCK = 128


@dataclass(frozen=True)
class SampledTokens:
    """New token per row; ``logprobs[row]`` and ``logits[row]`` ([vocab_size] float32, a copy) only where asked for;
    a row in ``errors`` has no valid token."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, Refusal]
    logits: dict[int, np.ndarray] = field(default_factory=dict)


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: list[Sequence], uniform: SequenceOf[float] | None = None) -> SampledTokens:
    """Choose the next token of every sequence; what is wrong with one row does not touch the others.

    Args:
        logits: [R, vocab_size] float32, not changed.
        sequences: R sequences, ``sequence.sampling`` holding their state (None: plain greedy).
        uniform: R random numbers, for rows that are drawn; default: the next one of each sequence.
    """
    states: list[SamplingState | None] = [sequence.sampling for sequence in sequences]
    best, not_finite = most_probable(logits)
    errors = dict.fromkeys(not_finite, NOT_FINITE)
    if not any(states):
        return SampledTokens(best.tolist(), {}, errors)
    active = [(row, state) for row, state in enumerate(states) if state is not None]
    adjusted = logits
    if any(state.adjusts_logits for _, state in active):
        adjusted = logits.clone()
        for row, state in active:
            if state.adjusts_logits:
                try:
                    adjust_logits(adjusted[row], sequences[row], state)
                except KvforgeError as error:
                    errors.setdefault(row, refusal_of(error))
                except BaseException as error:
                    let_end(error)
                    logger.exception("adjusting logits failed")
                    errors.setdefault(row, refusal_of(error))
        best, not_finite = most_probable(adjusted)
        for row in not_finite:
            errors.setdefault(row, NOTHING_LEFT)
    chosen = torch.from_numpy(best)
    active = [(row, state) for row, state in active if row not in errors]
    drawn = [(row, state) for row, state in active if not state.params.greedy]
    if drawn:
        rows = torch.tensor([row for row, _ in drawn], device=logits.device)
        subset = adjusted if len(drawn) == len(sequences) else adjusted[rows]
        numbers = [state.take()[0] for _, state in drawn] if uniform is None else [uniform[row] for row, _ in drawn]
        filters = Filters.of([state for _, state in drawn], subset)
        chosen[rows] = draw_tokens(subset, filters, torch.tensor(numbers, dtype=torch.float32, device=logits.device))
    tokens = chosen.tolist()
    for row, state in active:
        try:
            state.record(tokens[row])
        except KvforgeError as error:
            errors[row] = refusal_of(error)
    wanted = [(row, state.params.logprobs) for row, state in active if state.params.logprobs is not None]
    logprobs = _logprobs(logits, chosen, tokens, wanted) if wanted else {}
    copies = {row: logits[row].float().cpu().numpy().copy() for row, state in active if state.params.return_logits}
    return SampledTokens(tokens, logprobs, errors, copies)


def most_probable(logits: torch.Tensor) -> tuple[np.ndarray, list[int]]:
    """Return the first token of the largest logit of each row, int64 [R], and the rows where that logit is NaN, which
    counts as the largest, or infinite.

    The largest of each block of a row first, then the place in the block of the largest: ``amax`` reads at the rate of
    memory, on all threads; ``argmax`` of whole rows takes three (numpy) to ten times (torch) as long.
    """
    num_rows, vocab_size = logits.shape
    block = math.gcd(vocab_size, _BLOCK)
    rows = np.arange(num_rows)
    blocks = logits.view(num_rows, -1, block)
    first = blocks.amax(-1).numpy().argmax(-1)
    best = first * block + blocks.numpy()[rows, first].argmax(-1)
    finite = np.isfinite(logits.numpy()[rows, best])
    return best, [] if finite.all() else np.flatnonzero(~finite).tolist()


def chosen_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [R, vocab_size] of ``logits``, and of ``token_ids`` [R] theirs [R] and their ranks
    int64 [R], 1 for the most probable token."""
    values = logits.log_softmax(-1)
    picked = values.gather(1, token_ids[:, None])
    return values, picked[:, 0], (values > picked).sum(-1).add_(1)


def _logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, tokens: list[int], wanted: list[tuple[int, int]]
) -> dict[int, TokenLogprobs]:
    rows = torch.tensor([row for row, _ in wanted], device=logits.device)
    values, picked, ranks = chosen_logprobs(logits[rows], chosen[rows])
    maximum = min(max(count for _, count in wanted), logits.shape[1])
    top_values, top_ids = (t.tolist() for t in values.topk(maximum, dim=-1)) if maximum else ([], [])
    result = {}
    for i, ((row, count), logprob, rank) in enumerate(zip(wanted, picked.tolist(), ranks.tolist(), strict=True)):
        top = dict(zip(top_ids[i][:count], top_values[i][:count], strict=True)) if count else {}
        result[row] = TokenLogprobs(tokens[row], logprob, rank, top)
    return result
