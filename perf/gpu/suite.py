"""The tests that need a GPU (`tests/gpu`), with their outcome as a report.

    PYTHONPATH=. python -m perf.gpu.suite --json perf/results/suite-h200.json

`--device cpu --tiny` runs the operators' file, whose tests are then skipped.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

from perf.gpu.machine import begin_gpu_report, device_name, gpu_parser, parse_checked
from perf.harness.command import run_main
from perf.harness.engines import ROOT
from perf.harness.files import write_json
from perf.harness.options import option

OUTCOMES = ("failure", "error", "skipped")


def read_outcomes(file: Path) -> dict[str, list[str]]:
    """Return the names of tests by outcome, of a JUnit file."""
    found: dict[str, list[str]] = {name: [] for name in ("passed", *OUTCOMES)}
    for case in xml.parse(file).iter("testcase"):
        outcome = next((name for name in OUTCOMES if case.find(name) is not None), "passed")
        found[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    files = option("tests", nargs="*", default=["tests/gpu"], help="files (default: tests/gpu)")
    return parse_checked(gpu_parser(__doc__, "suite", "list of tests", files, has_work=False), arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; returns pytest's exit status."""
    options = parse_arguments(arguments)
    tests = ["tests/gpu/test_operators_cuda.py"] if options.tiny else options.tests
    with tempfile.TemporaryDirectory(prefix="kvforge-") as folder:
        junit = Path(folder) / "junit.xml"
        quiet = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", f"--junitxml={junit}"]
        status = subprocess.run([sys.executable, "-m", "pytest", *quiet, *tests], cwd=ROOT, check=False).returncode
        outcomes: dict[str, Any] = read_outcomes(junit) if junit.is_file() else {}
    counts = {name: len(tests) for name, tests in outcomes.items()}
    report = {
        **begin_gpu_report("perf.gpu.suite", arguments),
        "machine": device_name(options.device),
        "counts": counts,
        **{name: outcomes.get(name, []) for name in OUTCOMES[:2]},
    }
    if options.json:
        write_json(options.json, report)
    return status


if __name__ == "__main__":
    raise SystemExit(run_main(main))
