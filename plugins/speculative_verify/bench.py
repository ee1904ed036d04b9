"""Benchmarks of speculative_verify."""

import functools

import torch

from plugins.benchmark import Benchmark, Benchmarks
from plugins.speculative_verify import OPERATOR, speculative_verify


def verify(sequences: int, drafts: int, vocab: int, temperature: float) -> Benchmark:
    """Drafts that are all accepted, drawn from the target's own distribution; its floor reads the logits once."""
    num_rows = sequences * (drafts + 1)
    logits = torch.randn(num_rows, vocab) * 3
    draft_rows = [row for row in range(num_rows) if row % (drafts + 1) < drafts]
    args = (
        logits,
        logits[draft_rows].argmax(-1).int(),
        torch.arange(0, sequences * drafts + 1, drafts).int(),
        torch.softmax(logits[draft_rows] / max(temperature, 1e-3), dim=-1),
        torch.full((sequences,), temperature),
        torch.full((num_rows, 2), 0.5),
    )
    runs = {
        "kvforge_ms": lambda: speculative_verify(*args),
        "reference_ms": lambda: OPERATOR.reference(*args),
    }
    case = f"{sequences}x{drafts} drafts vocabulary {vocab} temperature {temperature}"
    return Benchmark(case, runs, logits.nbytes)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for temperature in (0.0, 0.8):
        yield "verify", functools.partial(verify, 8, 4, 128256, temperature)
