"""Small random models in fp32 whose texts are worth comparing."""

from typing import Any

from kvforge.compiler import BuildOptions
from model_defs import ModelConfig
from model_defs.rope_config import RopeConfig
from tests.support.sessions.eager import EagerSession, random_session

LIMITS: dict[str, Any] = {"page_size": 4, "max_num_tokens": 64, "max_num_seqs": 8, "max_seq_len": 128}


def small_session(options: dict[str, Any], **changes: Any) -> EagerSession:
    """Return a Llama of 4 layers, cut at 2, with AcrossKV groups of 2, or with ``changes`` of its ModelConfig, for
    ``options`` beside ``LIMITS``. Weights are four times larger than usual, so that texts do not repeat one token and
    early exits are of all degrees of confidence."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position": 256,
        "rope": RopeConfig(),
        "cut": 2,
        "group_size": 2,
        "eos_token_ids": (2,),
    } | changes
    config = ModelConfig(**{"layer_windows": (0,) * values["num_layers"]} | values)
    return random_session(config, BuildOptions(**LIMITS | {"dtype": "float32"} | options), strength=4.0)
