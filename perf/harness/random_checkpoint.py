"""Write a random-weight checkpoint of any supported shape, plain or with a SwiftKV cut, without transformers.

    python -m perf.harness.random_checkpoint DIR --cut 8 --group-size 4

The default is the Llama shape that the project's peers are measured on: 16 layers of 1024, 213M parameters.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from model_defs import load_config
from model_defs.weights import weight_specs
from perf.harness.command import make_parser

LLAMA_213M: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 16384, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072 + 1024, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
"""Llama-3.1-8B's, without its scaled rotations and special tokens."""

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3-30B-A3B's; an eighth of it has 6 layers."""

GEMMA4_E2B: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "hidden_size": 1536,
    "intermediate_size": 6144, "num_hidden_layers": 35, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "hidden_size_per_layer_input": 256, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "sliding_window": 512, "final_logit_softcapping": 30.0, "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
"""The text model of Gemma 4 E2B; most of its parameters are the tables that its token ids look up."""

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
"""DeepSeek-V2-Lite's; 2 of its layers, one of them dense, are 7% of its parameters."""


def with_cut(hf_config: Mapping[str, Any], cut: int | None, group_size: int = 1) -> dict[str, Any]:
    """Return the config of the model with a SwiftKV cut; a cut of None leaves it as it is."""
    if cut is None:
        return dict(hf_config)
    swiftkv = {"swiftkv": True, "num_key_value_layers": cut, "key_value_group_size": group_size}
    return {**hf_config, "model_type": f"{hf_config['model_type']}_swiftkv", **swiftkv}


def write_checkpoint(
    path: Path, hf_config: Mapping[str, Any], cut: int | None = None, group_size: int = 1, seed: int = 0
) -> Path:
    """Write config.json, bf16 weights (normal, standard deviation 1/sqrt(fan-in), norm gains 1) and a tokenizer
    with one token per id; ``cut`` and ``group_size`` make it a SwiftKV checkpoint. Returns ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    hf = with_cut(hf_config, cut, group_size)
    (path / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
    sources = {source.name: source for spec in weight_specs(load_config(hf)) for source in spec.sources}
    generator = torch.Generator().manual_seed(seed)

    def produce(spec: TensorSpec) -> Tensor:
        if len(spec.shape) == 1:
            return torch.ones(spec.shape, dtype=spec.dtype)
        return (torch.randn(spec.shape, generator=generator) / math.sqrt(spec.shape[1])).to(spec.dtype)

    specs = [TensorSpec(source.name, source.shape, torch.bfloat16) for source in sources.values()]
    write_safetensors(path / "model.safetensors", specs, produce)
    _write_tokenizer(path, hf["vocab_size"])
    return path


def cached_checkpoint(path: Path, hf_config: Mapping[str, Any], cut: int | None = None, group_size: int = 1) -> Path:
    """As ``write_checkpoint``, unless it is there already: the tokenizer is written last."""
    if not (path / "tokenizer.json").is_file():
        write_checkpoint(path, hf_config, cut, group_size)
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = make_parser(__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--cut", type=int)
    parser.add_argument("--group-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_checkpoint(args.path, LLAMA_213M, args.cut, args.group_size, args.seed))


if __name__ == "__main__":
    main()
