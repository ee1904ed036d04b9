"""Choosing the cut from what can be predicted from its input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvforge.common.errors import KvforgeError
from kvforge.rewire.inputs import LayerInputs
from kvforge.rewire.projections import read_projection
from kvforge.rewire.ridge import CutFit
from kvforge.rewire.similarity import similarity_to_remaining
from kvforge.rewire.source import PlainCheckpoint


@dataclass(frozen=True)
class Candidate:
    """A cut: ``prefill_reduction`` is 1 - cut / layers, ``mean_similarity`` that of its input to the later layers'
    (None for the last layer), ``mean_residual`` and ``worst_residual`` are over K and V of the layers above it, or what
    updates their states, each the share of variance on held-out samples that ridge regression from the cut's input
    leaves."""

    cut: int
    prefill_reduction: float
    mean_similarity: float | None
    mean_residual: float
    worst_residual: float


@torch.inference_mode()
def measure_cuts(
    source: PlainCheckpoint,
    inputs: LayerInputs,
    similarity: torch.Tensor,
    ridge: float,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], object] = lambda stage, done, total: None,
) -> list[Candidate]:
    """Return every cut from 1 to the last layer, measured without groups; ``inputs`` has layers 1 and up.

    Each layer above a cut is fitted on its own: what sharing caches adds is not a question of where to cut.
    """
    num_layers = source.config.num_layers
    to_remaining = similarity_to_remaining(similarity)
    candidates = []
    for cut in range(1, num_layers):
        progress("comparing cuts", cut - 1, num_layers - 1)
        fit = CutFit(source, inputs, cut, ridge, device)
        residuals: list[float] = []
        for layer in range(cut, num_layers):
            group = [read_projection(source, layer, device)]
            residuals += fit.measure([layer], group, *fit.fit([layer], group))[0].shares(group[0].sizes)
        mean = sum(residuals) / len(residuals)
        candidates.append(Candidate(cut, 1 - cut / num_layers, to_remaining[cut], mean, max(residuals)))
    progress("comparing cuts", num_layers - 1, num_layers - 1)
    return candidates


def choose_cut(candidates: Sequence[Candidate], quality_budget: float) -> int:
    """Return the smallest cut whose worst residual is within the budget; raises KvforgeError where none is."""
    for candidate in sorted(candidates, key=lambda candidate: candidate.cut):
        if candidate.worst_residual <= quality_budget:
            return candidate.cut
    best = min(candidates, key=lambda candidate: candidate.worst_residual)
    raise KvforgeError(
        f"No cut keeps the residual of every layer within --quality-budget {quality_budget:g}: the best, "
        f"{best.cut}, leaves {best.worst_residual:.3g}; raise the budget or name a --cut-layer."
    )
