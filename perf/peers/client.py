"""The comparison's side of a worker process."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvforge.bench.workload import Workload
from kvforge.common.errors import KvforgeError
from perf.harness.engines import ROOT


class Worker:
    """A system in a process of its own, which runs the code of ``checkout``: loaded once, it runs workloads when asked
    and sleeps in between.

    Raises:
        KvforgeError: it cannot be started, ends, or answers with an error.
    """

    def __init__(self, name: str, command: list[str], checkout: Path = ROOT) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(checkout), "TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=checkout, env=environment, text=True
            )
        except OSError as error:
            raise KvforgeError(f"{name} cannot be started: {command[0]}: {error.strerror}.") from None
        try:
            self._answer()
        except KvforgeError:
            self.close()
            raise

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """Return the fields of ``PhaseTimes`` of one run."""
        asked = {**asdict(workload), "seed": seed}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise KvforgeError(f"{self.name} has ended; see its last words above.") from None
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            self._process.kill()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KvforgeError(f"{self.name} has ended; see its last words above.")
        answer = json.loads(line)
        if "error" in answer:
            raise KvforgeError(f"{self.name} failed: {answer['error']}.")
        return answer
