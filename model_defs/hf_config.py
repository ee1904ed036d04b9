"""Reading the fields that all supported families share from a Hugging Face ``config.json``."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.fields import number, optional_flag, optional_int, require_int, token_ids
from model_defs.rope_reading import max_position_of, rope_from_hf

SMALLEST_EPS = 2.0**-126
"""The least float32 that is not denormal: kernels may take a smaller one for 0, of which a row of zeros makes NaN."""


BLIND = "blind"
CUT_KINDS = ("single-input", BLIND)
"""What ``cut_kind`` of a rewired config.json may be: where layers above the cut have K and V from."""


def config_from_hf(
    hf: Mapping[str, Any],
    *,
    model_type: str,
    layer_windows: tuple[int, ...] | None = None,
    partial_rotation: bool = False,
    interleaved: bool = False,
    **variant: Any,
) -> ModelConfig:
    """Build a ModelConfig from the common fields of ``hf``; ``variant`` sets what the family adds. Heads may
    rotate in part with ``partial_rotation``, and ``interleaved`` rotates neighbours; or as a variant's ``rope`` says.

    Raises:
        ModelError: a field is missing, of the wrong type, or names something unsupported.
    """
    check_activation(hf, variant.get("activation", "silu"))
    num_layers = require_int(hf, "num_hidden_layers")
    num_heads = require_int(hf, "num_attention_heads")
    hidden_size = require_int(hf, "hidden_size")
    vocab_size = require_int(hf, "vocab_size")
    rope = variant.pop("rope", None) or rope_from_hf(hf, may_be_partial=partial_rotation, interleaved=interleaved)
    is_swiftkv = optional_flag(hf, "swiftkv", "num_key_value_layers" in hf)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=require_int(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=optional_int(hf, "num_key_value_heads", num_heads),
        head_dim=optional_int(hf, "head_dim", hidden_size // num_heads),
        rms_norm_eps=number(hf.get("rms_norm_eps", 1e-6), "rms_norm_eps", SMALLEST_EPS, 1.0),
        max_position=max_position_of(hf, rope),
        rope=rope,
        layer_windows=layer_windows if layer_windows is not None else (0,) * num_layers,
        tie_embeddings=optional_flag(hf, "tie_word_embeddings"),
        cut=optional_int(hf, "num_key_value_layers", num_layers) if is_swiftkv else num_layers,
        group_size=optional_int(hf, "key_value_group_size", 1) if is_swiftkv else 1,
        num_anchors=_anchors(hf) if is_swiftkv else 0,
        early_exit=optional_flag(hf, "early_exit"),
        bos_token_id=next(iter(token_ids(hf, "bos_token_id", vocab_size)), None),
        eos_token_ids=token_ids(hf, "eos_token_id", vocab_size),
        **variant,
    )


def _anchors(hf: Mapping[str, Any]) -> int:
    """Return the anchors of a blind cut, 0 of one with a single input."""
    kind = hf.get("cut_kind", CUT_KINDS[0])
    if kind not in CUT_KINDS:
        raise ModelError(f"cut_kind {reprlib.repr(kind)} is not supported; supported are {', '.join(CUT_KINDS)}.")
    return require_int(hf, "num_anchor_tokens") if kind == BLIND else 0


ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
"""What config.json calls each activation."""


def check_activation(hf: Mapping[str, Any], activation: str) -> None:
    """Raise ModelError where ``hidden_act`` or ``hidden_activation`` names another."""
    name = ACTIVATIONS[activation]
    for field in ("hidden_act", "hidden_activation"):
        if hf.get(field, name) != name:
            raise ModelError(f"{field} {reprlib.repr(hf[field])} is not supported; only {name} is.")


def windows_from_layer_types(hf: Mapping[str, Any], sliding_from_layer: int) -> tuple[int, ...]:
    """Return each layer's sliding window (0 = full attention) from ``sliding_window`` and ``layer_types``.

    Where the config has no ``layer_types``, layers from ``sliding_from_layer`` on slide.
    """
    window = optional_int(hf, "sliding_window", 0, minimum=0)
    num_layers = require_int(hf, "num_hidden_layers")
    types = hf.get("layer_types")
    if types is None:
        return tuple(window if layer >= sliding_from_layer else 0 for layer in range(num_layers))
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ModelError(f"layer_types is {reprlib.repr(types)} in config.json; it must be a list of names.")
    if len(types) != num_layers:
        raise ModelError(f"layer_types has {len(types)} entries for {num_layers} layers; give one per layer.")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"Layer type {reprlib.repr(sorted(unknown)[0])} is not supported; supported are full_attention and "
            "sliding_attention."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
