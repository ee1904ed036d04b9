"""Decode steps of one sequence, by the dtype of the weights: what a step takes, and how much of it is reading them.

    python -m perf.engine.decode_weights [--work DIR] [--shapes 213M "8B, 8 layers"] [--weights int8 int4] [--rounds 9]

Shapes: the 213M model of the other benchmarks, and 8 of the 32 layers of Llama-3.1-8B's shape with its whole head;
random weights, no cut. All engines of a shape are loaded in one process and take turns: in a round each decodes
--output-tokens after a prompt of --input-tokens. Ratios are taken within a round, to the first of --weights. A step's
floor is its bytes at the rate of a plain read, the best of those measured before and after each round.
"""

import argparse
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.compiler import BuildOptions
from kvforge.compiler.options import PACKED_DTYPES
from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.sessions.session import load_session
from perf.engine.floors import best_rates, decode_work, measure_rates
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Report, ratio
from perf.harness.options import BUILD_ONLY, chosen, lengths, number, option, output, work
from perf.harness.random_checkpoint import LLAMA_8B, LLAMA_213M, cached_checkpoint
from perf.harness.rounds import medians, turned
from perf.harness.tables import Row, spread
from perf.harness.timed_session import TimedSession
from perf.peers.phases import PhaseTimes

SHAPES: dict[str, dict[str, Any]] = {
    "213M": LLAMA_213M,
    "8B, 8 layers": {**LLAMA_8B, "num_hidden_layers": 8, "max_position_embeddings": 8192},
}
MAX_SEQ_LEN = 2048
WEIGHTS = ("bfloat16", *PACKED_DTYPES)


def engine_of(shape: str, weight_dtype: str, work: Path) -> Path:
    """Return the engine, built if it is not there yet."""
    slug = shape.replace(", ", "-").replace(" ", "-")
    options = BuildOptions(
        dtype="bfloat16", weight_dtype=weight_dtype, max_num_seqs=8, max_num_tokens=512, max_seq_len=MAX_SEQ_LEN
    )
    checkpoint = work / f"checkpoint-{slug}"
    folder = work / f"decode-{slug}-{weight_dtype}"
    return cached_engine(folder, lambda: cached_checkpoint(checkpoint, SHAPES[shape]), options)


def load(engine: Path) -> tuple[LLMEngine, TimedSession]:
    """Return an engine and what times its graphs."""
    session = TimedSession(load_session(engine, load_manifest(engine)))
    return LLMEngine(session=session, enable_prefix_cache=False, kv_cache_gib=0.25), session


def measure_shape(shape: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each dtype: medians over the rounds."""
    engines = {name: load(engine_of(shape, name, args.work)) for name in args.weights}
    for loaded in engines.values():
        decode(*loaded, shape, 0, args.input_tokens, 2)  # warms up
    runs: dict[str, list[Row]] = {name: [] for name in engines}
    rates = [measure_rates()]
    for index in tqdm(range(args.rounds), desc=shape, unit="round"):
        for name in turned(args.weights, index):
            runs[name].append(decode(*engines[name], shape, index, args.input_tokens, args.output_tokens))
        rates.append(measure_rates())
    best, first = best_rates(*rates), runs[args.weights[0]]
    work = PhaseTimes(decode_steps=1, decode_rows=1, decode_context=args.input_tokens + args.output_tokens // 2)
    for name, (engine, _) in engines.items():
        row = {"shape": shape, "weights": name, "weight_bytes": engine.manifest.weight_bytes, **medians(runs[name])}
        row["floor_s"] = decode_work(engine.manifest, work).floor_s(best)
        row["ratios"] = [other["step_s"] / run["step_s"] for run, other in zip(runs[name], first, strict=True)]
        yield row | {"times_as_fast": statistics.median(row["ratios"]), "read_bytes_per_s": best.read}


def decode(
    engine: LLMEngine, session: TimedSession, shape: str, seed: int, input_tokens: int, output_tokens: int
) -> Row:
    """Decode so many tokens after a random prompt; returns the seconds of a step, in the middle of several, and on
    average in its graphs."""
    prompt = np.random.default_rng(seed).integers(3, SHAPES[shape]["vocab_size"], input_tokens).tolist()
    batch = Batch(engine, [prompt], 1 + output_tokens)
    batch.start()
    session.seconds.clear()
    steps = batch.steps()
    return {"step_s": statistics.median(steps), "graphs_s": sum(session.seconds.values()) / len(steps)}


def measure(args: argparse.Namespace) -> list[Row]:
    """Measure every shape."""
    return [row for shape in args.shapes for row in measure_shape(shape, args)]


def build_only(args: argparse.Namespace) -> bool:
    """Make all engines where nothing else is asked for."""
    for shape, name in product(args.shapes, args.weights) if args.build_only else ():
        engine_of(shape, name, args.work)
    return args.build_only


def notes(report: Report) -> str:
    """What was measured, and the rates of the floors."""
    rates = {row["shape"]: f"{row['read_bytes_per_s'] / 1e9:.1f} GB/s ({row['shape']})" for row in report["rows"]}
    return (
        f"{report['output_tokens']} tokens after a prompt of {report['input_tokens']}, medians of {report['rounds']} "
        "rounds, in each of which all take a turn; ratios within a round. The floor is the bytes of weights and cache "
        f"over the best rate of a plain read: {', '.join(rates.values())}."
    )


EXPERIMENT = Experiment(
    "perf.engine.decode_weights", __doc__,
    options=(
        work(), chosen("--shapes", list(SHAPES), metavar="NAME"),
        option("--weights", nargs="+", choices=list(WEIGHTS), default=["int8", "int4"]), number("--rounds", 9),
        BUILD_ONLY, lengths(128, 48), output("OUTPUT.json and .md"),
    ),
    measure=measure, instead=build_only, settings=("input_tokens", "output_tokens", "rounds"),
    title="Decoding one sequence, by the dtype of the weights", notes=notes,
    columns=lambda report: (
        ("shape", "shape"), ("weights", "weights"), ("read by a step", "weight_bytes", "{:.0f} MB", 1e-6),
        ("step ms", "step_s", ".2f", 1e3), ("in its graphs", "graphs_s", ".2f", 1e3),
        ("floor ms", "floor_s", ".2f", 1e3), ("share of the floor", ratio("floor_s", "step_s"), ".0%"),
        (f"times as fast as {report['rows'][0]['weights']} (least to most)", lambda row: spread(row["ratios"], 2)),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
