"""Simulate the scheduler at scale: its real plans and pages in virtual time, with step costs fitted to real engines.

    python -m perf.simulation.simulate --fit "no cut=ENGINE" --output COSTS.json        fit an engine's step prices
    python -m perf.simulation.simulate --validate "no cut=ENGINE" [--costs COSTS.json]  the same, simulated and served
                                       [--workloads lengths|rates]                      whole curves
    python -m perf.simulation.simulate --experiment lengths|rates|bursts|budgets|memory [--output RESULT]
    python -m perf.simulation.simulate --rate 0.5 --burstiness 0.25 [--requests 10000]  one simulation per variant

Results follow from --seed, but for the processor time of the scheduler itself. Experiments and curves write RESULT.json
and RESULT.svg. docs/simulation.md says what the numbers mean.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.figures import check_figure
from perf.harness.command import command_line, run_main
from perf.harness.command import make_parser as harness_parser
from perf.harness.files import write_report
from perf.harness.machine import describe_machine
from perf.harness.options import flag, one_of, option, place, seed
from perf.simulation.cost_model import load_costs, save_costs
from perf.simulation.experiments import EXPERIMENTS, Setting, run_points
from perf.simulation.plots import CURVES, PLOTS
from perf.simulation.simulator import Limits
from perf.simulation.tables import fit_table, points_table, validation_table
from perf.simulation.workloads import KINDS, workloads

COSTS = Path(__file__).parents[1] / "results" / "simulation-costs.json"


def named_engine(entry: str) -> tuple[str, Path]:
    """(name, directory) of ``[NAME=]DIR``."""
    name, is_named, directory = entry.partition("=")
    return (name, Path(directory)) if is_named else (Path(entry).name, Path(entry))


def load_engine(directory: Path, args: argparse.Namespace) -> Any:
    """Return the engine to measure."""
    from kvforge.runtime.engine import LLMEngine

    return LLMEngine(directory, enable_prefix_cache=False, kv_cache_gib=min(args.kv_cache_gib, 1.0))


def fit(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Fit an engine's step costs into ``--output``; returns the report and its table."""
    from perf.simulation.measure import fit_engine

    if args.output is None:
        raise KvforgeError("--fit writes its prices; say where with --output COSTS.json.")
    name, directory = named_engine(args.fit)
    model, report = fit_engine(load_engine(directory, args), args.seed)
    steps = report.pop("steps")
    report = {"machine": describe_machine(), **report}
    save_costs({name: model}, args.output, {name: report})
    return {"variant": name, "prices": model.prices, **report, "steps": steps}, fit_table(name, model, report)


def validate(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Serve and simulate the same workloads; returns the report and its table."""
    from perf.simulation.validation import validate as compare

    name, directory = named_engine(args.validate)
    costs = load_costs(args.costs)
    if name not in costs:
        raise KvforgeError(f"{args.costs} has no costs of {name!r}; it has {', '.join(costs)}.")
    if args.output and args.workloads in CURVES:
        check_figure(args.output.with_suffix(".svg"))
    compared = compare(load_engine(directory, args), costs[name], workloads(args.workloads, costs), args.seed)
    rows = [{"variant": name, **row} for row in compared]
    report: dict[str, Any] = {
        "command": command_line("perf.simulation.simulate"),
        "machine": describe_machine(),
        "rows": rows,
    }
    if args.output:
        path = args.output.with_suffix(".json")
        old = json.loads(path.read_text())["rows"] if path.exists() else []
        report["rows"] = [row for row in old if row["variant"] != name] + rows
        write_report(args.output, report)
        if args.workloads in CURVES:
            CURVES[args.workloads](report["rows"], args.output.with_suffix(".svg"))
    return report, validation_table(report["rows"])


def experiment(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Simulate the points of an experiment, or one per variant; returns the report and its table."""
    costs = load_costs(args.costs)
    unknown = set(args.variant or costs) - set(costs)
    if unknown:
        raise KvforgeError(f"{args.costs} has no costs of {sorted(unknown)[0]!r}; it has {', '.join(costs)}.")
    if args.jobs is not None and args.jobs < 1:
        raise KvforgeError(f"--jobs is {args.jobs}; give at least 1.")
    if args.output and args.experiment:
        check_figure(args.output.with_suffix(".svg"))
    limits = Limits(args.max_num_tokens, args.max_num_seqs, args.kv_cache_gib * 2**30)
    chosen = {name: costs[name] for name in args.variant or costs}
    setting = Setting(chosen, args.requests, args.input_tokens, args.output_tokens, limits, args.seed)
    if args.experiment:
        points = EXPERIMENTS[args.experiment](setting)
    else:
        traffic = {"rate": args.rate, "burstiness": args.burstiness}
        points = [setting.point(name, **traffic) for name in setting.costs]
    rows = run_points(points, args.jobs, progress=not args.json)
    report = {"command": command_line("perf.simulation.simulate"), "seed": args.seed, "rows": rows}
    if args.output:
        write_report(args.output, report)
        if args.experiment:
            PLOTS[args.experiment](rows, args.output.with_suffix(".svg"))
    return report, points_table(rows)


def make_parser() -> argparse.ArgumentParser:
    return harness_parser(
        __doc__,
        one_of(
            option("--fit", metavar="[NAME=]ENGINE", help="measure an engine's steps and fit their prices"),
            option("--validate", metavar="[NAME=]ENGINE", help="serve small workloads and simulate them too"),
            option("--experiment", choices=tuple(EXPERIMENTS), help="default: one simulation per variant"),
        ),
        option("--workloads", choices=KINDS, default="small", help="of --validate (default: %(default)s)"),
        place("--costs", "what --fit wrote (default: %(default)s)", default=COSTS),
        option("--variant", action="append", help="of --costs; may be given several times (default: all)"),
        option("--requests", type=int, default=10_000, help="default %(default)s"),
        option("--input-tokens", type=int, default=2000, help="default %(default)s"),
        option("--output-tokens", type=int, default=256, help="default %(default)s"),
        option("--rate", type=float, default=0.0, help="requests a second; 0: all at once (default)"),
        option("--burstiness", type=float, default=1.0, help="1: Poisson (default), less: in bursts"),
        option("--max-num-tokens", type=int, default=2048, help="of a step (default %(default)s)"),
        option("--max-num-seqs", type=int, default=256, help="of a step (default %(default)s)"),
        option("--kv-cache-gib", type=float, default=4.0, help="the pool (default %(default)s)"), seed(),
        option("--jobs", type=int, help="simulations side by side (default: one a core)"),
        flag("--json", "print the report as JSON"),
        place("--output", "--fit: COSTS.json; else RESULT for RESULT.json and RESULT.svg"),
    )  # fmt: skip


def main() -> int:
    args = make_parser().parse_args()

    def run() -> None:
        if args.seed < 0:
            raise KvforgeError(f"--seed is {args.seed}; give 0 or more.")
        report, table = (fit if args.fit else validate if args.validate else experiment)(args)
        print(json.dumps(report, indent=1) if args.json else table)

    return run_main(run)


if __name__ == "__main__":
    raise SystemExit(main())
