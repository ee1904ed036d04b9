"""`kvforge serve` with an engine process that computes nothing: the arguments are those of the command, and some waits.

`python -m tests.support.serving.fake_serve ENGINE OPTIONS...`. Triton, its models, the gateway and whoever watches them
are the real ones.
"""

import argparse
import sys
from functools import partial

from kvforge.cli import main
from kvforge.serving.server import drain, launcher
from tests.support.serving.fake_server import fake_command


def parser() -> argparse.ArgumentParser:
    """What the command itself does not take: arguments of the engine's process, and when a stub is given up."""
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--step-s")
    found.add_argument("--floor-s")
    found.add_argument("--gate")
    found.add_argument("--hung-after-s", type=float, default=launcher.HUNG_AFTER_S)
    return found


if __name__ == "__main__":
    own, arguments = parser().parse_known_args()
    launcher.HUNG_AFTER_S = drain.HUNG_AFTER_S = own.hung_after_s
    given = {"--step-s": own.step_s, "--floor-s": own.floor_s, "--gate": own.gate}
    words = [word for name, value in given.items() if value is not None for word in (name, value)]
    launcher.process_command = partial(fake_command, more=words)
    sys.exit(main(["serve", *arguments]))
