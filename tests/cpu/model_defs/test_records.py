"""A model's description as JSON: whole, the same when read back, and refused where it is no model."""

import copy
import json
from typing import Any

import pytest

from kvforge.common.records import RecordError, read_record
from model_defs import ModelConfig, load_config
from tests.support.models.checkpoints import ALL_FAMILIES, SMALL, own_fields


def described(family: str = "llama", **changes: Any) -> dict[str, Any]:
    config = load_config({**copy.deepcopy(SMALL), "model_type": family})
    return json.loads(json.dumps(config.to_json())) | changes


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_comes_back_from_json(family: str) -> None:
    config_class, _ = ALL_FAMILIES[family]
    config = load_config(copy.deepcopy(config_class(**copy.deepcopy({**SMALL, **own_fields(family, SMALL)})).to_dict()))
    assert read_record(ModelConfig, json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"colour": "red"}, "has the unknown field colour"),
        ({"cut": 99}, "holds impossible values"),
        ({"cut": True}, "holds impossible values"),
        ({"cut": "2"}, "holds impossible values"),
        ({"num_layers": 10**12, "cut": 10**12}, "holds impossible values"),
        ({"model_type": "\ud800"}, "holds impossible values"),
        ({"rms_norm_eps": float("nan")}, "holds impossible values"),
        ({"qkv_bias": 1}, "holds impossible values"),
        ({"rope": {}}, "lacks amplitude"),
        ({"rope": []}, "holds impossible values"),
        ({"layer_windows": [0]}, "holds impossible values"),
        ({"layer_windows": 0}, "holds impossible values"),
        ({"layer_owners": [0, 99]}, "holds impossible values"),
        ({"layer_intermediate_sizes": [0] * 8}, "holds impossible values"),
        ({"latent": {"rank": 3, "rope_dim": 2, "nope_dim": 2, "value_dim": 2, "query_rank": None}}, "impossible"),
    ],
)
def test_what_is_no_model_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(RecordError, match=what):
        read_record(ModelConfig, described(**change))


def test_a_field_that_is_missing_is_named() -> None:
    data = described()
    del data["cut"]
    with pytest.raises(RecordError, match=r"^lacks cut$"):
        read_record(ModelConfig, data)
    with pytest.raises(RecordError, match="impossible"):
        read_record(ModelConfig, [])
