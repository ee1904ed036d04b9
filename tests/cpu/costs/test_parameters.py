"""Parameters of a model, counted by its configuration, are those of the published model."""

import copy

import pytest
import torch

from kvforge.costs.weights import num_parameters
from model_defs import load_config
from tests.support.models.checkpoints import ALL_FAMILIES, SMALL, own_fields

SCALARS = ("layer_scalar", "e_score_correction_bias")
"""What transformers has as buffers."""


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_parameters_are_those_of_transformers(family: str) -> None:
    config_class, model_class = ALL_FAMILIES[family]
    fields = copy.deepcopy({**SMALL, **own_fields(family, SMALL)})
    if hasattr(config_class, "kv_lora_rank"):
        fields |= {"num_key_value_heads": fields["num_attention_heads"], "q_lora_rank": 24}
    config = config_class(**fields)
    hf = copy.deepcopy(config.to_dict())
    with torch.device("meta"):
        model = model_class(config)
    scalars = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith(SCALARS))
    shape = load_config(hf)
    assert num_parameters(shape) == sum(parameter.numel() for parameter in model.parameters()) + scalars
