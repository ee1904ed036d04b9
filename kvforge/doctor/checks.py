"""The checks behind ``kvforge doctor``; none of them changes anything."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from kvforge.common.build_paths import build_paths, with_quotes, with_whitespace
from kvforge.common.cxx import cxx, find_cxx
from kvforge.common.errors import KvforgeError
from kvforge.common.extras import how_to_install
from kvforge.common.hardware import available_memory_bytes
from kvforge.doctor.finding import BUILD, EVERY_COMMAND, GPU, Check, installed_version
from kvforge.doctor.kernels import cpu_check
from kvforge.doctor.packages import NEEDED_FOR, PACKAGES, package_checks
from kvforge.doctor.serving import serving_checks
from kvforge.tensorrt.installed import DISTRIBUTIONS, RTX, TITLES, installed_flavour
from kvforge.vllm_engine.environment import HOW_TO_MAKE, PYTHON_VARIABLE, find_interpreter

VLLM = "target vllm"


def diagnose() -> list[Check]:
    """Run every check, most fundamental first."""
    packages = package_checks()
    return [
        _python(),
        _torch_version(),
        _compiler(),
        _build_paths(),
        cpu_check(),
        _memory(),
        *packages,
        *_extensions(),
        *serving_checks(),
        _gpu(),
        plan_builder(packages),
        _vllm(),
    ]


def _python() -> Check:
    good = (3, 10) <= sys.version_info[:2] <= (3, 12)
    return Check(
        "python",
        "ok" if good else "missing",
        platform.python_version(),
        "" if good else "make the environment with Python 3.10 to 3.12",
        EVERY_COMMAND,
    )


def _torch_version() -> Check:
    """Whether it is a torch that kvforge knows; that it is there at all and can be imported, the packages say."""
    version = installed_version("torch")
    if version is None:
        return Check("torch's version", "ok", "no torch", needed_for=EVERY_COMMAND)
    major, minor = (int(part) for part in version.split(".")[:2])
    good = (2, 11) <= (major, minor) < (2, 14)
    advice = "" if good else "pip install 'torch>=2.11,<2.14'"
    return Check("torch's version", "ok" if good else "missing", version, advice, EVERY_COMMAND)


def _compiler() -> Check:
    path = find_cxx()
    if path is None:
        return Check("C++ compiler", "missing", f"no {cxx()}", "apt-get install g++", BUILD)
    line = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return Check("C++ compiler", "ok", line[0] if line else path, needed_for=BUILD)


def _build_paths() -> Check:
    paths = build_paths()
    for name, wrong, status, use in (
        ("quotes or backslashes", with_quotes(paths), "missing", BUILD),
        ("spaces", with_whitespace(paths), "optional", f"{BUILD} --target cuda"),
    ):
        if wrong:
            advice = f"choose an environment and a TMPDIR without {name} in their names"
            return Check("build folders", status, f"{name} in {wrong[0]!r}", advice, use)
    return Check("build folders", "ok", "compilers can be given their names", needed_for=BUILD)


def _memory() -> Check:
    return Check("memory", "ok", f"{available_memory_bytes() / 2**30:.1f} GiB available")


def _extensions() -> list[Check]:
    """What other packages bring that cannot be loaded."""
    if installed_version("torch") is None:
        return []
    from kvforge.kv_policies import broken_policies
    from model_defs import broken_families

    kinds = {"KV policy": broken_policies(), "model family": broken_families()}
    remedy = "mend or uninstall the package that brings it"
    return [
        Check(f"{kind} {name}", "broken", why, remedy) for kind, broken in kinds.items() for name, why in broken.items()
    ]


def _gpu() -> Check:
    path = shutil.which("nvidia-smi")
    if path is None:
        return Check("GPU", "optional", "no nvidia-smi", "a machine with an NVIDIA GPU and its driver", GPU)
    result = subprocess.run(
        [path, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True
    )
    names = result.stdout.strip().replace("\n", "; ")
    if not names:
        return Check("GPU", "optional", "nvidia-smi lists none", "give this machine or container one", GPU)
    return Check("GPU", "ok", names, needed_for=GPU)


def plan_builder(packages: Sequence[Check]) -> Check:
    """What builds and runs plans of target tensorrt, given what was found of the packages."""
    name = installed_flavour()
    if name is None:
        return Check("plan builder", "optional", "no TensorRT", how_to_install(RTX), NEEDED_FOR[RTX])
    parts = {package.distribution for package in PACKAGES if package.extra == name}
    for part in packages:
        if part.name in parts and part.status == "broken":
            found = f"{TITLES[name]}, of which {part.name} is broken"
            return Check("plan builder", "broken", found, how_to_install(name), NEEDED_FOR[name])
    found = f"{TITLES[name]} {installed_version(DISTRIBUTIONS[name]) or 'of this machine'}"
    if name == RTX:
        found += "; plugins for programs in C++: python -m plugins.trt_cpp --headers, with TensorRT's public headers"
    return Check("plan builder", "ok", found, needed_for=NEEDED_FOR[name])


def _vllm() -> Check:
    """The interpreter of target vllm, where one is named."""
    if not os.environ.get(PYTHON_VARIABLE):
        advice = f"{HOW_TO_MAKE}, then {PYTHON_VARIABLE}=vllm-env/bin/python"
        return Check("vLLM", "optional", f"no {PYTHON_VARIABLE}", advice, VLLM)
    try:
        found = find_interpreter(None)
    except KvforgeError as error:
        return Check("vLLM", "broken", str(error), f"unset {PYTHON_VARIABLE}, or name another python", VLLM)
    return Check("vLLM", "ok", f"{found.vllm} with torch {found.torch}, {found.python}", needed_for=VLLM)
