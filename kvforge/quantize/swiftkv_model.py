"""SwiftKV models as a torch module for calibration: Hugging Face parameter names, one sequence, no cache.

transformers does not know ``<family>_swiftkv``. This module has what ModelOpt asks of a model (``nn.Linear`` layers
to quantize, ``config``, ``device``, ``save_pretrained``), for every family in ``model_defs``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.checkpoint import Checkpoint
from model_defs import ModelConfig
from model_defs.layers import RMSNorm
from model_defs.rope import apply_rope, rope_cos_sin


class SwiftKVAttention(nn.Module):
    """The projections of one layer; above the cut those of SwiftKV, with k and v in the group's owner only."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.shape = (-1, config.head_dim)
        self.window = config.layer_windows[layer]
        self.is_owner = layer in config.owners
        self.suffix = suffix = "_swiftkv" if layer >= config.cut else ""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.add_module(f"q_proj{suffix}", nn.Linear(hidden, config.q_dim, config.qkv_bias))
        if self.is_owner:
            self.add_module(f"k_proj{suffix}", nn.Linear(hidden, config.kv_dim, config.qkv_bias))
            self.add_module(f"v_proj{suffix}", nn.Linear(hidden, config.kv_dim, config.qkv_bias))
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.add_module(f"q_norm{suffix}", RMSNorm(config.head_dim, eps))
            if self.is_owner:
                self.add_module(f"k_norm{suffix}", RMSNorm(config.head_dim, eps))
        self.o_proj = nn.Linear(config.q_dim, hidden, config.output_bias)

    def _heads(self, x: Tensor, part: str, norm: bool) -> Tensor:
        y = self.get_submodule(f"{part}_proj{self.suffix}")(x).unflatten(-1, self.shape)
        return self.get_submodule(f"{part}_norm{self.suffix}")(y) if norm and self.qk_norm else y

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache gives back for rotated K and V ``[T, kv_heads, head_dim]``; ModelOpt's face overrides it."""
        return k, v

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated K, and V, each ``[T, kv_heads, head_dim]``, of normalised ``x`` ``[T, hidden]``."""
        return self.cached(apply_rope(self._heads(x, "k", True), cos, sin), self._heads(x, "v", False))

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from normalised ``x`` ``[T, hidden]``; returns the same shape."""
        q = apply_rope(self._heads(x, "q", True), cos, sin).transpose(0, 1)
        repeats = q.shape[0] // kv[0].shape[1]
        k, v = (t.transpose(0, 1).repeat_interleave(repeats, dim=0) for t in kv)
        length = x.shape[0]
        mask = None
        if 0 < self.window < length:
            distance = torch.arange(length, device=x.device)[:, None] - torch.arange(length, device=x.device)
            mask = (distance >= 0) & (distance < self.window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden]`` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The parameters of one transformer layer; the decoder calls them in order."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SwiftKVAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Decoder(nn.Module):
    """Embedding, layers and norms: the ``model.`` of a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.sizes = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_swiftkv:
            self.norm_swiftkv = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the normalised hidden states ``[T, hidden]`` of ``input_ids`` ``[T]``."""
        config = self.sizes
        positions = torch.arange(input_ids.shape[0], device=input_ids.device)
        cos, sin = rope_cos_sin(positions, config.rope.inverse_frequencies(config.head_dim).to(input_ids.device))
        hidden = single_input = self.embed_tokens(input_ids)
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for index, (layer, owner) in enumerate(zip(self.layers, config.owner_of_layer, strict=True)):
            if index == config.cut:
                single_input = self.norm_swiftkv(hidden)
            x = layer.input_layernorm(hidden)
            if owner == index:
                source = single_input if index >= config.cut else x
                shared[owner] = layer.self_attn.key_value(source, cos, sin)
            hidden = hidden + layer.self_attn(x, shared[owner], cos, sin)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)


class SwiftKVForCausalLM(nn.Module):
    """A SwiftKV model that ModelOpt quantizes and exports as it does transformers' models."""

    def __init__(self, config: ModelConfig, hf_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.hf_config = dict(hf_config)
        self.config = SimpleNamespace(torch_dtype=dtype, is_encoder_decoder=False, use_cache=False)
        self.model = Decoder(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits ``[1, T, vocab]`` of ``input_ids`` ``[1, T]``."""
        hidden = self.model(input_ids[0])
        head = self.lm_head(hidden) if hasattr(self, "lm_head") else F.linear(hidden, self.model.embed_tokens.weight)
        return head[None]

    def save_pretrained(
        self, directory: str | Path, state_dict: Mapping[str, Tensor], max_shard_size: int | str = "10GB", **_: Any
    ) -> None:
        """Write config.json and the weights; scales of the cache are named after SwiftKV's projections."""
        from huggingface_hub import save_torch_state_dict

        (Path(directory) / "config.json").write_text(json.dumps(self.hf_config, indent=2) + "\n", encoding="utf-8")
        weights = {self._name_of_scale(name): tensor for name, tensor in state_dict.items()}
        save_torch_state_dict(weights, directory, max_shard_size=max_shard_size)

    def _name_of_scale(self, name: str) -> str:
        if not name.endswith((".k_scale", ".v_scale")):
            return name
        attention, projection, scale = name.rsplit(".", 2)
        suffix = self.get_submodule(attention).suffix
        return f"{attention}.{projection}{suffix}.{scale}"


def load_swiftkv(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> SwiftKVForCausalLM:
    """Return the model of a checkpoint in ``dtype``; the teacher's unused projections are left out.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    with torch.device("meta"):
        model = SwiftKVForCausalLM(config, checkpoint.hf_config, dtype)
    weights = {
        name: checkpoint.read(name, tuple(tensor.shape)).to(dtype) for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    return model.eval()
