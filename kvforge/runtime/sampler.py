"""From logits to tokens: greedy rows in one call, sampled rows in one batch."""

import logging
from dataclasses import dataclass, field

import numpy as np
import torch

from kvforge.errors import KvforgeError
from kvforge.runtime.logits_adjustment import adjust_logits
from kvforge.runtime.outputs import TokenLogprobs
from kvforge.runtime.sampling_state import SamplingState
from kvforge.runtime.sequence import Sequence
from kvforge.runtime.token_draw import draw_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampledTokens:
    """New token per row; ``logprobs[row]`` and ``logits[row]`` ([vocab_size] float32, a copy) only where asked for;
    a row in ``errors`` has no valid token."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]
    logits: dict[int, np.ndarray] = field(default_factory=dict)


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: list[Sequence]) -> SampledTokens:
    """Choose the next token of every sequence; what is wrong with one row does not touch the others.

    Args:
        logits: [R, vocab_size] float32, not changed.
        sequences: R sequences, ``sequence.sampling`` holding their state (None: plain greedy).
    """
    states: list[SamplingState | None] = [sequence.sampling for sequence in sequences]
    best = logits.argmax(-1)
    errors = dict.fromkeys(_not_finite(logits, best), "the model's logits are not finite")
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
                    errors.setdefault(row, str(error))
                except Exception as error:
                    logger.exception("adjusting logits failed")
                    errors.setdefault(row, f"{type(error).__name__}: {error}")
        best = adjusted.argmax(-1)
        for row in _not_finite(adjusted, best):
            errors.setdefault(row, "bias, bad words and guide leave no token to generate; relax them")
    chosen = best
    active = [(row, state) for row, state in active if row not in errors]
    drawn = [(row, state) for row, state in active if not state.params.greedy]
    if drawn:
        rows = torch.tensor([row for row, _ in drawn], device=logits.device)
        subset = adjusted if len(drawn) == len(sequences) else adjusted[rows]
        chosen[rows] = _draw(subset, [state for _, state in drawn])
    tokens = chosen.tolist()
    for row, state in active:
        try:
            state.record(tokens[row])
        except KvforgeError as error:
            errors[row] = str(error)
    wanted = [(row, state.params.logprobs) for row, state in active if state.params.logprobs is not None]
    logprobs = _logprobs(logits, chosen, tokens, wanted) if wanted else {}
    copies = {row: logits[row].float().cpu().numpy().copy() for row, state in active if state.params.return_logits}
    return SampledTokens(tokens, logprobs, errors, copies)


def _not_finite(logits: torch.Tensor, best: torch.Tensor) -> list[int]:
    """Rows whose maximum, at ``best`` [R], is NaN or infinite; NaN counts as the maximum of its row."""
    return logits.gather(1, best[:, None]).isfinite().logical_not_()[:, 0].nonzero().flatten().tolist()


def _draw(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    vocab_size = logits.shape[1]
    params = [state.params for state in states]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)

    top_k = torch.tensor(
        [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], device=logits.device
    )
    return draw_tokens(
        logits,
        column([max(p.temperature, 1e-6) for p in params]),
        top_k,
        column([max(state.top_p, 1e-6) for state in states]),
        column([p.min_p for p in params]),
        column([state.random.random() for state in states]),
    )


def _logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, tokens: list[int], wanted: list[tuple[int, int]]
) -> dict[int, TokenLogprobs]:
    rows = torch.tensor([row for row, _ in wanted], device=logits.device)
    values = logits[rows].log_softmax(-1)
    picked = values.gather(1, chosen[rows, None])
    ranks = (values > picked).sum(-1).add_(1).tolist()
    most = min(max(count for _, count in wanted), logits.shape[1])
    top_values, top_ids = (t.tolist() for t in values.topk(most, dim=-1)) if most else ([], [])
    result = {}
    for i, ((row, count), logprob) in enumerate(zip(wanted, picked.flatten().tolist(), strict=True)):
        top = dict(zip(top_ids[i][:count], top_values[i][:count], strict=True)) if count else {}
        result[row] = TokenLogprobs(tokens[row], logprob, ranks[i], top)
    return result
