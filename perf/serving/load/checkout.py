"""`kvforge serve` with the code of a checkout, on free ports, for as long as a `with` block."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.errors import KvforgeError

PORTS = ("http", "grpc", "metrics", "health")


@dataclass(frozen=True)
class Served:
    """Where a server answers, and its process. ``openai`` is the gateway's URL with /v1, "" without one."""

    http: str
    grpc: str
    openai: str
    pid: int


@contextmanager
def serving(checkout: Path, engine: Path, *options: str) -> Iterator[Served]:
    """Give the server when it says that it serves. Raises KvforgeError when it does not start."""
    command = [sys.executable, "-m", "kvforge", "serve", str(engine), *options]
    command += [word for name in PORTS for word in (f"--{name}-port", "0")]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while "gRPC " not in said and (line := process.stdout.readline()):
                said += line
            if (found := re.search(r"HTTP (http://[\d.]+:\d+)\b.*gRPC ([\d.]+:\d+)", said, re.DOTALL)) is None:
                raise KvforgeError(f"the server of {checkout} did not start; start it by hand to see why.")
            gateway = re.search(r"OpenAI (http://\S+)", said)
            yield Served(found[1], found[2], "" if gateway is None else gateway[1], process.pid)
        finally:
            process.terminate()
