"""Finds a Triton Inference Server: `tritonserver` on PATH, else the one in the nvidia-pytriton wheel."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.errors import KvforgeError, MissingToolError
from kvforge.common.extras import how_to_install
from kvforge.serving.processes.facts import STUB

HOW_TO_GET_ONE = f"install it with {how_to_install('serve')}, or put tritonserver on PATH"


@dataclass(frozen=True)
class TritonInstall:
    """Where a server lies. `backends` and `stub` are None for an installed server, which brings its own."""

    binary: Path
    library_dirs: tuple[Path, ...] = ()
    backends: Path | None = None
    stub: Path | None = None

    def make_backend_dir(self, target: Path) -> Path | None:
        """Put the Python backend and the stub of this Python version under `target`; None when not needed. Raises
        KvforgeError where nothing there may be executed."""
        if self.backends is None or self.stub is None:
            return None
        shutil.copytree(self.backends / "python", target / "python", ignore=shutil.ignore_patterns("__pycache__"))
        stub = Path(shutil.copy2(self.stub, target / "python" / STUB))
        if not os.access(stub, os.X_OK):
            raise KvforgeError(
                f"{target.parent.parent} is mounted noexec, so that no program there runs: set TMPDIR to another folder"
            )
        return target

    def environment(self) -> dict[str, str]:
        """The environment to start the server in: its libraries, and this Python and its packages for stubs."""
        environment = dict(os.environ)
        paths = [str(path) for path in (*self.library_dirs, *_python_library_dirs())]
        paths += [path for path in [environment.get("LD_LIBRARY_PATH")] if path]
        environment["LD_LIBRARY_PATH"] = ":".join(paths)
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
        environment["PYTHONPATH"] = ":".join(path for path in sys.path if path)
        return environment


def find_triton() -> TritonInstall:
    """Raises MissingToolError when there is no server, or none that can load this Python."""
    on_path = shutil.which("tritonserver")
    if on_path:
        return TritonInstall(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise MissingToolError(f"no Triton Inference Server found: {HOW_TO_GET_ONE}")
    root = Path(spec.submodule_search_locations[0])
    server = root / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / STUB
    if not (server / "bin" / "tritonserver").is_file() or not stub.is_file():
        raise MissingToolError(f"nvidia-pytriton in {root} has no server for Python {version}: {HOW_TO_GET_ONE}")
    numpy = importlib.metadata.version("numpy")
    if int(numpy.partition(".")[0]) >= 2:
        raise MissingToolError(
            f"NumPy {numpy} crashes the Python backend of nvidia-pytriton's tritonserver: pip install 'numpy<2', or "
            "put another tritonserver on PATH"
        )
    libraries = root.parent / "nvidia_pytriton.libs"
    return TritonInstall(server / "bin" / "tritonserver", (libraries,), server / "backends", stub)


def _python_library_dirs() -> list[Path]:
    """Where this Python's shared library is; the stub loads it by name."""
    directory, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if directory and name and (Path(directory) / name).is_file():
        return [Path(directory)]
    return []
