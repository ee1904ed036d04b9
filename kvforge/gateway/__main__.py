"""`python -m kvforge.gateway --engine DIR --grpc HOST:PORT`: the gateway's process."""

import sys

from kvforge.common.errors import KvforgeError
from kvforge.gateway.http.server import run
from kvforge.gateway.model import sampling_defaults
from kvforge.gateway.options import parse_options
from kvforge.serving.processes.cleanup import remove_gateway_folder
from kvforge.serving.processes.watchdog import exit_with_parent


def main(argv: list[str]) -> int:
    try:
        options = parse_options(argv)
    except KvforgeError as error:
        print(f"kvforge: {error}", file=sys.stderr)
        return 1
    if options.exit_with_parent:
        exit_with_parent(lambda: remove_gateway_folder(options.state_file))

    def announce(url: str) -> None:
        print(f"kvforge: OpenAI API at {url}", flush=True)
        if not options.exit_with_parent:  # which says so itself
            print(f"kvforge: requests that do not say are sampled with {sampling_defaults(options)}", flush=True)

    try:
        run(options, announce)
    except KvforgeError as error:
        print(f"kvforge: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
