"""Fixtures shared by all test folders."""

import gc
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve other processes

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.models.engines import EngineShelf

pytest_plugins = ["tests.support.ledger"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every random case and specialisation, slow ones too")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A quarter of collecting went into looking for garbage among modules and tests, all of which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether this run is the long one (``make test-full``)."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> "EngineShelf":
    """Engines built once per run, whatever number of processes it has: ``engines.engine(SWIFTKV)`` is a directory."""
    from tests.support.models.engines import (
        EngineShelf,  # makes checkpoints with transformers; the operators' tests need none
    )

    own = tmp_path_factory.getbasetemp()  # with several processes, each has a folder in the one that they share
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "engines"
    folder.mkdir(exist_ok=True)
    return EngineShelf(folder)
