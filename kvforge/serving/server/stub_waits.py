"""Keeps tritonserver from taking a request back from a model's process that was paused or is short of CPU time.

Triton's Python backend does so after a second, and one of the two processes crashes (stub_waits.cpp).
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kvforge.serving.processes.run_dir import HUNG_AFTER_S

logger = logging.getLogger("kvforge.serve")

SOURCE = Path(__file__).with_name("stub_waits.cpp")
PRELOAD = "LD_PRELOAD"


def with_stub_waits(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return `environment` for tritonserver, with a library that is compiled into `folder`; as it was where that fails,
    which is logged."""
    compiler = os.environ.get("CXX") or "g++"
    library = folder / "stub_waits.so"
    failure = f"there is no {compiler!r}"
    if path := shutil.which(compiler):
        patience = f"-DPATIENCE_S={HUNG_AFTER_S:.0f}"
        command = [path, "-shared", "-fPIC", "-O1", patience, "-o", str(library), str(SOURCE), "-ldl"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if not result.returncode:
            others = [environment[PRELOAD]] if environment.get(PRELOAD) else []
            return {**environment, PRELOAD: ":".join([str(library), *others])}
        failure = f"{SOURCE.name} did not compile ({(result.stderr.strip().splitlines() or ['no message'])[-1]})"
    logger.warning("tritonserver may crash after a pause of a second: %s", failure)
    return dict(environment)
