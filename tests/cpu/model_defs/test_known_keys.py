"""Every key and file of a checkpoint that transformers reads has a row, and the rows are true."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import hub as hub_files
from transformers.utils import peft_utils

from kvforge.checkpoint.side_files import (
    FILES,
    GENERATION,
    SPECIAL_TOKENS_MAP_KEYS,
    TOKENIZER_CONFIG_KEYS,
    check_side_files,
)
from kvforge.common.checkpoint_files import TOKENIZER_FILES
from kvforge.common.errors import CheckpointError, CheckpointWarning
from model_defs import ModelConfig, ModelError, families, load_config
from model_defs.config_keys import FIXED, IGNORED, USED
from model_defs.rope_reading import KEYS, NEEDED
from tests.support.models.checkpoints import ALL_FAMILIES, MAMBA, SMALL, own_fields
from tests.support.models.transformers_reads import config_keys, model_keys, rope_keys, tokenizer_keys

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 4, 5, 7, 48, 0.25, 0.5, 1e-3, 1e6, "gelu", "x", [], [0], [1, 2], {}, {"0": {}}),
    *({"0": {"head_dim": 8}}, {"rope_type": "linear", "factor": 2.0}, {"quant_method": "x"}),
    *(["full_attention"] * 4, ["sliding_attention"] * 4),
    {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 5.0}},
)
CLASSES = {TOKENIZER_MAPPING_NAMES.get(name) for name in ALL_FAMILIES} - {None}
TOKENIZERS = [transformers.PreTrainedTokenizerFast, *(getattr(transformers, str(name)) for name in CLASSES)]


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_every_key_of_config_json_has_a_row(name: str) -> None:
    config_class, model_class = ALL_FAMILIES[name]
    keys, family = config_keys(config_class) | model_keys(model_class), families()[name]
    assert {"rope_theta", "per_layer_config", "vocab_size"} <= keys and len(keys) > 30
    missing = keys - USED - FIXED.keys() - IGNORED.keys() - set(family.reads) - family.fixed.keys()
    assert not missing, (
        f"{missing}: put each key into reads, fixed or ignored of model_defs/{name}.py, or config_keys.py"
    )
    assert not USED & IGNORED.keys() and not set(family.reads) & family.fixed.keys()


def test_every_key_of_a_rotation_is_read() -> None:
    assert rope_keys() == KEYS
    for key in KEYS - {"type", "rope_type"}:  # which are read for the others
        ropes = [{"rope_type": kind, **SCALED} for kind in NEEDED]
        values = (0.5, 2.0, 3.0, 1, 64, True, "x", [1.5] * 8)
        cases = [[effect("phi3", "rope_scaling", {**rope, key: value}) for value in values] for rope in ropes]
        cases += [[effect("qwen3", "rope_scaling", {**rope, key: value}) for value in values] for rope in ropes]
        assert any(each != case[0] for case in cases for each in case), key


SCALED: dict[str, Any] = {
    **{"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "mscale": 0.7, "mscale_all_dim": 1.3},
}


def effect(name: str, key: str, value: Any) -> ModelConfig | str:
    """The model with a key of another value, or the refusal."""
    hf = {
        **SMALL,
        "model_type": name,
        **{key: value for key, value in MORE.items() if key not in families()[name].fixed},
    }
    if "kv_lora_rank" in families()[name].reads:
        hf["num_key_value_heads"] = hf["num_attention_heads"]
    hf |= own_fields(name, SMALL)
    if {"mamba_d_state", "layer_types"} <= set(families()[name].reads):
        hf |= {**MAMBA, "num_local_experts": 8}
    try:
        return load_config({**hf, key: value})
    except ModelError as error:
        return str(error)


KINDS = ["sliding_attention", "full_attention"] * 2
MORE: dict[str, Any] = {
    **{"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    **{"num_kv_shared_layers": 1, "layer_types": KINDS, "use_sliding_window": True, "sliding_window": 9},
}
"""Values with which the keys that these go with have an effect."""
ELSEWHERE = {"model_type", "text_config", "quantization_config"}
"""Used keys that say how the file is read, before its family reads it."""


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_rows_of_config_json_are_true(name: str) -> None:
    """A used key has a value that changes the model or is refused; a fixed one is refused by name, and its neutral
    values change nothing; no value of an ignored key changes anything."""
    family = families()[name]
    assert isinstance(effect(name, "no key", None), ModelConfig)
    for key in (USED - ELSEWHERE | set(family.reads)) - family.ignored.keys():
        found = [effect(name, key, value) for value in VALUES]
        assert any(each != found[0] for each in found), key
    for key, neutral in {**FIXED, **family.fixed}.items():
        if key in family.reads:
            continue
        refused = [effect(name, key, value) for value in VALUES if value is not None and value not in neutral]
        assert all(isinstance(each, str) and each.startswith(f"{key} ") for each in refused), key
        assert len({repr(effect(name, key, value)) for value in (None, *neutral)}) == 1
    for key in family.ignored.keys() | IGNORED.keys() - set(family.reads) - family.fixed.keys():
        assert len({repr(effect(name, key, value)) for value in VALUES}) == 1, key


def test_every_key_of_generation_config_has_a_row() -> None:
    assert vars(transformers.GenerationConfig()).keys() - GENERATION.keys() == set()


def test_every_key_of_tokenizer_config_has_a_row() -> None:
    keys = tokenizer_keys(*TOKENIZERS)
    assert {"chat_template", "bos_token", "split_special_tokens"} <= keys
    assert keys - TOKENIZER_CONFIG_KEYS.keys() == set()
    assert set(transformers.PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES) <= SPECIAL_TOKENS_MAP_KEYS.keys()


def test_every_file_has_a_row() -> None:
    suffixes, found = ("_NAME", "_FILE", "_DIR"), set[str]()
    for module in (transformers.utils, hub_files, peft_utils, transformers.tokenization_utils_base):
        found |= {value for name, value in vars(module).items() if name.isupper() and name.endswith(suffixes)}
    found |= {file for each in TOKENIZERS for file in each.vocab_files_names.values()}
    assert {"adapter_config.json", "chat_template.json", "tokenizer.model"} <= found
    assert {name for name in found if "." in name or name == "additional_chat_templates"} - FILES.keys() == set()
    used = {name for name, row in FILES.items() if row.use == "used"}
    assert {pattern.partition("/")[0] for pattern in TOKENIZER_FILES} <= used


def test_rows_have_reasons() -> None:
    rows = [*FILES.values(), *GENERATION.values(), *TOKENIZER_CONFIG_KEYS.values()]
    assert all(row.why for row in rows) and all(IGNORED.values())
    assert all(row.use == "checked" or not row.neutral for row in rows)


def test_neutral_values_are_the_defaults_of_transformers() -> None:
    defaults = {
        **vars(transformers.GenerationConfig()),
        **transformers.GenerationConfig._get_default_generation_params(),
    }
    for name, row in GENERATION.items():
        if row.use == "checked":
            assert defaults[name] is None or defaults[name] in row.neutral, name


@pytest.mark.parametrize("name", [name for name, row in GENERATION.items() if row.use == "checked"])
def test_a_default_of_generation_that_is_not_served_is_noted(name: str, tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning, match=rf"asks for {name} \[3\], which is not served"):
        check_side_files(tmp_path, {name: [3], "temperature": 0.5}, {})


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json.*; merge it"):
        check_side_files(tmp_path, {}, {})


def test_a_key_of_the_tokenizer_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    check_side_files(tmp_path, {}, {"split_special_tokens": False})
    with pytest.raises(CheckpointError, match="split_special_tokens is True"):
        check_side_files(tmp_path, {}, {"split_special_tokens": True})


def test_a_family_of_another_package_may_read_a_fixed_key() -> None:
    from model_defs.config_keys import check_fixed

    family = next(iter(families().values()))
    hf = {"per_layer_config": {"0": {}}}
    check_fixed(hf, dataclasses.replace(family, reads=("per_layer_config",)))
    with pytest.raises(ModelError, match="per_layer_config"):
        check_fixed(hf, dataclasses.replace(family, reads=()))
