"""Model definitions: one file per Hugging Face ``model_type``, shared layers, the KV layout, the graphs."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.config_keys import check_fixed
from model_defs.errors import ModelError, no_swiftkv_form
from model_defs.families import broken_families, families, family_of
from model_defs.family import Family
from model_defs.fields import token_ids
from model_defs.rope_config import RopeConfig
from model_defs.text_part import text_part

__all__ = [
    "Family",
    "ModelConfig",
    "ModelError",
    "RopeConfig",
    "broken_families",
    "families",
    "family_of",
    "load_config",
    "supported_family",
    "text_part",
]


def supported_family(hf: Mapping[str, Any]) -> Family:
    """Return the family of the contents of a ``config.json``, or of its text part; raises ModelError where it is
    unknown or broken."""
    hf = text_part(hf)
    model_type, family = hf.get("model_type"), family_of(hf)
    if family is None:
        broken = broken_families().get(str(model_type).removesuffix("_swiftkv"))
        if broken:
            raise ModelError(f"The model family {model_type} cannot be loaded: {broken}.")
        known = ", ".join(sorted(families()))
        raise ModelError(
            f"model_type {reprlib.repr(model_type)} is not supported; supported are {known}, "
            "each plain or with the suffix _swiftkv."
        )
    return family


def load_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the ModelConfig for the contents of a ``config.json``; those with a SwiftKV cut (``<family>_swiftkv``)
    are read by their base family. The ``eos_token_id`` of a ``generation_config.json`` end a text as well: chat models
    name their end-of-turn token there. Of a model with several parts it is that of the text part.

    Raises:
        ModelError: unknown ``model_type``, a bad field, or a SwiftKV cut where the family has none.
    """
    hf = text_part(hf)
    model_type, family = hf.get("model_type"), supported_family(hf)
    if str(model_type).endswith("_swiftkv") and "num_key_value_layers" not in hf:
        raise ModelError(
            f"A {model_type} config.json needs num_key_value_layers, the first layer whose KV comes "
            "from the single input."
        )
    is_cut = str(model_type).endswith("_swiftkv") or "num_key_value_layers" in hf
    if is_cut and not family.is_rewired:
        raise no_swiftkv_form(family.model_type)
    check_fixed(hf, family)
    config = family.from_hf(hf)
    more = token_ids(generation or {}, "eos_token_id", config.vocab_size, "generation_config.json")
    config.check_shared_caches()
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
