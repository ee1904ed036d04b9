"""TensorRT's Python API for the contract tests, or a visible skip."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.trt import contract_environment


@pytest.fixture(scope="session")
def trt() -> Iterator[ModuleType]:
    """NVIDIA's `tensorrt` module; it registers plugins but builds no engine here."""
    try:
        module = contract_environment.load()
    except contract_environment.UnavailableError as reason:
        pytest.skip(f"no TensorRT contract environment: {reason}")
    yield module
    contract_environment.unload()
