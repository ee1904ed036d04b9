import os
import platform

import pytest

import plugins


@pytest.fixture(scope="session", autouse=True)
def library():
    """The compiled kernels, in this process."""
    return plugins.load_library(os.environ.get("KVFORGE_TEST_LIBRARY"))


@pytest.fixture(scope="session")
def isas() -> list[str]:
    """The kernel variants that this machine can run."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["portable"]
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    found = ["portable"]
    if {"avx2", "fma"} <= set(flags):
        found.append("avx2")
        avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "avx512vbmi"}
        if avx512 <= set(flags):
            found.append("avx512")
    return found


@pytest.fixture(autouse=True)
def default_isa(monkeypatch):
    monkeypatch.delenv("KVFORGE_CPU_ISA", raising=False)
    assert "KVFORGE_CPU_ISA" not in os.environ
