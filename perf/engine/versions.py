"""Two checkouts of kvforge run the same engine, offline and by turns.

    python -m perf.engine.versions ENGINE --against CHECKOUT [--only chat] [--turns 6] [--output FILE]

Both stay loaded, each in a process of its own; who goes first changes from turn to turn. Prints the ratio of the rates,
and of the seconds from the first tokens to the last, of each workload. The engine is one that both can load.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from kvforge.bench.workload import load_workloads
from perf.harness.command import add_report, begin_report, make_parser, positive, run_program
from perf.harness.engines import ROOT, WORKLOADS
from perf.peers.client import Worker


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Alternate both sides ``turns`` times on each workload; returns the report."""
    command = [sys.executable, "-m", "perf.peers.kvforge_worker", str(args.engine.resolve())]
    workloads = load_workloads(args.workloads, args.only)
    sides: dict[str, Worker] = {}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {w.name: {"before": [], "now": []} for w in workloads}
    try:
        for name, checkout in (("before", args.against.resolve()), ("now", ROOT)):
            sides[name] = Worker(name, command, checkout)
        for turn in range(args.turns):
            for workload in workloads:
                for name in sorted(sides, reverse=bool(turn % 2)):
                    runs[workload.name][name].append(sides[name].run(workload, turn))
    finally:
        for worker in sides.values():
            worker.close()
    rows = []
    for workload in workloads:
        pairs = list(zip(*runs[workload.name].values(), strict=True))
        ratios = {
            "rate": [before["total_s"] / now["total_s"] for before, now in pairs],
            "decode": [before["decode_s"] / now["decode_s"] for before, now in pairs],
        }
        medians = {f"{name}_ratio": statistics.median(values) for name, values in ratios.items()}
        rows.append({"workload": workload.name, **medians, "ratios": ratios, "runs": runs[workload.name]})
    return {**begin_report("perf.engine.versions"), "rows": rows}


def table(report: dict[str, Any]) -> str:
    """The report for a reader."""
    lines = [f"{'now / before':<14} {'tok/s':>8} {'decode':>8}   tok/s of each turn"]
    for row in report["rows"]:
        turns = " ".join(f"{ratio:.3f}" for ratio in row["ratios"]["rate"])
        lines.append(f"{row['workload']:<14} {row['rate_ratio']:>8.3f} {row['decode_ratio']:>8.3f}   {turns}")
    return "\n".join(lines)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("engine", type=Path, help="an engine that both checkouts can load")
    parser.add_argument("--against", type=Path, required=True, help="the other checkout, whose code is 'before'")
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="JSON file (default: perf/workloads.json)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this workload; may be given several times")
    parser.add_argument("--turns", type=positive, default=6)
    add_report(parser, "OUTPUT.json")
    args = parser.parse_args()
    return run_program(args, lambda: measure(args), table)


if __name__ == "__main__":
    sys.exit(main())
