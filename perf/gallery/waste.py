"""Shares of a full cache that hold tokens: pages of the engine's scheduler beside one piece for each request.

As Figure 2 of arXiv 2309.06180, which measured Orca's allocations on ShareGPT.
"""

from dataclasses import astuple
from pathlib import Path

import numpy as np

from kvforge.common.figures import new_figure, save_figure
from kvforge.runtime.scheduling.scheduler import Scheduler
from perf.gallery.contiguous import RESERVES, Usage, serve_contiguous
from perf.gallery.figure import Figure, Report
from perf.gallery.requests import CHAT, make_config, make_sequence, serve

NUM_SLOTS = 16_384
"""Tokens of the cache: what that paper's 13B model has left on a 40 GB GPU, to within a few per cent."""
NUM_REQUESTS, SEED = 400, 0
PAGE_SIZES = (16, 32, 64, 128)
PARTS = ("tokens", "reserved", "inside", "outside")


def serve_paged(requests: list[tuple[int, int]], num_slots: int, page_size: int, seed: int = SEED) -> list[Usage]:
    """Serve requests with the engine's scheduler; returns the usage of the steps in which requests wait."""
    config = make_config(num_slots, page_size)
    scheduler = Scheduler(config)
    sequences = [
        make_sequence(index, np.zeros(num_input, dtype=np.int32), num_output)
        for index, (num_input, num_output) in enumerate(requests)
    ]
    usage = []
    for _ in serve(scheduler, sequences, seed):
        if scheduler.waiting:
            held = scheduler.pool.num_used * page_size
            tokens = sum(sequence.num_computed for sequence in scheduler.running)
            usage.append(Usage(tokens, 0, held - tokens, num_slots - held, len(scheduler.running)))
    return usage


def make() -> Report:
    """Return the mean share of each part, and the mean number of running requests, of every allocation."""
    requests = CHAT.draw(NUM_REQUESTS, SEED)
    usage = {name: serve_contiguous(requests, NUM_SLOTS, reserve) for name, reserve in RESERVES.items()}
    usage |= {f"pages of {size}": serve_paged(requests, NUM_SLOTS, size) for size in PAGE_SIZES}
    rows = []
    for name, moments in usage.items():
        *parts, running = np.array([astuple(moment) for moment in moments], dtype=np.float64).mean(0)
        shares = {part: value / NUM_SLOTS for part, value in zip(PARTS, parts, strict=True)}
        rows.append({"name": name, "num_steps": len(moments), "mean_running": running, **shares})
    return {"num_slots": NUM_SLOTS, "num_requests": NUM_REQUESTS, "seed": SEED, "rows": rows}


def plot(report: Report, path: Path) -> None:
    """Draw a bar of its parts for each allocation."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    names = [row["name"] for row in report["rows"]]
    begin = np.zeros(len(names))
    labels = ("tokens", "reserved for later", "never used within", "not given to anybody")
    for part, label, colour in zip(PARTS, labels, ("C2", "C0", "C1", "lightgray"), strict=True):
        values = np.array([100 * row[part] for row in report["rows"]])
        axes.barh(names, values, left=begin, label=label, color=colour)
        begin += values
    for place, row in enumerate(report["rows"]):
        axes.text(1, place, f"{100 * row['tokens']:.1f}%, {row['mean_running']:.0f} requests", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="% of the cache while requests wait", xlim=(0, 100))
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.45, 1.14))
    save_figure(figure, path)


WASTE = Figure("waste", make, plot)
