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
from perf.harness.command import make_parser, positive_float, run_main
from perf.harness.machine import describe_cpu

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
    parser = make_parser(__doc__)
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--list", action="store_true", help="print states and plan, and run nothing")
    doing.add_argument("--prepare", type=Path, metavar="FOLDER", help="write what a bare machine lacks, in pieces")
    doing.add_argument("--unpack", type=Path, metavar="PIECE", help="add a piece to --carried")
    doing.add_argument("--take", type=Path, metavar="ZIP", help="unpack a queue's results into --results")
    parser.add_argument("--minutes", type=positive_float, default=14.0, help="that are left (default %(default)g)")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in EXPERIMENTS], metavar="NAME", default=[])
    parser.add_argument("--again", action="store_true", help="run those that have a current result, too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="records and logs (default: %(default)s)")
    out = Path(os.environ.get("OUT") or Path(tempfile.gettempdir()) / "kvforge-quarter")
    parser.add_argument(
        "--out", type=Path, default=out, help="quarter.zip and what runs (default: $OUT, or %(default)s)"
    )
    parser.add_argument("--carried", type=Path, help="where --unpack has put what was brought along")
    parser.add_argument("--packages", type=Path, metavar="ZIP", help="compiled graphs of an earlier run's --out")
    parser.add_argument(
        "--piece-mib", type=positive_float, help="size of a piece (default: what the tree leaves of 64)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="with --device cpu: the form that tests run")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


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
