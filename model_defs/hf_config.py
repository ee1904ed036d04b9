"""Reading the fields that all supported families share from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.rope import rope_from_hf


def require_int(hf: Mapping[str, Any], name: str) -> int:
    """Return the integer field ``name``; raises ModelError when it is missing or no integer."""
    value = hf.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"config.json needs an integer {name}, found {value!r}.")
    return value


def optional_int(hf: Mapping[str, Any], name: str, otherwise: int) -> int:
    """Return the integer field ``name``, or ``otherwise`` where it is absent or null; raises ModelError."""
    return otherwise if hf.get(name) is None else require_int(hf, name)


def optional_flag(hf: Mapping[str, Any], name: str, otherwise: bool = False) -> bool:
    """Return the boolean field ``name``, or ``otherwise`` where it is absent or null; raises ModelError."""
    value = hf.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{name} is {value!r} in config.json; it must be true or false.")
    return otherwise if value is None else value


def token_ids(hf: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the field ``name``, which may be absent, null, one id or a list, as a tuple.

    Ids the model cannot produce (such as -1) are left out; raises ModelError for what is no integer.
    """
    value = hf.get(name)
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{name} is {value!r}; it must be a token id or a list of them.")
    return tuple(token for token in ids if 0 <= token < require_int(hf, "vocab_size"))


def config_from_hf(
    hf: Mapping[str, Any], *, model_type: str, layer_windows: tuple[int, ...] | None = None, **variant: Any
) -> ModelConfig:
    """Build a ModelConfig from the common fields of ``hf``; ``variant`` sets what the family adds.

    Raises:
        ModelError: a field is missing, of the wrong type, or names something unsupported.
    """
    if hf.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {hf['hidden_act']!r} is not supported; only silu is.")
    num_layers = require_int(hf, "num_hidden_layers")
    num_heads = require_int(hf, "num_attention_heads")
    hidden_size = require_int(hf, "hidden_size")
    if num_heads < 1 or hidden_size < 1:
        raise ModelError("hidden_size and num_attention_heads must be positive integers.")
    is_swiftkv = optional_flag(hf, "swiftkv", "num_key_value_layers" in hf)
    eps = hf.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise ModelError(f"rms_norm_eps is {eps!r} in config.json; it must be a number.")
    return ModelConfig(
        model_type=model_type,
        vocab_size=require_int(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require_int(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=optional_int(hf, "num_key_value_heads", num_heads),
        head_dim=optional_int(hf, "head_dim", hidden_size // num_heads),
        rms_norm_eps=float(eps),
        max_position=require_int(hf, "max_position_embeddings"),
        rope=rope_from_hf(hf),
        layer_windows=layer_windows if layer_windows is not None else (0,) * max(num_layers, 0),
        tie_embeddings=optional_flag(hf, "tie_word_embeddings"),
        cut=optional_int(hf, "num_key_value_layers", num_layers) if is_swiftkv else num_layers,
        group_size=optional_int(hf, "key_value_group_size", 1) if is_swiftkv else 1,
        early_exit=optional_flag(hf, "early_exit"),
        bos_token_id=next(iter(token_ids(hf, "bos_token_id")), None),
        eos_token_ids=token_ids(hf, "eos_token_id"),
        **variant,
    )


def windows_from_layer_types(hf: Mapping[str, Any], sliding_from_layer: int) -> tuple[int, ...]:
    """Return each layer's sliding window (0 = full attention) from ``sliding_window`` and ``layer_types``.

    Where the config has no ``layer_types``, layers from ``sliding_from_layer`` on slide.
    """
    window = optional_int(hf, "sliding_window", 0)
    if window < 0:
        raise ModelError(f"sliding_window is {window} in config.json; it must not be negative.")
    num_layers = require_int(hf, "num_hidden_layers")
    types = hf.get("layer_types")
    if types is None:
        return tuple(window if layer >= sliding_from_layer else 0 for layer in range(num_layers))
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ModelError(f"layer_types is {types!r} in config.json; it must be a list of names.")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"Layer type {sorted(unknown)[0]!r} is not supported; supported are full_attention and sliding_attention."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
