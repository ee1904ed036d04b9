"""A quarter of an hour on a GPU: runs the experiments that have no current result, the most valuable first.

    python -m perf.gpu.quarter --list                      # what has a result, and what 14 minutes would hold
    python -m perf.gpu.quarter --prepare runs/carry        # without a GPU: what a bare machine lacks, in pieces
    python -m perf.gpu.quarter --unpack runs/carry/piece-1 --carried /tmp/carried     # there, piece by piece
    python -m perf.gpu.quarter --minutes 9 --carried /tmp/carried --out $OUT          # there
    python -m perf.gpu.quarter --take quarter.zip          # here again: results to perf/results/gpu

OUT/packages.zip has the compiled graphs; a second run on the same day begins with `--packages packages.zip`.

Each experiment of ``perf/gpu/queue/experiments.py`` is a process with a limit of its own. Its record and its log are on
disk the moment it ends, also as one file, OUT/quarter.zip; what a killed one printed is in OUT/running.log. Nothing
begins that the remaining minutes cannot hold. `--device cpu --tiny` runs a small form of each experiment on a CPU; its
records say nothing about speed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvforge.common.errors import KvforgeError
from perf.gpu.carry.contents import prepare, tree_bytes
from perf.gpu.carry.pieces import add_piece
from perf.gpu.queue.bundle import take_bundle
from perf.gpu.queue.experiment import Experiment
from perf.gpu.queue.experiments import EXPERIMENTS
from perf.gpu.queue.packages import restore_packages
from perf.gpu.queue.plan import plan, plan_table
from perf.gpu.queue.results import RESULTS
from perf.gpu.queue.running import run_queue
from perf.harness.command import make_parser, run_main
from perf.harness.machine import describe_cpu
from perf.harness.options import flag, one_of, option, place, positive_float

LENT_BYTES = 64 << 20
"""What a call takes along to a machine that is lent, the working tree included."""


def gpu_name() -> str | None:
    """Return the GPU's name and driver; None where there is not one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def make_arguments() -> argparse.ArgumentParser:
    """Return the parser."""
    out = Path(os.environ.get("OUT") or Path(tempfile.gettempdir()) / "kvforge-quarter")
    return make_parser(
        __doc__,
        one_of(
            flag("--list", "print states and plan, and run nothing"),
            place("--prepare", "write what a bare machine lacks, in pieces", metavar="FOLDER"),
            place("--unpack", "add a piece to --carried", metavar="PIECE"),
            place("--take", "unpack a queue's results into --results", metavar="ZIP"),
        ),
        option("--minutes", type=positive_float, default=14.0, help="that are left (default %(default)g)"),
        option("--only", nargs="+", choices=[one.name for one in EXPERIMENTS], metavar="NAME", default=[]),
        flag("--again", "run those that have a current result, too"),
        place("--results", "records and logs (default: %(default)s)", default=RESULTS),
        place("--out", "quarter.zip and what runs (default: $OUT, or %(default)s)", default=out),
        place("--carried", "where --unpack has put what was brought along"),
        place("--packages", "compiled graphs of an earlier run's --out", metavar="ZIP"),
        option("--piece-mib", type=positive_float, help="size of a piece (default: what the tree leaves of 64)"),
        option("--device", choices=("cuda", "cpu"), default="cuda"),
        flag("--tiny", "with --device cpu: the form that tests run"), flag("--json", "print the list as JSON"),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """List, prepare, unpack, take or run; returns 1 where an experiment failed."""
    parser = make_arguments()
    args = parser.parse_args(arguments)
    chosen = [one for one in EXPERIMENTS if not args.only or one.name in args.only]
    if (args.device == "cpu") != args.tiny:
        parser.error("--device cpu and --tiny go together")
    if args.unpack is not None and args.carried is None:
        parser.error("--unpack needs --carried, the folder that the experiments are given later")
    if args.prepare is not None:
        size = int(args.piece_mib * (1 << 20)) if args.piece_mib else LENT_BYTES - tree_bytes()
        prepare([name for one in chosen for name in one.carried], args.prepare, size)
    elif args.unpack is not None:
        print(" ".join(add_piece(args.unpack, args.carried)) or "kept, until the other pieces come")
    elif args.take is not None:
        print("\n".join(take_bundle(args.take, args.results)))
    elif args.list:
        show_list(args, chosen)
    else:
        return run(args, chosen)
    return 0


def show_list(args: argparse.Namespace, chosen: list[Experiment]) -> None:
    """Print states and plan."""
    planned = plan(chosen, 60 * args.minutes, args.results, args.carried, args.again, carry_later=args.carried is None)
    if args.json:
        rows = [
            {"name": one.experiment.name, "state": one.state.kind, "start_s": one.start_s, "why": one.why}
            for one in planned
        ]
        print(json.dumps(rows, indent=1))
    else:
        print(plan_table(planned, args.results))


def run(args: argparse.Namespace, chosen: list[Experiment]) -> int:
    """Run what the time holds and print a table; returns 1 where an experiment failed."""
    if args.tiny and args.results == RESULTS:
        raise KvforgeError("tiny forms say nothing about a GPU; give --results another folder than the committed one.")
    if not args.tiny and gpu_name() is None:
        raise KvforgeError("nvidia-smi names no GPU here; --list shows the plan, --device cpu --tiny small forms.")
    if args.packages is not None:
        restore_packages(args.packages, Path(tempfile.gettempdir()))
    known = args.carried if not args.tiny else None
    planned = plan(chosen, 60 * args.minutes, args.results, known, args.again, carry_later=args.tiny)
    left_out = [one for one in planned if one.start_s is None and one.why != "has a result"]
    for one in left_out:
        print(f"{one.experiment.name}: {one.why}", flush=True)
    begun = [one.experiment for one in planned if one.start_s is not None]
    records = run_queue(
        begun, 60 * args.minutes, args.out, args.results, gpu_name() or describe_cpu(), args.tiny, args.carried
    )
    print(plan_table(plan(chosen, math.inf, args.results, known, carry_later=args.tiny), args.results))
    return int(any(record["exit"] != 0 for record in records))


if __name__ == "__main__":
    sys.exit(run_main(main))
