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


def token_ids(value: Any) -> tuple[int, ...]:
    """Return ``eos_token_id``, which may be absent, one id or a list, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


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
    head_dim = hf.get("head_dim") or hidden_size // num_heads
    is_swiftkv = bool(hf.get("swiftkv", "num_key_value_layers" in hf))
    cut = hf.get("num_key_value_layers") if is_swiftkv else None
    return ModelConfig(
        model_type=model_type,
        vocab_size=require_int(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require_int(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_position=require_int(hf, "max_position_embeddings"),
        rope=rope_from_hf(hf),
        layer_windows=layer_windows if layer_windows is not None else (0,) * max(num_layers, 0),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        cut=num_layers if cut is None else cut,
        group_size=hf.get("key_value_group_size") or 1 if is_swiftkv else 1,
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        **variant,
    )


def windows_from_layer_types(hf: Mapping[str, Any], sliding_from_layer: int) -> tuple[int, ...]:
    """Return each layer's sliding window (0 = full attention) from ``sliding_window`` and ``layer_types``.

    Where the config has no ``layer_types``, layers from ``sliding_from_layer`` on slide.
    """
    window = hf.get("sliding_window") or 0
    num_layers = require_int(hf, "num_hidden_layers")
    types = hf.get("layer_types")
    if types is None:
        return tuple(window if layer >= sliding_from_layer else 0 for layer in range(num_layers))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"Layer type {sorted(unknown)[0]!r} is not supported; supported are full_attention and sliding_attention."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
