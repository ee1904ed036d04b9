"""Batch-Max's experiment (arXiv 2412.05693, section 4): how many sequences fit, and what that is worth.

    python -m perf.eviction.batch_max --output perf/results/batch-max

24 requests of 2048 → 512 tokens, all forced to their full length, on the 213M-parameter model, in a pool of 96 MiB:
with the full cache, with eviction while prompts are computed too, and with eviction once they are (the paper's
baseline). `static`: batches as large as fit are served one after the other, each to its end, as in the paper. `in
flight`: all requests are there and join as there is room, as they are served. Rows take turns.

Bytes of the cache are those that are allocated: pages and the rule's state.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

from kvforge.manifest import Manifest, load_manifest
from kvforge.runtime.config import resolve_config
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from perf.eviction.engines import PolicyEngine, prepare
from perf.harness.batch import Batch
from perf.harness.command import (
    Report,
    add_lengths,
    add_report,
    add_work,
    begin_report,
    make_parser,
    positive,
    run_program,
)
from perf.harness.tables import markdown_table
from perf.peers.phases import PhaseTimes
from perf.peers.systems import WORK

MAX_SEQ_LEN = 16384
FULL, EVICTS, DECODE = "full cache", "Batch-Max", "evict in decode only"


@dataclass(frozen=True)
class Row:
    """A policy, and whether requests join a batch that runs."""

    name: str
    is_static: bool

    @property
    def label(self) -> str:
        return f"{self.name}, {'static' if self.is_static else 'in flight'}"


ROWS = [Row(name, is_static) for name in (FULL, DECODE, EVICTS) for is_static in (True, False)]


def policies(budget: int, block: int) -> dict[str, str]:
    """Return the policy of each row's name."""
    rule = f"batchmax:budget={budget},block={block}"
    return {FULL: "full", EVICTS: rule, DECODE: f"{rule},decode_only=1"}


def num_sequences(manifest: Manifest, pool_bytes: int, input_tokens: int, output_tokens: int) -> tuple[int, int, int]:
    """Return how many sequences fit while all are at their largest, and the pages and state pages that they take."""
    config = resolve_config(manifest, 0, max_num_seqs=1, num_pages=1 << 16)
    pages, state_pages = config.pages_needed(input_tokens, input_tokens + output_tokens - 1)
    state = manifest.policy.keeping.state_pools(manifest.owner_cache)
    state_bytes = manifest.model.num_owners * sum(
        int(np.prod(pool.shape)) * np.dtype(pool.dtype).itemsize for pool in state if pool.rows == "pages"
    )
    count = pool_bytes // (pages * manifest.page_bytes + state_pages * state_bytes)
    num_pages = (pool_bytes - count * state_pages * state_bytes) // manifest.page_bytes
    return count, num_pages, count * state_pages


def serve(engine: LLMEngine, prompts: np.ndarray, output_tokens: int, at_once: int) -> dict[str, float]:
    """Serve ``prompts`` in groups of ``at_once``; returns times, and how many sequences ran at once."""
    total, most = PhaseTimes(), 0
    for start in range(0, len(prompts), at_once):
        times, running = serve_group(engine, prompts[start : start + at_once], output_tokens)
        most = max(most, running)
        for name in ("total_s", "prefill_s", "decode_s", "decode_rows"):
            setattr(total, name, getattr(total, name) + getattr(times, name))
    tokens = len(prompts) * output_tokens
    return {
        "sequences": most,
        "total_s": total.total_s,
        "prefill_s": total.prefill_s,
        "output_tok_s": tokens / total.total_s,
        "decode_tok_s": total.decode_rows / total.decode_s if total.decode_s else 0.0,
    }


def serve_group(engine: LLMEngine, prompts: np.ndarray, output_tokens: int) -> tuple[PhaseTimes, int]:
    """Serve ``prompts``, all there from the start; returns times and the most sequences that ran in a step."""
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    times, most = PhaseTimes(), 0
    start = before = time.perf_counter()
    batch = Batch(engine, prompts.tolist(), params)
    while engine.has_unfinished():
        running = len(engine.scheduler.running)  # those of the last step that go on
        count = batch.step()
        now = time.perf_counter()
        times.add_step(now - before, engine.statistics.num_context_tokens > 0, [0] * count)
        most = max(most, running)
        if batch.tokens[0] and not times.ttft_s:
            times.ttft_s = now - start
        before = now
    times.total_s = before - start
    return times, most


def measure(args: argparse.Namespace) -> Report:
    """Take turns over the rows."""
    rng = np.random.default_rng(0)
    texts = policies(args.budget, args.block)
    paths = {name: prepare(args.work, PolicyEngine(text), MAX_SEQ_LEN) for name, text in texts.items()}
    vocab = load_manifest(paths[FULL]).vocab_size
    prompts = rng.integers(3, vocab, (args.requests, args.input_tokens))
    runs: dict[str, list[dict[str, float]]] = {row.label: [] for row in ROWS}
    for _ in range(args.turns):
        for row in ROWS:
            manifest = load_manifest(paths[row.name])
            fits, pages, state_pages = num_sequences(
                manifest, args.pool_mib << 20, args.input_tokens, args.output_tokens
            )
            engine = LLMEngine(
                paths[row.name],
                num_pages=pages,
                num_state_pages=state_pages or None,
                enable_prefix_cache=False,
                max_num_seqs=min(args.requests, manifest.max_num_seqs),
            )
            serve_group(engine, prompts[:1, :64], 2)
            at_once = fits if row.is_static else args.requests
            runs[row.label].append({"planned": fits} | serve(engine, prompts, args.output_tokens, at_once))
    rows = {
        label: {name: statistics.median(run[name] for run in found) for name in found[0]} | {"runs": found}
        for label, found in runs.items()
    }
    return begin_report("perf.eviction.batch_max") | {
        "load": {name: getattr(args, name) for name in ("requests", "input_tokens", "output_tokens", "pool_mib")},
        "policies": texts,
        "rows": rows,
    }


def table(report: Report) -> str:
    """Return the table with its explanation."""
    load, rows = report["load"], report["rows"]
    full = rows[ROWS[1].label]
    head = ["", "sequences", "prefill s", "decode tok/s", "whole run s", "decode, times full", "run, times full"]
    lines = [
        [
            label,
            f"{row['sequences']:.0f} (planned {row['planned']:.0f})",
            f"{row['prefill_s']:.1f}",
            f"{row['decode_tok_s']:.1f}",
            f"{row['total_s']:.1f}",
            f"{row['decode_tok_s'] / full['decode_tok_s']:.2f}",
            f"{full['total_s'] / row['total_s']:.2f}",
        ]
        for label, row in rows.items()
    ]
    parts = [
        "# Batch-Max's experiment",
        f"`{report['command']}`, {report['machine']}.",
        f"{load['requests']} requests of {load['input_tokens']} → {load['output_tokens']} tokens in {load['pool_mib']} "
        f'MiB; `{report["policies"][EVICTS]}`. Medians; "times full" is the full cache in flight.',
        markdown_table(head, lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = make_parser(__doc__)
    add_lengths(parser, 2048, 512)
    parser.add_argument("--requests", type=positive, default=24)
    parser.add_argument("--pool-mib", type=positive, default=96)
    parser.add_argument("--budget", type=positive, default=512)
    parser.add_argument("--block", type=positive, default=64)
    parser.add_argument("--turns", type=positive, default=1)
    add_work(parser, WORK)
    add_report(parser, "OUTPUT.json and OUTPUT.md")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
