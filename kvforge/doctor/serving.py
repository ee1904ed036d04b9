"""What ``kvforge doctor`` checks for ``kvforge serve``: the server, its Python, ports, shared memory, limits."""

import dataclasses
import os
import resource
import shutil
import socket
from pathlib import Path

from kvforge.common.extras import how_to_install
from kvforge.doctor.finding import SERVE, Check, installed_version
from kvforge.serving.server.ports import PORTS

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY = 256 * 2**20
"""Every stub starts with a MiB and grows with its requests; containers come with 64 MiB."""
MIN_OPEN_FILES = 4096
"""Every client is one or two, and Triton opens some hundred itself."""


def serving_checks() -> list[Check]:
    checks = [_triton(), _numpy(), _shared_memory(), _open_files(), *_ports()]
    return [*(dataclasses.replace(check, needed_for=SERVE) for check in checks), _perf_analyzer()]


def _triton() -> Check:
    on_path = shutil.which("tritonserver")
    if on_path:
        return Check("tritonserver", "ok", on_path)
    bundled = installed_version("nvidia-pytriton")
    if bundled:
        return Check("tritonserver", "ok", f"bundled with nvidia-pytriton {bundled}")
    return Check("tritonserver", "optional", "not found", how_to_install("serve"))


def _numpy() -> Check:
    """The Python backend of nvidia-pytriton's server crashes on texts with NumPy 2."""
    name, version = "numpy for Triton", installed_version("numpy") or "not installed"
    if shutil.which("tritonserver") or installed_version("nvidia-pytriton") is None:
        return Check(name, "ok", f"{version} (only nvidia-pytriton's server minds)")
    if version.partition(".")[0] in ("0", "1"):
        return Check(name, "ok", version)
    advice = "pip install 'numpy<2' (nvidia-pytriton's Python backend crashes with NumPy 2)"
    return Check(name, "optional", version, advice)


def _shared_memory() -> Check:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return Check("shared memory", "optional", f"no {SHARED_MEMORY}", f"mount a tmpfs at {SHARED_MEMORY}")
    free = status.f_bavail * status.f_frsize
    found = f"{free / 2**20:.0f} MiB free in {SHARED_MEMORY}"
    if free >= MIN_SHARED_MEMORY:
        return Check("shared memory", "ok", found)
    return Check(
        "shared memory", "optional", found, "give containers more: --shm-size=1g, in Kubernetes a Memory volume"
    )


def _open_files() -> Check:
    """The hard limit: kvforge serve raises the soft one to it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    if hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES:
        return Check("open files", "ok", found)
    return Check("open files", "optional", found, "raise the hard limit (ulimit -Hn, LimitNOFILE) for many clients")


def _perf_analyzer() -> Check:
    path, use = shutil.which("perf_analyzer"), "load tests with perf_analyzer"
    if path:
        return Check("perf_analyzer", "ok", path, needed_for=use)
    return Check(
        "perf_analyzer", "optional", "not on PATH", "perf/serving/run_perf_analyzer.py of the source tree gets one", use
    )


def _ports() -> list[Check]:
    checks = []
    for name, port in PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                checks.append(Check(f"port {port}", "ok", f"free ({name})"))
            except OSError:
                advice = f"give kvforge serve another --{name}-port"
                checks.append(Check(f"port {port}", "optional", f"in use ({name})", advice))
    return checks
