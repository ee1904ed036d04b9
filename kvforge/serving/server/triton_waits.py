"""Lets tritonserver wait where it loses requests and responses instead, by a library that is preloaded into it.

stub_waits.cpp: for a model's process that was paused or is short of CPU time; one of the two crashes otherwise.
http_waits.cpp: for its own threads of HTTP; an answer stops short or never ends otherwise.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvforge.common.cxx import cxx, find_cxx
from kvforge.serving.processes.run_dir import HUNG_AFTER_S
from kvforge.serving.stub.sender_pool import HUNG_S

logger = logging.getLogger("kvforge.serve")

SOURCES = tuple(Path(__file__).with_name(name) for name in ("stub_waits.cpp", "http_waits.cpp"))
HTTP_PATIENCE_S = HUNG_S - 2
"""A model's process that waits for longer with its response ends."""
PRELOAD = "LD_PRELOAD"
COMPILE_TIMEOUT_S = 60.0
_IS_HIDDEN = (sys.executable, "-I", "-S", "-c", f"import os; raise SystemExit({PRELOAD!r} in os.environ)")
"""Ends with 0 where the library was loaded, which hides itself. Where it cannot be, every program says so and goes on:
a folder that is mounted noexec or has a colon in its name, a compiler for another machine."""


def with_waits(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return `environment` for tritonserver, with a library that is compiled into `folder`; as it was where that fails,
    which is logged."""
    library = folder / "triton_waits.so"
    try:
        failure = _failure(library)
    except OSError as error:
        failure = f"{error.filename or 'a program'} cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired as error:
        failure = f"{error.cmd[0]} did not end in {error.timeout:.0f} s"
    if failure is None:
        others = [environment[PRELOAD]] if environment.get(PRELOAD) else []
        return {**environment, PRELOAD: ":".join([str(library), *others])}
    logger.warning("tritonserver may crash after a pause of a second, and lose responses over HTTP: %s", failure)
    return dict(environment)


def _failure(library: Path) -> str | None:
    """Compile `library`; return why it cannot be preloaded, or None."""
    if (path := find_cxx()) is None:
        return f"there is no {cxx()!r}"
    patience = (f"-DPATIENCE_S={HUNG_AFTER_S:.0f}", f"-DHTTP_PATIENCE_S={HTTP_PATIENCE_S:.0f}")
    compiled = _run(path, "-shared", "-fPIC", "-O1", *patience, "-o", str(library), *map(str, SOURCES), "-ldl")
    if compiled.returncode:
        said = compiled.stderr.decode(errors="replace").strip().splitlines()
        return f"{' and '.join(source.name for source in SOURCES)} did not compile ({(said or ['no message'])[-1]})"
    library.chmod(0o700)
    if _run(*_IS_HIDDEN, preload=str(library)).returncode:
        return f"{library}, which {path} made, cannot be preloaded"
    return None


def _run(*command: str, preload: str | None = None) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ if preload is None else {**os.environ, PRELOAD: preload}
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=COMPILE_TIMEOUT_S)
