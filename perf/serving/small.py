"""Both load generators at small size on the demo's tiny models: perf_analyzer over gRPC, AIPerf over HTTP.

    python -m perf.serving.small [--output-dir DIR]

Takes 5 to 8 minutes on two cores, and once some more to fetch the tools and build the engines.
"""

from dataclasses import replace

from perf.harness.command import make_parser
from perf.harness.options import place
from perf.serving import run_aiperf, run_perf_analyzer

COMMON = "--min-requests 24 --waves 2 --stream-interval 1 8".split()
PERF_ANALYZER = [*"--concurrency 1 4 16 32 --request-rate 4 --input-tokens 512".split(), *COMMON]
AIPERF = [*"--concurrency 4 16 --input-tokens 256".split(), *COMMON]


def main() -> int:
    """Run both, whatever becomes of the first, which fails where a request is not answered in full."""
    told = "write serving-perf-analyzer.* and serving-aiperf.* here"
    folder = make_parser(__doc__, place("--output-dir", told)).parse_args().output_dir
    incomplete = lambda report: any(row["num_incomplete"] for row in report["rows"])  # noqa: E731
    both = (
        ("serving-perf-analyzer", replace(run_perf_analyzer.EXPERIMENT, failed=incomplete), PERF_ANALYZER),
        ("serving-aiperf", run_aiperf.EXPERIMENT, AIPERF),
    )
    return max([one.run([*given, *(["--output", str(folder / name)] if folder else [])]) for name, one, given in both])


if __name__ == "__main__":
    raise SystemExit(main())
