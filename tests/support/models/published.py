"""The layout of the published SwiftKV checkpoints, with small random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.models.checkpoints import write_byte_tokenizer

NUM_SHARDS = 5
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaSwiftKVForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 300,
    "eos_token_id": [301, 308, 309],
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "key_value_group_size": 1,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "model_type": "llama_swiftkv",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_key_value_layers": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "swiftkv": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 320,
}
"""The keys of the published config.json: float32 is named, and the tensors are bfloat16."""

COMPRESSED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"},
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 8, "strategy": "channel", "type": "float"},
        }
    },
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""quantization_config of the FP8 ones."""


def make_published(path: Path, seed: int = 0) -> Path:
    """Write a checkpoint whose layers above the cut hold the teacher's projections beside SwiftKV's, in five shards of
    bfloat16 with an index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2))
    generation = {"bos_token_id": 300, "do_sample": True, "eos_token_id": [301, 308, 309], "temperature": 0.6}
    (path / "generation_config.json").write_text(json.dumps(generation))
    write_byte_tokenizer(path, CONFIG["vocab_size"])
    tensors = _tensors(torch.Generator().manual_seed(seed))
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for index in range(NUM_SHARDS):
        file = f"model-{index + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        shard = names[index * len(names) // NUM_SHARDS : (index + 1) * len(names) // NUM_SHARDS]
        save_file({name: tensors[name] for name in shard}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.numel() * 2 for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return path


def _tensors(generator: torch.Generator) -> dict[str, Tensor]:
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        suffixes = ("", "_swiftkv") if layer >= CONFIG["num_key_value_layers"] else ("",)
        for suffix in suffixes:
            for name, width in (("q", hidden), ("k", kv), ("v", kv)):
                shapes[f"{prefix}.self_attn.{name}_proj{suffix}.weight"] = (width, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "model.norm_swiftkv.weight": (hidden,)}
    shapes["lm_head.weight"] = (vocab, hidden)
    made = {name: 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (1 + made[name] if "norm" in name else made[name]).bfloat16() for name in shapes}
