"""GGUF files of Hugging Face checkpoints, written by the package ``gguf`` as llama.cpp's converter writes them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
}
"""llama.cpp's architecture of each family."""

OWN = {
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "phi3": {"sliding_window": 40},
    "gpt_oss": {"sliding_window": 32},
    "qwen3_moe": {"norm_topk_prob": True},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0625,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
    },
}
"""Fields of random checkpoints that files of the family can hold."""

_PERMUTED = ("llama", "mixtral", "smollm3", "granite")
_EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")


def write_gguf(
    directory: Path,
    file: Path,
    kind: str = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    split_max_tensors: int = 0,
    tokenizer: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Write the checkpoint in ``directory`` to ``file``, its matrices in format ``kind``; returns the tensors that the
    file stands for, float32, by their names in the checkpoint.

    ``keys`` are set, and those of ``without`` left out; ``extra`` are more tensors.
    """
    hf = json.loads((directory / "config.json").read_text())
    family = hf["model_type"]
    writer = _Writer(file, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]], split_max_tensors=split_max_tensors)
    values = {**_keys(hf), **_tokenizer_keys(hf["vocab_size"]), **(tokenizer or {}), **(keys or {})}
    for key, value in values.items():
        if key not in without and value is not None:
            _add(writer, key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], hf["num_hidden_layers"])
    read: dict[str, Tensor] = {}
    for name, tensor, restore in _tensors(hf, load_file(directory / "model.safetensors")):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        stored = stored if stored.endswith((".weight", ".bias")) else f"{stored}.weight"
        data = tensor.float().contiguous().numpy()
        qtype = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 and "ffn_gate_inp" not in stored else "F32"]
        raw = gguf.quants.quantize(data, qtype)
        writer.add_tensor(stored, raw, raw_dtype=qtype)
        read |= restore(torch.from_numpy(gguf.quants.dequantize(raw, qtype).astype(np.float32)).view(tensor.shape))
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


class _Writer(gguf.GGUFWriter):
    """Written without lines of progress."""

    def __init__(self, file: Path, architecture: str, split_max_tensors: int) -> None:
        super().__init__(file, architecture, split_max_tensors=split_max_tensors)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        write = writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64 if value < 2**63 else writer.add_uint64
        write(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _keys(hf: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a model, whose keys the writer's architecture begins."""
    family = hf["model_type"]
    prefix = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]]
    heads = hf["num_attention_heads"]
    size = hf.get("head_dim") or hf["hidden_size"] // heads
    rope = hf.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    found = {
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "block_count": hf["num_hidden_layers"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(whole.get("rope_theta", hf.get("rope_theta", 10000.0))),
        "rope.dimension_count": int(size * whole.get("partial_rotary_factor", 1.0)),
        "vocab_size": hf["vocab_size"],
    }
    if family in _EXPERT_FAMILIES:
        experts = hf.get("num_local_experts") or hf["num_experts"]
        found |= {"expert_count": experts, "expert_used_count": hf["num_experts_per_tok"]}
    if family == "qwen3_moe":
        found["expert_feed_forward_length"] = hf["moe_intermediate_size"]
    if family == "gpt_oss":
        found["expert_feed_forward_length"] = hf["intermediate_size"]
    if family in ("gemma3_text", "phi3", "gpt_oss"):
        found["attention.sliding_window"] = hf["sliding_window"]
    if family == "gemma3_text":
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if family == "granite":
        names = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
        found |= {name: hf[field] for name, field in zip(names, OWN["granite"], strict=True)}
    if whole.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": float(whole["factor"])}
    if whole.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
        found["rope.scaling.yarn_beta_fast"] = float(whole.get("beta_fast") or 32.0)
        found["rope.scaling.yarn_beta_slow"] = float(whole.get("beta_slow") or 1.0)
    return {f"{prefix}.{key}": value for key, value in found.items()}


def _tokenizer_keys(vocab_size: int) -> dict[str, Any]:
    """A SentencePiece vocabulary of bytes and words, as ``write_byte_tokenizer`` makes one."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"t{index}" for index in range(259, vocab_size)]
    types = [2, 3, 3, *[6] * 256, *[1] * (vocab_size - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-index) for index in range(vocab_size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _tensors(hf: dict[str, Any], weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield the converter's name of a tensor, the tensor as it writes it, and what makes the checkpoint's of it."""
    family = hf["model_type"]
    if hf.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    for layer in range(hf["num_hidden_layers"]) if family in _EXPERT_FAMILIES else ():
        yield from _expert_tensors(hf, weights, f"model.layers.{layer}.")
    for name, tensor in weights.items():
        heads = hf["num_attention_heads"] if "q_proj" in name else hf["num_key_value_heads"] if "k_proj" in name else 0
        if family in _PERMUTED and heads:
            paired = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            yield name, paired, lambda t, n=name, h=heads: {n: _unpaired(t, h)}
        elif family == "gemma3_text" and name.endswith("norm.weight"):
            yield name, tensor + 1, lambda t, n=name: {n: t - 1}
        else:
            yield name if not name.endswith("sinks") else f"{name}.weight", tensor, lambda t, n=name: {n: t}


def _unpaired(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _expert_tensors(hf: dict[str, Any], weights: dict[str, Tensor], layer: str) -> Iterator[tuple[str, Tensor, Any]]:
    """Take the experts of a layer out of ``weights``, and yield their projections, each as one tensor."""
    if hf["model_type"] == "gpt_oss":
        yield from _interleaved_experts(weights, layer)
        return
    ends = {"mixtral": ("block_sparse_moe.experts", ("w1", "w2", "w3"))}
    prefix, projections = ends.get(hf["model_type"], ("mlp.experts", ("gate_proj", "down_proj", "up_proj")))
    merged = dict(zip(projections, ("gate_proj", "down_proj", "up_proj"), strict=True))
    count = hf.get("num_local_experts") or hf["num_experts"]
    for projection in projections:
        names = [f"{layer}{prefix}.{expert}.{projection}.weight" for expert in range(count)]
        whole = torch.stack([weights.pop(name) for name in names])
        restore = lambda t, n=names: dict(zip(n, t, strict=True))  # noqa: E731
        yield f"{layer}mlp.experts.{merged[projection]}.weight", whole, restore


def _interleaved_experts(weights: dict[str, Tensor], layer: str) -> Iterator[tuple[str, Tensor, Any]]:
    """Those of tensors ``[experts, inputs, outputs]``, gate and up by turns."""
    whole = weights.pop(f"{layer}mlp.experts.gate_up_proj").transpose(1, 2)
    bias = weights.pop(f"{layer}mlp.experts.gate_up_proj_bias")
    down = weights.pop(f"{layer}mlp.experts.down_proj").transpose(1, 2)
    down_bias = weights.pop(f"{layer}mlp.experts.down_proj_bias")
    parts = {
        "gate_proj.weight": whole[:, 0::2],
        "up_proj.weight": whole[:, 1::2],
        "gate_proj.bias": bias[:, 0::2],
        "up_proj.bias": bias[:, 1::2],
        "down_proj.weight": down,
        "down_proj.bias": down_bias,
    }
    for name, part in parts.items():
        projection, kind = name.split(".")
        yield (
            f"{layer}mlp.experts.{name}",
            part.contiguous(),
            lambda t, p=projection, k=kind: {
                f"{layer}mlp.experts.{expert}.{p}.{k}": each for expert, each in enumerate(t)
            },
        )
