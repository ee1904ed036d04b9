"""Decode steps of one sequence, by the dtype of the weights: what a step takes, and how much of it is reading them.

    python -m perf.engine.decode_weights [--work DIR] [--shapes 213M "8B, 8 layers"] [--weights int8 int4] [--rounds 9]

Shapes: the 213M model of the other benchmarks, and 8 of the 32 layers of Llama-3.1-8B's shape with its whole head;
random weights, no cut. All engines of a shape are loaded in one process and take turns: in a round each decodes
--output-tokens after a prompt of --input-tokens. Ratios are taken within a round, to the first of --weights. A step's
floor is its bytes at the rate of a plain read, the best of those measured before and after each round.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.compiler.options import PACKED_DTYPES
from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.sessions.session import load_session
from perf.engine.floors import best_rates, decode_work, measure_rates
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
from perf.harness.engines import cached_engine
from perf.harness.random_checkpoint import LLAMA_8B, LLAMA_213M, cached_checkpoint
from perf.harness.tables import markdown_table
from perf.harness.timed_session import TimedSession
from perf.peers.phases import PhaseTimes

SHAPES: dict[str, dict[str, Any]] = {
    "213M": LLAMA_213M,
    "8B, 8 layers": {**LLAMA_8B, "num_hidden_layers": 8, "max_position_embeddings": 8192},
}
MAX_SEQ_LEN = 2048


WEIGHTS = ("bfloat16", *PACKED_DTYPES)


@dataclass(frozen=True)
class Times:
    """Seconds of a step, in the middle of several, and on average in its graphs."""

    step_s: float
    graphs_s: float


def engine_of(shape: str, weight_dtype: str, work: Path) -> Path:
    """Return the engine, built if it is not there yet."""
    slug = shape.replace(", ", "-").replace(" ", "-")
    options = BuildOptions(
        dtype="bfloat16", weight_dtype=weight_dtype, max_num_seqs=8, max_num_tokens=512, max_seq_len=MAX_SEQ_LEN
    )
    return cached_engine(
        work / f"decode-{slug}-{weight_dtype}",
        lambda: cached_checkpoint(work / f"checkpoint-{slug}", SHAPES[shape]),
        options,
    )


def load(engine: Path) -> tuple[LLMEngine, TimedSession]:
    """Return an engine and what times its graphs."""
    session = TimedSession(load_session(engine, load_manifest(engine)))
    return LLMEngine(session=session, enable_prefix_cache=False, kv_cache_gib=0.25), session


def measure_shape(shape: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each dtype: medians over the rounds."""
    engines = {name: load(engine_of(shape, name, args.work)) for name in args.weights}
    for loaded in engines.values():
        decode(*loaded, shape, 0, args.input_tokens, 2)  # warms up
    runs: dict[str, list[Times]] = {name: [] for name in engines}
    rates = [measure_rates()]
    for index in tqdm(range(args.rounds), desc=shape, unit="round"):
        turn = index % len(args.weights)
        for name in [*args.weights[turn:], *args.weights[:turn]]:
            runs[name].append(decode(*engines[name], shape, index, args.input_tokens, args.output_tokens))
        rates.append(measure_rates())
    best, first, rows = best_rates(*rates), runs[args.weights[0]], []
    work = PhaseTimes(decode_steps=1, decode_rows=1, decode_context=args.input_tokens + args.output_tokens // 2)
    for name, (engine, _) in engines.items():
        row: dict[str, Any] = {"shape": shape, "weights": name, "weight_bytes": engine.manifest.weight_bytes}
        row["step_s"] = statistics.median(run.step_s for run in runs[name])
        row["graphs_s"] = statistics.median(run.graphs_s for run in runs[name])
        row["floor_s"] = decode_work(engine.manifest, work).floor_s(best)
        row["ratios"] = [other.step_s / run.step_s for run, other in zip(runs[name], first, strict=True)]
        rows.append(row | {"times_as_fast": statistics.median(row["ratios"]), "read_bytes_per_s": best.read})
    return rows


def decode(
    engine: LLMEngine, session: TimedSession, shape: str, seed: int, input_tokens: int, output_tokens: int
) -> Times:
    """Decode so many tokens after a random prompt."""
    prompt = np.random.default_rng(seed).integers(3, SHAPES[shape]["vocab_size"], input_tokens).tolist()
    batch = Batch(engine, [prompt], SamplingParams(temperature=0.0, max_tokens=1 + output_tokens, ignore_eos=True))
    batch.start()
    session.seconds.clear()
    steps = []
    while engine.has_unfinished():
        begin = time.perf_counter()
        batch.step()
        steps.append(time.perf_counter() - begin)
    return Times(statistics.median(steps), sum(session.seconds.values()) / len(steps))


def table(report: Report) -> str:
    """Return the table with its explanation."""
    rows = report["rows"]
    head = ["shape", "weights", "read by a step", "step ms", "in its graphs", "floor ms", "share of the floor"]
    head.append(f"times as fast as {rows[0]['weights']} (least to most)")
    lines = [
        [
            row["shape"],
            row["weights"],
            f"{row['weight_bytes'] / 1e6:.0f} MB",
            f"{1e3 * row['step_s']:.2f}",
            f"{1e3 * row['graphs_s']:.2f}",
            f"{1e3 * row['floor_s']:.2f}",
            f"{row['floor_s'] / row['step_s']:.0%}",
            f"{row['times_as_fast']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
        ]
        for row in rows
    ]
    rates = {row["shape"]: f"{row['read_bytes_per_s'] / 1e9:.1f} GB/s ({row['shape']})" for row in rows}
    parts = [
        "# Decoding one sequence, by the dtype of the weights",
        f"`{report['command']}`, {report['machine']}.",
        f"{report['output_tokens']} tokens after a prompt of {report['input_tokens']}, medians of {report['rounds']} "
        "rounds, in each of which all take a turn; ratios within a round. The floor is the bytes of weights and cache "
        f"over the best rate of a plain read: {', '.join(rates.values())}.",
        markdown_table(head, lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Measure and report."""
    parser = make_parser(__doc__)
    add_work(parser)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="NAME")
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHTS), default=["int8", "int4"])
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--build-only", action="store_true", help="make the engines, run nothing")
    add_lengths(parser, 128, 48)
    add_report(parser, "OUTPUT.json and .md")
    args = parser.parse_args()
    if args.build_only:
        for shape, name in product(args.shapes, args.weights):
            engine_of(shape, name, args.work)
        return 0
    settings = {name: getattr(args, name) for name in ("input_tokens", "output_tokens", "rounds")}

    def make() -> Report:
        rows = [row for shape in args.shapes for row in measure_shape(shape, args)]
        return begin_report("perf.engine.decode_weights") | settings | {"rows": rows}

    return run_program(args, make, table, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
