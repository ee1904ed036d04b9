"""Random cases of speculative_verify, and the judge of a result."""

import random

import torch
from torch import Tensor

from plugins.agreement import tolerance
from plugins.speculative_verify.reference import draw

SOFTMAX_ROUNDING = 8 * 2**-24
"""Relative, of a probability in float32, for each unit of its largest logit: an exponent rounded by half an epsilon of
that size moves the probability by as much. The rest is the sum, which CPUs add in orders of their own."""


def random_case(seed: int, *, small: bool = False) -> tuple[Tensor, ...]:
    """Arguments of `speculative_verify`: mixed greedy and sampled, drafts that are mostly good, all or none."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab = rng.choice((1, 2, 7, 40, 100) if small else (1, 2, 7, 130, 1664, 5000))
    gammas = [rng.choice((0, 1, rng.randint(2, 8))) for _ in range(rng.randint(0, 3 if small else 6))]
    sequences, drafts = len(gammas), sum(gammas)
    spread = rng.choice((0.5, 3.0, 20.0))
    logits = torch.randn(drafts + sequences, vocab, generator=gen) * spread
    if rng.random() < 0.3:  # equal maxima, and tokens that cannot be drawn
        logits = logits.round()
        logits[:, 1::3] = float("-inf")
    temperature = torch.tensor([rng.choice((0.0, 1.0, rng.uniform(0.3, 2.0))) for _ in gammas])
    draft_ids = torch.zeros(drafts, dtype=torch.long)
    proposal = torch.softmax(torch.randn(drafts, vocab, generator=gen) * spread, dim=-1)
    row = draft = 0
    for gamma in gammas:
        for j in range(gamma):
            good = rng.random() < 0.7
            draft_ids[draft] = logits[row + j].argmax() if good else torch.randint(0, vocab, (), generator=gen)
            if good:
                proposal[draft] = torch.softmax(logits[row + j] / rng.uniform(0.5, 2.0), dim=-1)
            draft += 1
        row += gamma + 1
    starts = torch.tensor([0, *gammas]).cumsum(0)
    uniform = torch.rand(drafts + sequences, 2, generator=gen)
    draft_probs = proposal if rng.random() < 0.6 else proposal[:0]
    return logits, draft_ids.int(), starts.int(), draft_probs.contiguous(), temperature, uniform


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Rounding may decide whether a draft is taken, and which token is drawn, at the boundary of two."""
    for s in (got[0] != want[0]).nonzero().flatten().tolist():
        if not may_be_rejected(args, s, min(int(got[0][s]), int(want[0][s]))):
            return f"accepted {got[0].tolist()} instead of {want[0].tolist()}"
    for s in (got[1] != want[1]).nonzero().flatten().tolist():
        if not may_be_drawn(args, s, int(got[0][s]), int(got[1][s])):
            return f"sequence {s}: token {int(got[1][s])} instead of {int(want[1][s])}"
    return None


def may_be_rejected(args: tuple, s: int, draft: int) -> bool:
    """Whether rounding decides if sequence s, sampled, takes this draft: its number times the draft's probability is
    the model's within ``SOFTMAX_ROUNDING``."""
    logits, draft_ids, starts, probs, temperature, uniform = args
    place = int(starts[s]) + draft
    row, token = place + s, int(draft_ids[place])
    if temperature[s] == 0:
        return False
    p = float(torch.softmax(logits[row].double() / temperature[s].double(), dim=-1)[token])
    q = float(probs[place, token]) if probs.shape[0] else 1.0
    bound = SOFTMAX_ROUNDING * (1 + float(logits[row].abs().max() / temperature[s]))
    return abs(float(uniform[row, 0]) * q - p) <= bound * p


def may_be_drawn(args: tuple, s: int, accepted: int, token: int) -> bool:
    """Whether sequence s, sampled and having accepted so many drafts, draws ``token`` with its number moved by as
    much as rounding moves the cumulative sum."""
    logits, draft_ids, starts, probs, temperature, uniform = args
    begin = int(starts[s])
    row = begin + s + accepted
    weight = torch.softmax(logits[row] / temperature[s], dim=-1)
    if accepted < int(starts[s + 1]) - begin:
        one_hot = torch.zeros_like(weight).index_fill(0, draft_ids[begin + accepted].long(), 1.0)
        residual = (weight - (probs[begin + accepted] if probs.shape[0] else one_hot)).clamp(min=0)
        weight = residual if residual.any() else weight
    moved = SOFTMAX_ROUNDING * (1 + float((logits[row].nan_to_num(neginf=0) / temperature[s]).abs().max()))
    moved += tolerance(torch.float32, weight.numel())
    near = {draw(weight, (uniform[row, 1] + shift).clamp(0, 1 - 2**-24)) for shift in (-moved, moved)}
    return bool(temperature[s] != 0) and token in range(min(near), max(near) + 1)
