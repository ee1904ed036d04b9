"""Drawing tokens from filtered distributions, all rows at once."""

from collections.abc import Iterator

import torch

from kvforge.runtime.sampling.filters import Filters

_FIRST_CANDIDATES = 256
_BLOCK = 1 << 21
"""Logits worked on at a time: temporaries of more are mapped anew for every operation (256 rows of 32,000 tokens in
27 ms instead of 49)."""


def draw_tokens(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token a row by inverting the cumulative distribution at ``uniform``. A row's token depends on that row
    alone.

    Args:
        logits: [R, V] float32.
        filters: of R rows.
        uniform: [R] float32 in [0, 1).

    Returns:
        [R] int64 token ids.
    """
    num_rows = _num_rows(logits)
    parts = zip(logits.split(num_rows), filters.blocks(num_rows), uniform.split(num_rows), strict=True)
    return torch.cat([_draw_rows(*part) for part in parts])


def draw_queued(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor, most_candidates: int) -> torch.Tensor:
    """As ``draw_tokens``, without waiting for the device: every row is drawn of as many candidates as any row may need.
    ``most_candidates`` is the largest ``top_k`` of rows that must be sorted, 0 if there are none."""
    probs, vocab_size = filters.probabilities(logits), logits.shape[1]
    floor = filters.floor(probs.amax(-1))
    tokens = invert(torch.where(probs < floor[:, None], 0.0, probs), uniform)
    pending, num_candidates = filters.sorts(vocab_size), 0
    while num_candidates < most_candidates:
        num_candidates = min(16 * num_candidates or _FIRST_CANDIDATES, vocab_size)
        top, ids = probs.topk(num_candidates, dim=-1)
        kept, settled = filters.keep_prefix(top, vocab_size)
        picked = ids.gather(1, invert(kept, uniform)[:, None]).squeeze(1)
        tokens = torch.where(pending & settled, picked, tokens)
        pending = pending & ~settled
    return tokens


def filter_logits(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return a copy of ``logits`` in which the tokens that ``draw_tokens`` never draws are -inf; arguments as there."""
    result = logits.clone()
    num_rows = _num_rows(logits)
    for part in zip(result.split(num_rows), filters.blocks(num_rows), strict=True):
        _filter_rows(*part)
    return result


def _num_rows(logits: torch.Tensor) -> int:
    return max(_BLOCK // logits.shape[1], 1)


def _filter_rows(logits: torch.Tensor, filters: Filters) -> None:
    if not filters.drops(logits.shape[1]):
        return
    probs = filters.probabilities(logits)
    sorts = filters.sorts(logits.shape[1])
    floor = torch.where(sorts, 0.0, filters.floor(probs.amax(-1)))
    logits.masked_fill_(probs < floor[:, None], -torch.inf)
    for rows, ids, kept in _nuclei(probs, sorts.nonzero().flatten(), filters):
        places = torch.where(kept > 0, logits[rows].gather(1, ids), -torch.inf)
        logits[rows] = torch.full_like(logits[rows], -torch.inf).scatter_(1, ids, places)


def _draw_rows(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    probs = filters.probabilities(logits)
    sorts = filters.sorts(logits.shape[1])
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    free = (~sorts).nonzero().flatten()
    if len(free):
        rows = probs if len(free) == len(probs) else probs[free]
        floor = filters.rows(free).floor(rows.amax(-1))
        tokens[free] = invert(torch.where(rows < floor[:, None], 0.0, rows), uniform[free])
    for rows, ids, kept in _nuclei(probs, sorts.nonzero().flatten(), filters):
        picked = invert(kept, uniform[rows])
        tokens[rows] = ids.gather(1, picked[:, None]).squeeze(1)
    return tokens


def _nuclei(
    probs: torch.Tensor, pending: torch.Tensor, filters: Filters
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield rows [n] of ``pending``, their most probable tokens [n, C] and those tokens' probabilities, 0 where the
    filters drop one; every row of ``pending`` once."""
    vocab_size = probs.shape[1]
    num_candidates = min(_FIRST_CANDIDATES, vocab_size)
    while len(pending):
        # The most probable tokens nearly always hold the nucleus; rows where they do not are sorted further.
        top, ids = (probs if len(pending) == len(probs) else probs[pending]).topk(num_candidates, dim=-1)
        kept, settled = filters.rows(pending).keep_prefix(top, vocab_size)
        rows = settled.nonzero().flatten()
        yield pending[rows], ids[rows], kept[rows]
        pending = pending[~settled]
        num_candidates = min(16 * num_candidates, vocab_size)


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return of each row [V] the first index whose cumulative probability exceeds ``uniform`` [R] of the total, never
    an impossible one; int64 [R]."""
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return index.clamp_(max=probs.shape[1] - 1)
