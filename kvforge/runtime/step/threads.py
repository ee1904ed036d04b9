"""How many threads a step is worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 4_000_000
"""Weights x tokens below which a second thread saves nothing: about a tenth of a millisecond of work on one core,
spread over some fifty parallel regions. (0.1M parameters, 1 to 32 sequences, two cores: equal times; with another
process wanting the cores, two threads took 25 times as long as one.)"""


@contextmanager
def step_threads(num_parameters: int, num_tokens: int) -> Iterator[None]:
    """Run the body on one thread if the step is small, else on torch's threads; the setting is restored."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_parameters * num_tokens >= SMALL_STEP:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
