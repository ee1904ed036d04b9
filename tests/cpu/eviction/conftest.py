"""Models shared by the tests of eviction."""

import pytest
from torch import Tensor

from model_defs import ModelConfig
from tests.support.eviction.cases import CUT_MODELS, PLAIN_MODELS, write_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelConfig, dict[str, Tensor]]]:
    """Every model of the random cases, by name."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(name, folder / name) for name in PLAIN_MODELS | CUT_MODELS}
