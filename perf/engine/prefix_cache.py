"""Measure what the prefix cache saves for requests that begin alike, with it and without it on one engine.

    python -m perf.engine.prefix_cache --engine DIR [--num-runs 5] [--output OUTPUT]

All requests arrive together: the first one computes the shared beginning and the others take it over from there. Runs
with and without the cache alternate, each with a new cache and prompts of its own; outputs must be the same.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.sessions.session import Session, load_session
from perf.harness.batch import Batch
from perf.harness.experiment import Experiment, engine_place, number, output, seed

VARIANTS = {"with": True, "without": False}


def make_prompts(rng: np.random.Generator, vocab_size: int, args: argparse.Namespace) -> list[list[int]]:
    """Return random prompts with one common beginning."""
    prefix = rng.integers(3, vocab_size, args.prefix).tolist()
    return [prefix + rng.integers(3, vocab_size, args.suffix).tolist() for _ in range(args.requests)]


def run_once(session: Session, prompts: list[list[int]], output_tokens: int, use_cache: bool) -> dict[str, Any]:
    """Serve the prompts together; returns seconds, tokens taken from the cache, and the outputs."""
    engine = LLMEngine(session=session, enable_prefix_cache=use_cache, kv_cache_gib=2.0)
    batch, firsts = Batch(engine, prompts, output_tokens), [0.0] * len(prompts)
    while engine.has_unfinished():
        batch.step()
        now = time.perf_counter() - batch.begun
        firsts = [first or (now if tokens else 0.0) for first, tokens in zip(firsts, batch.tokens, strict=True)]
    total = time.perf_counter() - batch.begun
    reused = engine.stats()["num_reused_tokens"]
    return {"total_s": total, "mean_ttft_s": statistics.fmean(firsts), "reused": reused, "outputs": batch.tokens}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the variants in turn; returns the report."""
    manifest = load_manifest(args.engine)
    session = load_session(args.engine, manifest)
    rng = np.random.default_rng(args.seed)
    run_once(session, make_prompts(rng, manifest.vocab_size, args)[:1], 2, True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    num_equal = 0
    for index in tqdm(range(args.num_runs), unit="run", disable=True if args.json else None):
        prompts = make_prompts(rng, manifest.vocab_size, args)
        for name in list(VARIANTS)[:: 1 if index % 2 == 0 else -1]:
            runs[name].append(run_once(session, prompts, args.output_tokens, VARIANTS[name]))
        ends = zip(*(runs[name][-1]["outputs"] for name in VARIANTS), strict=True)
        num_equal += sum(a == b for a, b in ends)
    rows = {
        name: {
            "total_s": statistics.median(run["total_s"] for run in of_variant),
            "mean_ttft_s": statistics.median(run["mean_ttft_s"] for run in of_variant),
            "reused_tokens": of_variant[0]["reused"],
            "runs_total_s": [run["total_s"] for run in of_variant],
        }
        for name, of_variant in runs.items()
    }
    ratios = [b / a for a, b in zip(rows["with"]["runs_total_s"], rows["without"]["runs_total_s"], strict=True)]
    model = manifest.model
    return {
        "model": f"{manifest.num_parameters / 1e6:.0f}M parameters, cut {model.cut} of {model.num_layers}",
        "workload": {name: getattr(args, name) for name in ("requests", "prefix", "suffix", "output_tokens")},
        "rows": rows,
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "equal_outputs": num_equal,
        "compared_outputs": args.num_runs * args.requests,
    }


def table(report: dict[str, Any]) -> str:
    """Return both rows and what the cache saved, as text."""
    lines = [
        f"{name + ' the cache':<18} {row['total_s']:>8.2f} s, mean TTFT {row['mean_ttft_s']:.2f} s, "
        f"{row['reused_tokens']} tokens reused"
        for name, row in report["rows"].items()
    ]
    equal = f"{report['equal_outputs']} of {report['compared_outputs']} outputs equal"
    return "\n".join([*lines, f"{report['speedup']:.2f} times as fast; {equal}"])


EXPERIMENT = Experiment(
    "perf.engine.prefix_cache", __doc__,
    options=(
        engine_place("--engine", "an engine directory", required=True), number("--requests", 32),
        number("--prefix", 1500, "tokens that all begin with (default 1500)"),
        number("--suffix", 50, "tokens of each one's own (default %(default)s)"), number("--output-tokens", 16),
        number("--num-runs", 5, "of each; medians are reported (default 5)"), seed(), output("OUTPUT.json"),
    ),
    measure=measure, shown=table, is_plain=True, is_dated=True,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
