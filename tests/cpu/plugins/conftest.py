import os
import platform

import pytest

import plugins
from kvforge.common.hardware import AMX_KERNELS, AVX512_KERNELS, cpu_isa


@pytest.fixture(scope="session", autouse=True)
def library():
    """The compiled kernels, in this process."""
    return plugins.load_library(os.environ.get("KVFORGE_TEST_LIBRARY"))


@pytest.fixture(scope="session")
def isas() -> list[str]:
    """The kernel variants that this machine can run; software tiles in place of AMX's (test_tiles.py compares both)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["portable"]
    flags, found = set(cpu_isa()), ["portable"]
    if flags >= {"avx2", "fma"}:
        found.append("avx2")
        if flags >= AVX512_KERNELS:
            found += ["avx512", "amx" if flags >= AMX_KERNELS else "amx_software"]
    return found


@pytest.fixture(autouse=True)
def default_isa(monkeypatch):
    monkeypatch.delenv("KVFORGE_CPU_ISA", raising=False)
    assert "KVFORGE_CPU_ISA" not in os.environ
