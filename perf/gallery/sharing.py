"""Pages that sequences with a common beginning share: samples of one prompt, and prompts behind one instruction.

As Figures 15 and 16 of arXiv 2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvforge.runtime.requests.sequence import Sequence as Running
from kvforge.runtime.scheduling.scheduler import Scheduler
from perf.gallery.figure import Figure, Report
from perf.gallery.requests import CHAT, INSTRUCTIONS, VOCAB_SIZE, Lengths, make_config, make_sequence, serve
from perf.harness.plots import panels

SEED, NUM_PROMPTS, NUM_TOGETHER = 0, 128, 32
NUM_SAMPLES = (2, 4, 6)
PREFIXES = (0, 64, 128, 256, 512, 1024)
OWN_INPUT, OWN_OUTPUT = 100, 64
"""Tokens of each request behind the common beginning."""
PAGE_SIZES = (16, 32, 64)
ENOUGH_SLOTS = 2**20


@dataclass(frozen=True)
class Sharing:
    """``saved``: the share of the pages in sequences' tables that is held once for several of them, over all steps;
    ``reused``: the share of prompt tokens that were not computed."""

    saved: float
    reused: float


def share(sequences: Sequence[Running], page_size: int) -> Sharing:
    """Serve the sequences together, in a cache where all have room."""
    scheduler = Scheduler(make_config(ENOUGH_SLOTS, page_size, prefix_cache=True))
    in_tables = held = 0
    for _ in serve(scheduler, sequences, SEED):
        in_tables += sum(len(sequence.pages) for sequence in scheduler.running)
        held += scheduler.pool.num_used
    num_prompt = sum(sequence.num_prompt_tokens for sequence in sequences)
    return Sharing(1 - held / in_tables, scheduler.admissions.num_reused_tokens / num_prompt)


def samples(lengths: Lengths, num_samples: int) -> list[Running]:
    """Return the ``num_samples`` sequences of each of ``NUM_PROMPTS`` requests."""
    rng = np.random.default_rng(SEED)
    sequences: list[Running] = []
    for num_input, num_output in lengths.draw(NUM_PROMPTS, SEED):
        prompt = rng.integers(VOCAB_SIZE, size=num_input, dtype=np.int32)
        group = [make_sequence(len(sequences) + index, prompt, num_output) for index in range(num_samples)]
        for sequence in group:
            sequence.siblings = group
        sequences += group
    return sequences


def behind(prefix: int) -> list[Running]:
    """Return ``NUM_TOGETHER`` requests that begin with the same ``prefix`` tokens."""
    rng = np.random.default_rng(SEED)
    first = rng.integers(VOCAB_SIZE, size=prefix, dtype=np.int32)
    prompts = [
        np.concatenate([first, rng.integers(VOCAB_SIZE, size=OWN_INPUT, dtype=np.int32)]) for _ in range(NUM_TOGETHER)
    ]
    return [make_sequence(index, prompt, OWN_OUTPUT) for index, prompt in enumerate(prompts)]


def _line(name: str, x: Sequence[int], found: Sequence[Sharing]) -> Report:
    return {"name": name, "x": list(x), "saved": [s.saved for s in found], "reused": [s.reused for s in found]}


def make() -> Report:
    """Return the shares by number of samples, of both data sets' lengths, and by common tokens, for each page size."""
    return {
        "seed": SEED,
        "num_prompts": NUM_PROMPTS,
        "num_together": NUM_TOGETHER,
        "own_tokens": [OWN_INPUT, OWN_OUTPUT],
        "samples": [
            _line(
                f"{lengths.name}, pages of {size}", NUM_SAMPLES, [share(samples(lengths, n), size) for n in NUM_SAMPLES]
            )
            for lengths in (CHAT, INSTRUCTIONS)
            for size in PAGE_SIZES[:2]
        ],
        "prefixes": [
            _line(f"pages of {size}", PREFIXES, [share(behind(prefix), size) for prefix in PREFIXES])
            for size in PAGE_SIZES
        ],
    }


def plot(report: Report, path: Path) -> None:
    """Left: pages saved over samples of a prompt. Right: pages saved over common tokens, prompt tokens dotted."""
    with panels(path, 10, 4, 2, legend=7, sharey=True) as (left, right):
        for axes, name in ((left, "samples"), (right, "prefixes")):
            for index, line in enumerate(report[name]):
                colour, saved = f"C{index}", [100 * value for value in line["saved"]]
                axes.plot(line["x"], saved, marker="o", ms=3, color=colour, label=f"{line['name']}, pages saved")
                if name == "prefixes":
                    reused = [100 * value for value in line["reused"]]
                    axes.plot(line["x"], reused, ":", color=colour, label=f"{line['name']}, prompt not computed")
        left.set(xlabel="samples of one prompt", ylabel="%", ylim=(0, 100))
        right.set(xlabel=f"tokens that {report['num_together']} requests begin with")


SHARING = Figure("sharing", make, plot)
