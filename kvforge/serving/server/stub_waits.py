"""Keeps tritonserver from taking a request back from a model's process that was paused or is short of CPU time.

Triton's Python backend does so after a second, and one of the two processes crashes (stub_waits.cpp).
"""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvforge.common.cxx import cxx, find_cxx
from kvforge.serving.processes.run_dir import HUNG_AFTER_S

logger = logging.getLogger("kvforge.serve")

SOURCE = Path(__file__).with_name("stub_waits.cpp")
PRELOAD = "LD_PRELOAD"
COMPILE_TIMEOUT_S = 60.0
_IS_HIDDEN = (sys.executable, "-I", "-S", "-c", f"import os; raise SystemExit({PRELOAD!r} in os.environ)")
"""Ends with 0 where the library was loaded, which hides itself. Where it cannot be, every program says so and goes on:
a folder that is mounted noexec or has a colon in its name, a compiler for another machine."""


def with_stub_waits(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return `environment` for tritonserver, with a library that is compiled into `folder`; as it was where that fails,
    which is logged."""
    library = folder / "stub_waits.so"
    try:
        failure = _failure(library)
    except OSError as error:
        failure = f"{error.filename or 'a program'} cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired as error:
        failure = f"{error.cmd[0]} did not end in {error.timeout:.0f} s"
    if failure is None:
        others = [environment[PRELOAD]] if environment.get(PRELOAD) else []
        return {**environment, PRELOAD: ":".join([str(library), *others])}
    logger.warning("tritonserver may crash after a pause of a second: %s", failure)
    return dict(environment)


def _failure(library: Path) -> str | None:
    """Compile `library`; return why it cannot be preloaded, or None."""
    if (path := find_cxx()) is None:
        return f"there is no {cxx()!r}"
    patience = f"-DPATIENCE_S={HUNG_AFTER_S:.0f}"
    compiled = _run(path, "-shared", "-fPIC", "-O1", patience, "-o", str(library), str(SOURCE), "-ldl")
    if compiled.returncode:
        said = compiled.stderr.decode(errors="replace").strip().splitlines()
        return f"{SOURCE.name} did not compile ({(said or ['no message'])[-1]})"
    library.chmod(0o700)
    if _run(*_IS_HIDDEN, preload=str(library)).returncode:
        return f"{library}, which {path} made, cannot be preloaded"
    return None


def _run(*command: str, preload: str | None = None) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ if preload is None else {**os.environ, PRELOAD: preload}
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S)
