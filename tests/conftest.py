"""Fixtures shared by all test folders."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve other processes

import pytest

from tests.support.engines import EngineShelf


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineShelf:
    """Engines built once per run: ``engines.engine(SWIFTKV)`` is a directory."""
    return EngineShelf(tmp_path_factory.mktemp("engines"))
