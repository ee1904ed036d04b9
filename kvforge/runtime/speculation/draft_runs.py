"""What becomes of all drafts of a step at once, by an engine's graph ``verify``.

A *run* holds the tokens that a sequence gets: its drafts as far as they are right and the token after them. It ends
with None where that token cannot be had because the logits there are not finite.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate, chain

import numpy as np
import torch

from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.sampling.draw import filter_logits
from kvforge.runtime.sampling.filters import Filters
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.sessions.inputs import VerifyStep

Run = list[int | None]


Verify = Callable[[VerifyStep], tuple[torch.Tensor, torch.Tensor]]
"""``Session.verify``."""

DraftProbs = Mapping[Sequence, torch.Tensor]
"""What drafts were drawn from, [number of drafts, vocab_size] float32, of the sequences whose drafts were drawn."""


@torch.inference_mode()
def greedy_runs(verify: Verify, plan: Schedule, logits: torch.Tensor) -> dict[Sequence, Run]:
    """Return the run of every survivor that only takes the most probable token.

    All survivors are verified, so that ``logits`` [R, vocab_size] need no copy; the others' runs are left out.
    """
    survivors = plan.survivors
    drafts = [plan.drafts.get(sequence, ()) for sequence in survivors]
    temperature = torch.zeros(len(survivors))
    accepted, following = _verify(verify, logits, drafts, logits[:0], temperature, torch.zeros(len(logits), 2))
    runs: dict[Sequence, Run] = {}
    values = logits.numpy()
    for sequence, row, draft, count, token in zip(
        survivors, plan.survivor_rows, drafts, accepted, following, strict=True
    ):
        if sequence.sampling is None:
            tokens = [*draft[:count], token]
            # A NaN counts as the largest logit, so that the chosen one tells of it.
            runs[sequence] = _whole(tokens, np.isfinite(values[np.arange(row, row + len(tokens)), tokens]))
    return runs


@torch.inference_mode()
def drawn_runs(
    verify: Verify, plan: Schedule, logits: torch.Tensor, probs: DraftProbs, sequences: list[Sequence]
) -> dict[Sequence, Run]:
    """Return the runs of ``sequences``, whose drafts were drawn from ``probs``: tokens distributed as those
    drawn from ``logits`` [R, vocab_size] one at a time (Leviathan et al., arXiv 2211.17192, appendix A.1).

    Args:
        sequences: survivors with ``SamplingState.may_reject``; their generators give two numbers a row.
    """
    first = dict(zip(plan.survivors, plan.survivor_rows, strict=True))
    drafts = [plan.drafts[sequence] for sequence in sequences]
    rows = [first[s] + place for s, draft in zip(sequences, drafts, strict=True) for place in range(len(draft) + 1)]
    states = [s.sampling for s, draft in zip(sequences, drafts, strict=True) for _ in range(len(draft) + 1)]
    target = logits[rows]
    finite = target.amax(-1).isfinite().numpy()
    filters = Filters.of(states, target)
    starts = _starts(drafts)
    accepted, following = _verify(
        verify,
        filter_logits(target, filters),
        drafts,
        torch.cat([probs[sequence] for sequence in sequences]),
        filters.temperature[[start + index for index, start in enumerate(starts[:-1])]],
        torch.tensor([[state.random.getrandbits(24) / 2**24 for _ in range(2)] for state in states]),
    )
    return {
        sequence: _whole([*draft[:count], token], finite[start + index :])
        for index, (sequence, draft, start, count, token) in enumerate(
            zip(sequences, drafts, starts[:-1], accepted, following, strict=True)
        )
    }


def _starts(drafts: list[tuple[int, ...]]) -> list[int]:
    return [0, *accumulate(map(len, drafts))]


def _verify(
    verify: Verify,
    logits: torch.Tensor,
    drafts: list[tuple[int, ...]],
    probs: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[list[int], list[int]]:
    ids = torch.tensor(list(chain.from_iterable(drafts)), dtype=torch.int32)
    starts = torch.tensor(_starts(drafts), dtype=torch.int32)
    accepted, following = verify(VerifyStep(logits, ids, starts, probs, temperature, uniform))
    return accepted.tolist(), following.tolist()


def _whole(tokens: list[int], finite: np.ndarray) -> Run:
    """Return the tokens before the first whose logits are not ``finite`` [>= len(tokens)], and None if there is one."""
    finite = finite[: len(tokens)]
    return [*tokens] if finite.all() else [*tokens[: int(finite.argmin())], None]
