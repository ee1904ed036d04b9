"""A checkpoint as small as one can be, to be damaged."""

from pathlib import Path

import pytest

from tests.support.models.checkpoints import make_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(
        tmp_path / "checkpoint",
        "llama",
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
