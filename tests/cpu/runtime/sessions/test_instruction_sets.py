"""An engine of target ``cpu`` on a CPU with other instruction sets than it was built for."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import plugins
from kvforge.common.errors import EngineError
from kvforge.common.hardware import ISA_NAMES, best_isa, cpu_isa
from kvforge.runtime.sessions import cpu


class Reached(Exception):
    """The instruction sets were accepted."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads an engine that was built for the instruction sets given, as far as to its weights."""

    def reached(*args: object) -> None:
        raise Reached

    monkeypatch.setattr(cpu, "check_operators", lambda *given: None)
    monkeypatch.setattr(plugins, "load_library", lambda path: path)
    monkeypatch.setattr(cpu, "load_weights", reached)
    return lambda isa: cpu.load_session(Path("engine"), SimpleNamespace(isa=isa, torch_version=torch.__version__))


@pytest.mark.parametrize("lacks", [False, True])
def test_kernels_that_were_not_compiled_are_said(
    lacks: bool, load: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins, "has_kernels_for", lambda isa: isa != best_isa() or not lacks)
    with caplog.at_level(logging.WARNING), pytest.raises(Reached):
        load(cpu_isa())
    said = f"The kernels for {ISA_NAMES[best_isa()]}, which this CPU runs, were not compiled into engine"
    assert [message.startswith(said) for message in caplog.messages] == [True] * lacks


@pytest.mark.parametrize("chosen", ["", "avx2", "foo", "portable"])
def test_a_choice_of_kernels_that_are_not_there_is_refused(
    chosen: str, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFORGE_CPU_ISA", chosen)
    monkeypatch.setattr(plugins, "has_kernels_for", lambda isa: isa != "avx2")
    said = rf"^KVFORGE_CPU_ISA={chosen} names no kernels .* and engine.*has; choose from portable.*, or unset it\.$"
    refused = pytest.raises(EngineError, match=said)
    with refused if chosen in ("avx2", "foo") else pytest.raises(Reached):
        load(cpu_isa())


def test_a_lesser_cpu_is_refused(load: Any) -> None:
    with pytest.raises(EngineError, match=r"^engine was built for a CPU with avx4096, which this one lacks; rebuild"):
        load((*cpu_isa(), "avx4096"))
