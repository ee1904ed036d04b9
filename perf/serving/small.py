"""Both load generators at small size on the demo's tiny models: perf_analyzer over gRPC, AIPerf over HTTP.

    python -m perf.serving.small [--output-dir DIR]

Takes 3 to 5 minutes on two cores, and once some more to fetch the tools and build the engines.
"""

import argparse
import sys
from pathlib import Path

from kvforge.errors import KvforgeError
from kvforge.figures import check_figure
from perf.harness.files import write_report
from perf.serving import run_aiperf, run_perf_analyzer
from perf.serving.load.sweep import plot

PERF_ANALYZER = "--concurrency 1 4 16 32 --request-rate 4 --min-requests 24 --waves 2 --input-tokens 512".split()
AIPERF = "--concurrency 4 16 --min-requests 24 --waves 2 --input-tokens 256".split()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run both load generators at small size.")
    parser.add_argument("--output-dir", type=Path, help="write serving-perf-analyzer.* and serving-aiperf.* here")
    args = parser.parse_args()
    folder = args.output_dir
    try:
        if folder:
            check_figure(folder / "serving-perf-analyzer.svg")
        sweep = run_perf_analyzer.run(PERF_ANALYZER)
        print(run_perf_analyzer.report_markdown(sweep), flush=True)
        http = run_aiperf.run(AIPERF)
        print(run_aiperf.markdown(http))
        if folder:
            write_report(folder / "serving-perf-analyzer", sweep, run_perf_analyzer.report_markdown(sweep))
            write_report(folder / "serving-aiperf", http, run_aiperf.markdown(http))
            plot(sweep["rows"], folder / "serving-perf-analyzer.svg")
    except KvforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if not any(row["num_incomplete"] for row in sweep["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
