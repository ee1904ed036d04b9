"""Running the agents: an interpreter that has their packages, and what they report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("KVFORGE_AGENTS_PYTHON")
REASON = "needs the agents' packages; set KVFORGE_AGENTS_PYTHON to the python of an environment that has them"
PROGRAMS = {"openai_agents": 4, "langchain_agent": 4, "mcp_agent": 1}
"""Each with how many conversations it has: one for each of its ways to the server."""
ROOT = Path(__file__).resolve().parents[4]


def run_agent(program: str, url: str, mode: str, timeout_s: float = 240) -> dict[str, Any]:
    """What the program reports. AssertionError with its last words where it fails."""
    assert PYTHON is not None
    command = [PYTHON, "-m", f"tests.support.clients.agents.{program}", f"{url}/v1", mode]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    sys.stdout.write(done.stdout)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said
