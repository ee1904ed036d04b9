"""Fixtures."""

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.support.models.shelf import EngineShelf


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower on several threads than on one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Interrupts as of a terminal: what a shell runs in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def compiled_with_full(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that a test builds are compiled with --full alone; else torch runs their exported graphs."""
    if not full:
        from tests.support.sessions.uncompiled import leave_uncompiled  # the operators' tests need no engines

        leave_uncompiled(monkeypatch)


@pytest.fixture(scope="module")
def engines_compiled_with_full(
    engines: "EngineShelf", full: bool, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[EngineShelf]":
    """The shelf, with engines that are compiled with --full alone; else torch runs their exported graphs."""
    if full:
        yield engines
        return
    from tests.support.sessions.uncompiled import UncompiledShelf

    with pytest.MonkeyPatch.context() as monkeypatch:
        yield UncompiledShelf(engines, tmp_path_factory.mktemp("uncompiled"), monkeypatch)
