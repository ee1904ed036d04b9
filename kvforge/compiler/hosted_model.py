"""A model that kvforge does not know and another engine runs, from its ``config.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvforge.common.errors import CheckpointError
from model_defs import ModelConfig, ModelError, RopeConfig


def general_model(path: Path, hf: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the sizes of a decoder-only model by the names that most of transformers' configurations use. Its cache
    is counted as that of ordinary heads in every layer.

    Raises:
        CheckpointError: one of them is missing or no size.
    """
    text = hf.get("text_config", hf)
    text = text if isinstance(text, Mapping) else hf

    def size(*names: str, default: int | None = None) -> int:
        value = next((text[name] for name in names if text.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path}: config.json has no {names[0]}, which target vllm asks for; add it.")
        return value

    layers, heads = size("num_hidden_layers", "n_layer"), size("num_attention_heads", "n_head")
    hidden, positions = size("hidden_size", "n_embd"), size("max_position_embeddings", "n_positions")
    vocab = size("vocab_size")
    ends = [*_ids(text.get("eos_token_id")), *_ids(hf.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    try:
        return ModelConfig(
            model_type=str(hf.get("model_type")),
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=size("intermediate_size", "n_inner", "moe_intermediate_size", default=4 * hidden),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=max(hidden // heads, 1)),
            rms_norm_eps=1e-6,
            max_position=positions,
            rope=RopeConfig(),
            layer_windows=(0,) * layers,
            cut=layers,
            bos_token_id=next(iter(_ids(text.get("bos_token_id"))), None),
            eos_token_ids=tuple(token for token in dict.fromkeys(ends) if token < vocab),
        )
    except ModelError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool) and token >= 0]
