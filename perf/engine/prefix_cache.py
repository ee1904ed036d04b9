"""Measure what the prefix cache saves for requests that begin alike, with it and without it on one engine.

    python -m perf.engine.prefix_cache --engine DIR [--num-runs 5] [--output OUTPUT]

All requests arrive together: the first one computes the shared beginning and the others take it over from there. Runs
with and without the cache alternate, each with a new cache and prompts of its own; outputs must be the same.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvforge.manifest import load_manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.sessions.session import Session, load_session
from perf.harness.batch import Batch
from perf.harness.command import add_report, begin_dated_report, make_parser, positive, run_program

VARIANTS = {"with": True, "without": False}


def make_prompts(rng: np.random.Generator, vocab_size: int, args: argparse.Namespace) -> list[list[int]]:
    """Return random prompts with one common beginning."""
    prefix = rng.integers(3, vocab_size, args.prefix).tolist()
    return [prefix + rng.integers(3, vocab_size, args.suffix).tolist() for _ in range(args.requests)]


def run_once(session: Session, prompts: list[list[int]], output_tokens: int, use_cache: bool) -> dict[str, Any]:
    """Serve the prompts together; returns seconds, tokens taken from the cache, and the outputs."""
    engine = LLMEngine(session=session, enable_prefix_cache=use_cache, kv_cache_gib=2.0)
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    start = time.perf_counter()
    batch, firsts = Batch(engine, prompts, params), [0.0] * len(prompts)
    while engine.has_unfinished():
        batch.step()
        now = time.perf_counter() - start
        firsts = [first or (now if tokens else 0.0) for first, tokens in zip(firsts, batch.tokens, strict=True)]
    total = time.perf_counter() - start
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
        **begin_dated_report("perf.engine.prefix_cache"),
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


def main() -> int:
    """Parse the command line, measure, print and write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--engine", type=Path, required=True, help="an engine directory")
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument("--prefix", type=positive, default=1500, help="tokens that all begin with (default 1500)")
    parser.add_argument("--suffix", type=positive, default=50, help="tokens of each one's own (default %(default)s)")
    parser.add_argument("--output-tokens", type=positive, default=16)
    parser.add_argument("--num-runs", type=positive, default=5, help="of each; medians are reported (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    add_report(parser, "OUTPUT.json")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table)


if __name__ == "__main__":
    sys.exit(main())
