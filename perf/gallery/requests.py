"""Requests of many lengths, and the engine's scheduler serving them a step at a time, without graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics
from kvforge.runtime.requests.sequence import Sequence as Running
from kvforge.runtime.scheduling.scheduler import Scheduler

MAX_SEQ_LEN = 2048
VOCAB_SIZE = 30_000


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and of the outputs that are drawn for them: log-normal with these means, and cut off at
    half of ``MAX_SEQ_LEN`` each."""

    name: str
    mean_input: float
    mean_output: float
    sigma: float = 1.0

    def draw(self, num: int, seed: int) -> list[tuple[int, int]]:
        """Return ``num`` pairs, each at least 1."""
        rng = np.random.default_rng(seed)
        columns = [
            np.clip(rng.lognormal(np.log(mean) - self.sigma**2 / 2, self.sigma, num).round(), 1, MAX_SEQ_LEN // 2)
            for mean in (self.mean_input, self.mean_output)
        ]
        return [(int(a), int(b)) for a, b in zip(*columns, strict=True)]


CHAT, INSTRUCTIONS = Lengths("chat", 161, 338), Lengths("instructions", 19, 58)
"""With the means of the two data sets of vLLM's evaluation (arXiv 2309.06180, section 6.1): ShareGPT and Alpaca."""


def make_config(num_slots: int, page_size: int, prefix_cache: bool = False) -> RuntimeConfig:
    """Return the limits of an engine whose cache holds ``num_slots`` tokens, and nothing else binds."""
    num_pages = num_slots // page_size
    return RuntimeConfig(
        num_pages=num_pages, page_size=page_size, max_num_seqs=min(num_pages, 1024), max_num_tokens=8192,
        max_seq_len=MAX_SEQ_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=(), enable_prefix_cache=prefix_cache,
        max_num_survivors=8192,
    )  # fmt: skip


def make_sequence(index: int, prompt: np.ndarray, num_output: int) -> Running:
    """Return a sequence that waits to be added to a scheduler."""
    params = SamplingParams(max_tokens=num_output)
    return Running(str(index), 0, (0, index, 0), prompt, params, len(prompt) + num_output, RequestMetrics(0, 0))


def serve(scheduler: Scheduler, sequences: Sequence[Running], seed: int) -> Iterator[None]:
    """Serve sequences that are all there at the beginning; yields after each step's tokens are computed, before the
    next ones are drawn."""
    rng = np.random.default_rng(seed)
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        survivors = plan.survivors
        scheduler.commit(plan)
        yield
        scheduler.append(survivors, rng.integers(VOCAB_SIZE, size=len(survivors)).tolist())
        for sequence in survivors:
            if sequence.length == sequence.max_length:
                scheduler.finish(sequence)
