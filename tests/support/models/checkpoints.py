"""Random-weight checkpoints in Hugging Face format, made by transformers and rewired to SwiftKV by hand."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from model_defs import families, load_config, supported_family
from model_defs.weights import is_teacher_only, weight_specs

ALL_FAMILIES = {
    name: (model_class.config_class, model_class)
    for name, family in families().items()
    if (model_class := getattr(transformers, family.architecture, None)) is not None
}
"""transformers' configuration and model of every family that it has."""

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "use_qk_norm": True,
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 40,
}
"""``num_experts`` and what follows say nothing to most families."""


def own_fields(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json of a family must say besides, where its defaults are models that are not there."""
    if "full_attention_interval" in families()[family].reads:
        below = fields["num_hidden_layers"] - 1
        kinds = None if below >= 3 else ["linear_attention"] * below + ["full_attention"]
        return {"layer_types": kinds}  # by default every fourth layer has K and V
    if "conv_L_cache" in families()[family].reads:
        return {"layer_types": None, "full_attn_idxs": [fields["num_hidden_layers"] - 1]}
    if "attn_layer_indices" in families()[family].reads:
        return {"attn_layer_indices": [fields["num_hidden_layers"] - 1], "mamba_n_heads": 4, "mamba_d_state": 20}
    if "hybrid_override_pattern" in families()[family].reads:
        between = (["moe", "mlp"] * fields["num_hidden_layers"])[: fields["num_hidden_layers"] - 2]
        return {
            "layer_types": ["linear_attention", *between, "full_attention"],
            **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 20, "n_shared_experts": 1},
            **{"moe_shared_expert_intermediate_size": 40, "time_step_min": 1e-30},
        }
    if "linear_attn_config" in families()[family].reads:
        below = fields["num_hidden_layers"] - 1
        kinds = ["linear_attention", "full_attention"] * below
        return {"layer_types": [*kinds[:below], "full_attention"], "linear_num_heads": 3, "linear_head_dim": 16}
    if "layers_block_type" not in families()[family].reads:
        return {}
    plain = {
        "shared_intermediate_size": 80,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 1,
    }
    return {"layer_types": ["full_attention"] * fields["num_hidden_layers"], **plain}


def keeps_states(family: str) -> bool:
    """Whether layers of its small models keep a state, so that cuts have no early exit."""
    return load_config({**SMALL, **own_fields(family, SMALL), "model_type": family}).linear is not None


FAMILIES = {
    name: classes for name, classes in ALL_FAMILIES.items() if families()[name].is_rewired and not keeps_states(name)
}
"""Those that have a SwiftKV form and a model to train, with whatever a cut may have."""

WITH_HEADS = {name: classes for name, classes in FAMILIES.items() if not hasattr(classes[0], "kv_lora_rank")}
"""Those of them whose layers have projections to K and V, which can be fitted, and no latent attention."""

MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "position_embedding_type": None,
}
"""What such a family's config.json says of four layers, some of Mamba-2."""


def write_byte_tokenizer(path: Path, vocab_size: int = 320) -> None:
    """A byte-fallback tokenizer: ids 3..258 are bytes, the rest are words t259, t260, …"""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab |= {f"t{index}": index for index in range(259, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )


def make_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    cut: int | None = None,
    group_size: int = 1,
    early_exit: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``family``; with ``cut``, in the SwiftKV format without the teacher's q/k/v, with
    ``early_exit`` also with a head at the cut.

    Weights are drawn with a standard deviation of 0.1 to 0.2, biases and norm gains included, so that no term
    of the model is invisible in the logits.
    """
    config_class, model_class = ALL_FAMILIES[family]
    fields = copy.deepcopy({**SMALL, **overrides})  # transformers writes into its arguments
    if hasattr(config_class, "kv_lora_rank"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields["head_dim"] = fields["qk_rope_head_dim"]
    fields |= {name: value for name, value in own_fields(family, fields).items() if name not in overrides}
    config = config_class(**fields)
    torch.manual_seed(seed)
    model = model_class(config)
    randomize(model)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    write_byte_tokenizer(path, config.vocab_size)
    if cut is not None:
        rewire(path, cut, group_size, seed)
    if early_exit:
        add_early_exit(path, seed)
    return path


def randomize(model: torch.nn.Module) -> None:
    """Draw a model of transformers anew, as ``make_checkpoint`` says."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            noise = torch.randn(parameter.shape) * (0.1 if parameter.dim() == 2 else 0.2)
            parameter.copy_(1 + noise if "norm" in name else noise)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn(buffer.shape))
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape))


