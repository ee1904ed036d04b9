"""Two checkouts of kvforge run the same engine, offline and by turns.

    python -m perf.engine.versions ENGINE --against CHECKOUT [--only chat] [--turns 6] [--output FILE]

Both stay loaded, each in a process of its own; who goes first changes from turn to turn. Prints the ratio of the rates,
and of the seconds from the first tokens to the last, of each workload. The engine is one that both can load.
"""

import argparse
import statistics
import sys
from typing import Any

from kvforge.bench.workload import load_workloads
from perf.harness.engines import ROOT
from perf.harness.experiment import CHOSEN_WORKLOADS, Experiment, engine_place, number, output, place
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
    return {"rows": rows}


EXPERIMENT = Experiment(
    "perf.engine.versions", __doc__,
    options=(
        engine_place("engine", "an engine that both checkouts can load"),
        place("--against", "the other checkout, whose code is 'before'", required=True), CHOSEN_WORKLOADS,
        number("--turns", 6), output("OUTPUT.json"),
    ),
    measure=measure,
    columns=(
        ("now / before", "workload", "<14"), ("tok/s", "rate_ratio", ">8.3f"), ("decode", "decode_ratio", ">8.3f"),
        ("  tok/s of each turn", lambda row: "  " + " ".join(f"{ratio:.3f}" for ratio in row["ratios"]["rate"])),
    ),
    is_plain=True,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
