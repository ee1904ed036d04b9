"""How close a SwiftKV student is to its teacher where both are torch modules: no engine is built."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvforge.evaluation.compare import Comparison, fidelity, kl_divergence
from kvforge.runtime.scoring.score import lowest_argmax

ROWS = 256
"""Positions whose logits are in memory at a time."""


def sums_of(student: Tensor, teacher: Tensor, head: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[float, ...]:
    """Return the sums of a document's ``Comparison``: KL(teacher || student), equal best tokens, and the negative
    log-probabilities of the text under the student and the teacher.

    ``student`` and ``teacher`` are normalised outputs ``[T, hidden]``, ``ids`` the document ``[T]``; each position but
    the last predicts the next token.
    """
    totals = torch.zeros(4, dtype=torch.float64)
    for begin in range(0, len(ids) - 1, ROWS):
        rows = slice(begin, min(begin + ROWS, len(ids) - 1))
        ours, theirs = head(student[rows]).float(), head(teacher[rows]).float()
        targets = ids[rows.start + 1 : rows.stop + 1, None]
        nll = [-logits.log_softmax(-1).gather(1, targets).double().sum() for logits in (ours, theirs)]
        same = (lowest_argmax(ours) == lowest_argmax(theirs)).double().sum()
        totals += torch.stack([kl_divergence(theirs, ours).sum(), same, *nll]).cpu()
    return tuple(totals.tolist())


def closeness(sums: Sequence[tuple[float, ...]], documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what ``kvforge eval`` says of documents whose ``sums_of`` are given: KL, agreement and perplexities with
    their intervals, and what they were measured on."""
    counts = tuple(len(document) - 1 for document in documents)
    kl, same, student, teacher = zip(*sums, strict=True)
    found = fidelity(Comparison(counts, kl, tuple(map(int, same)), student, teacher))
    return {"num_documents": len(documents), "num_tokens": sum(counts), **found}
