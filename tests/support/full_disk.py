"""A limit on the size of files, which stands for a full disk."""

import subprocess
import sys

_LIMITED = """
import resource, sys
from kvforge.cli import main
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(sys.argv[2:]))
"""


def run_with_file_limit(num_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a kvforge command in a process of its own, whose files may have `num_bytes` each. The process limits itself:
    `preexec_fn` forks, and gRPC's threads in the process that forks may then stand still for ever."""
    command = [sys.executable, "-c", _LIMITED, str(num_bytes), *arguments]
    return subprocess.run(command, capture_output=True, text=True)
