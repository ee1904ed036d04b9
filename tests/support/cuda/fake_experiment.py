"""An experiment for tests of the queue: says, reports, sleeps and exits as it is told, in this order."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mark", type=Path)
    parser.add_argument("--start", type=Path, help="start a process that sleeps, and write its id there")
    parser.add_argument("--say", default="begins")
    parser.add_argument("--report", type=int, default=0)
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--sleep", type=float, default=0)
    parser.add_argument("--exit", type=int, default=0)
    args = parser.parse_args()
    print(args.say)
    if args.mark:
        args.mark.write_text(str(os.getpid()))
    if args.start:
        args.start.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    if not args.no_report:
        args.json.write_text(json.dumps({"value": args.report}))
    time.sleep(args.sleep)
    return args.exit


if __name__ == "__main__":
    sys.exit(main())
