"""The definition of SpeculativeVerify in plain torch."""

import itertools

import torch
from torch import Tensor


def reference(
    logits: Tensor,
    draft_ids: Tensor,
    draft_start: Tensor,
    draft_probs: Tensor,
    temperature: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `plugins.speculative_verify`."""
    starts = draft_start.tolist()
    accepted, next_token = [], []
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        rows = slice(begin + s, end + s + 1)
        q = draft_probs[begin:end] if draft_probs.shape[0] else None
        verify = _greedy if float(temperature[s]) == 0 else _sample
        count, token = verify(logits[rows].float(), draft_ids[begin:end].tolist(), q, temperature[s], uniform[rows])
        accepted.append(count)
        next_token.append(token)
    return torch.tensor(accepted, dtype=torch.int32), torch.tensor(next_token, dtype=torch.int32)


def _greedy(
    logits: Tensor, drafts: list[int], q: Tensor | None, temperature: Tensor, uniform: Tensor
) -> tuple[int, int]:
    best = logits.argmax(-1).tolist()
    count = next((j for j, draft in enumerate(drafts) if draft != best[j]), len(drafts))
    return count, best[count]


def _sample(
    logits: Tensor, drafts: list[int], q: Tensor | None, temperature: Tensor, uniform: Tensor
) -> tuple[int, int]:
    p = torch.softmax(logits / temperature, dim=-1)
    for j, draft in enumerate(drafts):
        proposal = torch.zeros_like(p[j]).index_fill(0, torch.tensor(draft), 1.0) if q is None else q[j]
        if uniform[j, 0] * proposal[draft] < p[j, draft]:
            continue
        residual = (p[j] - proposal).clamp(min=0)
        return j, draw(residual if residual.any() else p[j], uniform[j, 1])
    return len(drafts), draw(p[-1], uniform[len(drafts), 1])


def draw(weight: Tensor, uniform: Tensor) -> int:
    """The lowest token t of positive weight with cumsum(weight)[t] > uniform * sum(weight)."""
    cumulative = weight.double().cumsum(0)
    above = (cumulative > uniform.double() * cumulative[-1]) & (weight > 0)
    return int(above.int().argmax())
