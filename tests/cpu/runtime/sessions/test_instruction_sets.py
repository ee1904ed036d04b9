"""An engine of target ``cpu`` on a CPU with other instruction sets than it was built for."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvforge.common.errors import EngineError
from kvforge.common.hardware import cpu_isa
from kvforge.runtime.sessions import cpu


class Reached(Exception):
    """The instruction sets were accepted."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads an engine with the instruction sets given, as far as to what follows them."""

    def reached(*args: object) -> None:
        raise Reached

    monkeypatch.setattr(cpu, "check_operators", reached)
    return lambda isa: cpu.load_session(Path("engine"), SimpleNamespace(isa=isa, torch_version=torch.__version__))


def test_a_better_cpu_than_the_engine_was_built_for_is_said(load: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with pytest.raises(Reached):
            load(cpu_isa())
        assert not caplog.messages
        if len(cpu_isa()) > 1:
            with pytest.raises(Reached):
                load(cpu_isa()[:1])
            (said,) = caplog.messages
            assert said.startswith("engine was built for portable kernels and this CPU runs ")


def test_a_lesser_cpu_is_refused(load: Any) -> None:
    with pytest.raises(EngineError, match=r"^engine was built for a CPU with avx4096, which this one lacks; rebuild"):
        load((*cpu_isa(), "avx4096"))
