"""NVIDIA's real TensorRT Python API in this process, on a machine without a GPU and without TensorRT.

The bindings and the lean runtime are two packages of the `dev` extra; the libraries of the builder and the ONNX
parser are stood in for by `tensorrt_shim.cpp`. That is enough to register plugins and to ask them everything the
builder asks; it builds no engine. Where TensorRT itself is installed, that is used.
"""

import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from kvforge.common.cxx import find_cxx
from plugins.build import cache_dir

SHIM = Path(__file__).with_name("tensorrt_shim.cpp")
STANDS_FOR = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
BINDINGS, LEAN = "tensorrt_bindings", "tensorrt_lean_libs"


class UnavailableError(Exception):
    """The message says what this machine lacks."""


def load() -> ModuleType:
    """Return the module `tensorrt`, importable under that name from now on, with `tensorrt.plugin`.

    Raises UnavailableError.
    """
    if "tensorrt" not in sys.modules and importlib.util.find_spec("tensorrt") is None:
        _load_shims()
        bindings = importlib.import_module(BINDINGS)
        sys.modules["tensorrt"] = bindings
    importlib.import_module("tensorrt.plugin")
    return sys.modules["tensorrt"]


def unload() -> None:
    """Make `import tensorrt` behave as before `load`; what was registered stays in the process."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
        del sys.modules[name]


def _load_shims() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UnavailableError("TensorRT's bindings are tested on linux x86_64 only")
    for module in (BINDINGS, LEAN):
        if importlib.util.find_spec(module) is None:
            raise UnavailableError(f'no package {module}; pip install "kvforge[dev]" has it')
    spec = importlib.util.find_spec(LEAN)
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    major = importlib.metadata.version("tensorrt-lean-cu13-libs").split(".")[0]
    lean = folder / f"libnvinfer_lean.so.{major}"
    # A library of the same soname that is in the process is taken for the one that the bindings ask for.
    ctypes.CDLL(str(lean), ctypes.RTLD_GLOBAL)
    for name in STANDS_FOR:
        ctypes.CDLL(str(_shim(f"lib{name}.so.{major}", lean)), ctypes.RTLD_GLOBAL)


def _shim(soname: str, lean: Path) -> Path:
    compiler = find_cxx()
    if compiler is None:
        raise UnavailableError("no g++ to compile the stand-in for TensorRT's builder library")
    key = hashlib.sha256(SHIM.read_bytes() + str(lean).encode() + compiler.encode()).hexdigest()[:16]
    folder = cache_dir() / f"tensorrt-contract-{key}"
    library = folder / soname
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            output = Path(scratch) / soname
            command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{soname}", str(SHIM)]
            command += ["-Wl,--no-as-needed", f"-L{lean.parent}", f"-l:{lean.name}", "-o", str(output)]
            subprocess.run(command, check=True, capture_output=True)
            os.replace(output, library)
    return library
