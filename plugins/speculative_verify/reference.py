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
    """Verifies D packed drafts of S sequences; returns (accepted, next_token), each [S] int32.

    draft_start: [S+1] int32 from 0 to D; sequence s has gamma = draft_start[s+1] - draft_start[s] drafts (0
    allowed). logits: [D+S, vocab] float32, gamma+1 rows per sequence from row draft_start[s]+s on, the last
    after all its drafts. draft_ids: [D] int32. draft_probs: [D, vocab] float32, what each draft was drawn from,
    or [0, vocab] when drafts were not drawn (their distribution is one-hot). temperature: [S] float32, 0 = greedy.
    uniform: [D+S, 2] float32 in [0, 1): column 0 decides acceptance, column 1 draws the next token.

    Greedy: drafts are accepted while they equal the argmax (the lowest index of equals), and the next token is
    the argmax after them. Sampling (Leviathan et al., arXiv 2211.17192, Algorithm 1): with p =
    softmax(logits / temperature), draft d of distribution q is accepted while uniform * q(d) < p(d); the next
    token is drawn from max(p - q, 0) normalised at the first rejection (from p if that is zero), else from the
    last row's p. `accepted` counts accepted drafts, so accepted + 1 tokens come of the step.
    Raises RuntimeError on a wrong shape or dtype, and on a draft outside the vocabulary.
    """
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
