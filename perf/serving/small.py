"""Both load generators at small size on the demo's tiny models: perf_analyzer over gRPC, AIPerf over HTTP.

    python -m perf.serving.small [--output-dir DIR]

Takes 5 to 8 minutes on two cores, and once some more to fetch the tools and build the engines.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from perf.harness.command import Report, make_parser, run_program
from perf.serving import run_aiperf, run_perf_analyzer

COMMON = "--min-requests 24 --waves 2 --stream-interval 1 8".split()
PERF_ANALYZER = [*"--concurrency 1 4 16 32 --request-rate 4 --input-tokens 512".split(), *COMMON]
AIPERF = [*"--concurrency 4 16 --input-tokens 256".split(), *COMMON]


def is_incomplete(report: Report) -> bool:
    """A request of a sweep was not answered in full."""
    return any(row["num_incomplete"] for row in report["rows"])


def main() -> int:
    """Run both, whatever becomes of the first one."""
    parser = make_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, help="write serving-perf-analyzer.* and serving-aiperf.* here")
    folder = parser.parse_args().output_dir

    def run(program: ModuleType, name: str, given: list[str], show: Callable[[Report], str], **more: Any) -> int:
        args = program.parser().parse_args([*given, *(["--output", str(folder / name)] if folder else [])])
        return run_program(args, lambda: program.run(args, given), show, markdown=True, **more)

    analyzer, aiperf = run_perf_analyzer, run_aiperf
    shown = {"plot": analyzer.draw, "failed": is_incomplete}
    status = run(analyzer, "serving-perf-analyzer", PERF_ANALYZER, analyzer.report_markdown, **shown)
    return max(status, run(aiperf, "serving-aiperf", AIPERF, aiperf.markdown))


if __name__ == "__main__":
    sys.exit(main())
