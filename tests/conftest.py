"""Fixtures shared by all test folders."""

import gc
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve other processes
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # some hundred processes import the same sources

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.models.shelf import EngineShelf

sys.dont_write_bytecode = False

pytest_plugins = ["tests.support.ledger", "tests.support.random_cases", "tests.support.layers"]


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
def engines() -> "EngineShelf":
    """Engines built once, for all runs of the same sources: ``engines.engine(SWIFTKV)`` is a directory."""
    # Here: checkpoints are made with transformers, which the operators' tests do without.
    from tests.support.models.shelf import EngineShelf, shared_folder

    return EngineShelf(shared_folder())
