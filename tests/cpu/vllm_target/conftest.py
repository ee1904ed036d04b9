"""An environment that has a vLLM does not change these tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def without_vllm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KVFORGE_VLLM_PYTHON", raising=False)
        yield
