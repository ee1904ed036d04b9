import os

import pytest

import plugins
from kvforge.common.hardware import available_isas
from plugins.operator import ISAS


@pytest.fixture(scope="session", autouse=True)
def library():
    """The compiled kernels, in this process."""
    return plugins.load_library(os.environ.get("KVFORGE_TEST_LIBRARY"))


@pytest.fixture(scope="session")
def isas() -> list[str]:
    """The kernel variants that this machine can run; software tiles in place of AMX's (test_tiles.py compares both)."""
    found = list(available_isas())
    return [*found, "amx_software"] if found[-1] == "avx512_bf16" else found


@pytest.fixture(autouse=True)
def default_isa(monkeypatch):
    monkeypatch.delenv("KVFORGE_CPU_ISA", raising=False)
    assert "KVFORGE_CPU_ISA" not in os.environ


@pytest.fixture(params=ISAS)
def isa(request, isas, monkeypatch) -> str:
    """Each kernel variant in turn, chosen by the environment."""
    if request.param not in isas:
        pytest.skip(f"this machine has no {request.param}")
    monkeypatch.setenv("KVFORGE_CPU_ISA", request.param)
    return request.param
