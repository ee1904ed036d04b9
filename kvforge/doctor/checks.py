"""The checks behind ``kvforge doctor``; none of them changes anything."""

import os
import platform
import shutil
import subprocess
import sys

from kvforge.common.hardware import available_memory_bytes
from kvforge.doctor.finding import Check, installed_version
from kvforge.doctor.kernels import cpu_check
from kvforge.doctor.serving import serving_checks


def diagnose() -> list[Check]:
    """Run every check, most fundamental first."""
    return [
        _python(),
        _torch(),
        _compiler(),
        cpu_check(),
        _memory(),
        *_packages(),
        *_extensions(),
        *serving_checks(),
        _gpu(),
    ]


def _python() -> Check:
    good = (3, 10) <= sys.version_info[:2] <= (3, 12)
    return Check(
        "python",
        "ok" if good else "missing",
        platform.python_version(),
        "" if good else "kvforge runs on Python 3.10 to 3.12",
    )


def _torch() -> Check:
    version = installed_version("torch")
    if version is None:
        return Check("torch", "missing", "not installed", "pip install 'torch>=2.11,<2.14'")
    major, minor = (int(part) for part in version.split(".")[:2])
    good = (2, 11) <= (major, minor) < (2, 14)
    return Check("torch", "ok" if good else "missing", version, "" if good else "install torch>=2.11,<2.14")


def _compiler() -> Check:
    compiler = os.environ.get("CXX") or "g++"
    path = shutil.which(compiler)
    if path is None:
        return Check("C++ compiler", "missing", f"no {compiler}", "apt-get install g++ (needed by kvforge build)")
    line = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return Check("C++ compiler", "ok", line[0] if line else path)


def _memory() -> Check:
    return Check("memory", "ok", f"{available_memory_bytes() / 2**30:.1f} GiB available")


def _packages() -> list[Check]:
    needed = [
        ("safetensors", "missing"),
        ("tokenizers", "missing"),
        ("huggingface_hub", "missing"),
        ("numpy", "missing"),
        ("tritonclient", "optional"),
        ("fastapi", "optional"),
        ("uvicorn", "optional"),
        ("llguidance", "optional"),
        ("matplotlib", "optional"),
        ("datasets", "optional"),
        ("lm_eval", "optional"),
        ("transformers", "optional"),
        ("modelopt", "optional"),
        ("onnx", "optional"),
        ("onnxscript", "optional"),
        ("triton", "optional"),
        ("tensorrt", "optional"),
        ("tensorrt-llm", "optional"),
    ]
    advices = {"triton": "comes with a CUDA build of torch (needed by targets cuda and tensorrt on a GPU)"}
    extras = {
        "tritonclient": "serve",
        "fastapi": "serve",
        "uvicorn": "serve",
        "llguidance": "serve",
        "matplotlib": "perf",
        "datasets": "train",
        "lm_eval": "eval",
        "transformers": "modelopt",
        "modelopt": "modelopt",
        "onnx": "onnx",
        "onnxscript": "onnx",
        "tensorrt": "tensorrt",
        "tensorrt-llm": "trtllm",
    }
    checks = []
    for package, absent in needed:
        version = installed_version("nvidia-modelopt" if package == "modelopt" else package)
        advice = f"pip install -e '.[{extras[package]}]'" if package in extras else f"pip install {package}"
        advice = advices.get(package, advice)
        checks.append(
            Check(package, "ok" if version else absent, version or "not installed", "" if version else advice)
        )
    return checks


def _extensions() -> list[Check]:
    """What other packages bring that cannot be loaded."""
    if installed_version("torch") is None:
        return []
    from kvforge.kv_policies import broken_policies
    from model_defs import broken_families

    kinds = {"KV policy": broken_policies(), "model family": broken_families()}
    remedy = "mend or uninstall the package that brings it"
    return [
        Check(f"{kind} {name}", "missing", why, remedy)
        for kind, broken in kinds.items()
        for name, why in broken.items()
    ]


def _gpu() -> Check:
    path = shutil.which("nvidia-smi")
    if path is None:
        return Check("GPU", "optional", "no nvidia-smi", "none is needed for target cpu")
    result = subprocess.run(
        [path, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True
    )
    names = result.stdout.strip().replace("\n", "; ")
    return Check("GPU", "ok" if names else "optional", names or "nvidia-smi lists none")