def add_early_exit(path: Path, seed: int) -> None:
    """Give a single-file SwiftKV checkpoint a random early-exit head."""
    hf = json.loads((path / "config.json").read_text()) | {"early_exit": True}
    (path / "config.json").write_text(json.dumps(hf))
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 2)
    for name, shape in (
        ("model.norm_early_exit.weight", (hf["hidden_size"],)),
        ("lm_head_early_exit.weight", (hf["vocab_size"], hf["hidden_size"])),
    ):
        noise = 0.1 * torch.randn(shape, generator=generator)
        weights[name] = (1 + noise if len(shape) == 1 else noise).to(weights["model.norm.weight"].dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def rewire(path: Path, cut: int, group_size: int, seed: int) -> None:
    """Turn a single-file checkpoint into a SwiftKV one with random single-input projections."""
    hf = json.loads((path / "config.json").read_text())
    hf |= {
        "swiftkv": True,
        "num_key_value_layers": cut,
        "key_value_group_size": group_size,
        "model_type": hf["model_type"] + "_swiftkv",
    }
    (path / "config.json").write_text(json.dumps(hf))
    weights, config = load_weights(path), load_config(hf)
    generator = torch.Generator().manual_seed(seed + 1)
    rewired: dict[str, Tensor] = {
        "model.norm_swiftkv.weight": 1
        + 0.2 * torch.randn(hf["hidden_size"], generator=generator).to(weights["model.norm.weight"].dtype)
    }
    for name, tensor in weights.items():
        parts = name.split(".")
        is_upper = parts[1] == "layers" and int(parts[2]) >= cut
        if is_upper and config.is_linear(int(parts[2])):
            if not is_teacher_only(name, cut):
                rewired[name] = tensor
            continue
        if not (is_upper and parts[3] == "self_attn" and parts[4][:1] in "qkv"):
            rewired[name] = tensor
            continue
        layer, part = int(parts[2]), parts[4]
        if part[0] in "kv" and config.owner_of_layer[layer] != layer:
            continue
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.1
        rewired[".".join([*parts[:4], f"{part}_swiftkv", *parts[5:]])] = 1 + noise if "norm" in part else noise
    for source in {source.name: source for spec in weight_specs(config) for source in spec.sources}.values():
        if "_swiftkv." in source.name and source.name not in rewired:
            noise = torch.randn(source.shape, generator=generator) * (0.1 if len(source.shape) == 2 else 0.2)
            rewired[source.name] = noise.to(weights["model.norm.weight"].dtype)
    save_file(rewired, path / "model.safetensors", metadata={"format": "pt"})


def make_blind(path: Path, cut: int, num_anchors: int, group_size: int = 1) -> Path:
    """Give a plain checkpoint a blind cut; its tensors stay as they are."""
    hf = json.loads((path / "config.json").read_text())
    hf |= {
        "num_key_value_layers": cut,
        "key_value_group_size": group_size,
        "cut_kind": "blind",
        "num_anchor_tokens": num_anchors,
        "model_type": hf["model_type"] + "_swiftkv",
    }
    (path / "config.json").write_text(json.dumps(hf))
    return path


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by the names of ``model_defs.weights``, fused ones as their projections."""
    hf = json.loads((path / "config.json").read_text())
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    family = supported_family(hf)
    heads = (hf["num_attention_heads"], hf["num_key_value_heads"], hf["num_key_value_heads"])
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        for stored, tensor in load_file(file).items():
            name = family.weight_name(stored)
            if ".qkv_proj." in name:
                pieces = zip("qkv", tensor.split([count * head_dim for count in heads]), strict=True)
                weights |= {name.replace("qkv_proj", f"{part}_proj"): piece.clone() for part, piece in pieces}
            elif ".gate_up_proj." in name:
                pieces = zip(("gate", "up"), tensor.chunk(2), strict=True)
                weights |= {name.replace("gate_up", part): piece.clone() for part, piece in pieces}
            elif name.endswith((".gate_up_proj", ".gate_up_proj_bias", ".down_proj", ".down_proj_bias")):
                weights |= of_experts(name, tensor, family.stacked_by_outputs)
            else:
                weights[name] = tensor
    return weights


def of_experts(name: str, tensor: Tensor, by_outputs: bool = False) -> dict[str, Tensor]:
    """The weights ``[experts, inputs, outputs]`` or biases of a layer's experts, expert by expert; outputs of gate and
    up take turns. ``by_outputs`` they are ``[experts, outputs, inputs]``, all of up behind all of gate."""
    module, _, last = name.rpartition(".")
    parts = ("gate", "up") if last.startswith("gate_up") else ("down",)
    kind = "bias" if last.endswith("_bias") else "weight"
    weights = {}
    for expert, own in enumerate(tensor):
        outputs = own if kind == "bias" else own.T
        for place, part in enumerate(parts):
            if by_outputs:
                weights[f"{module}.{expert}.{part}_proj.weight"] = own.chunk(len(parts))[place].clone()
                continue
            weights[f"{module}.{expert}.{part}_proj.{kind}"] = outputs[place :: len(parts)].clone(
                memory_format=torch.contiguous_format
            )
    return weights
