"""Plain-torch Llama and SwiftKV forward over whole sequences, differentiable: all tokens through all layers.

Parameter names are those of Hugging Face checkpoints. With `cut < num_layers` the layers from `cut` on take
their keys and values from the residual stream entering layer `cut` (SwiftKV, arXiv 2410.03960, section 3.2),
and each group of `group_size` of them shares one key/value pair (AcrossKV, section 3.3).
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `cut == num_layers` means a plain Llama."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_position: int = 2048
    cut: int = 8
    group_size: int = 1

    def leader(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads."""
        if layer < self.cut:
            return layer
        return layer - (layer - self.cut) % self.group_size

    def with_cut(self, cut: int, group_size: int) -> "ModelConfig":
        return ModelConfig(**{**asdict(self), "cut": cut, "group_size": group_size})


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale * self.weight.float()).to(x.dtype)


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin [length, head_dim] fp32, both halves alike ("rotate half" pairing)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, head_dim] rotated to its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention over [B, heads, T, head_dim]; written out where that is faster on a CPU."""
    length = q.shape[2]
    if length > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    future = torch.full((length, length), -1e9, dtype=scores.dtype, device=q.device).triu(1)
    return (scores + future).softmax(-1) @ v.to(scores.dtype)


class Attention(nn.Module):
    """The projections of one layer; past the cut, those of SwiftKV instead of the teacher's."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.swiftkv = layer >= config.cut
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        if self.swiftkv:
            self.q_proj_swiftkv = nn.Linear(hidden, q_size, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, q_size, bias=False)
        if self.swiftkv and config.leader(layer) == layer:
            self.k_proj_swiftkv = nn.Linear(hidden, kv_size, bias=False)
            self.v_proj_swiftkv = nn.Linear(hidden, kv_size, bias=False)
        elif not self.swiftkv:
            self.k_proj = nn.Linear(hidden, kv_size, bias=False)
            self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden], normalised -> rotated K and V, each [B, kv_heads, T, head_dim]."""
        batch, length, _ = x.shape
        k_proj, v_proj = (self.k_proj_swiftkv, self.v_proj_swiftkv) if self.swiftkv else (self.k_proj, self.v_proj)
        shape = (batch, length, self.config.num_kv_heads, self.config.head_dim)
        k, v = k_proj(x).view(shape).transpose(1, 2), v_proj(x).view(shape).transpose(1, 2)
        return rotate(k, cos, sin), v

    def forward(self, x: Tensor, key_value: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q_proj = self.q_proj_swiftkv if self.swiftkv else self.q_proj
        q = q_proj(x).view(batch, length, self.config.num_heads, self.config.head_dim).transpose(1, 2)
        repeats = self.config.num_heads // self.config.num_kv_heads
        k, v = (t.repeat_interleave(repeats, dim=1) for t in key_value)
        out = causal_attention(rotate(q, cos, sin), k, v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, key_value: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor) -> Tensor:
        """h [B, T, hidden]; without `key_value` the layer computes its own."""
        x = self.input_layernorm(h)
        if key_value is None:
            key_value = self.self_attn.key_value(x, cos, sin)
        h = h + self.self_attn(x, key_value, cos, sin)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(nn.Module):
    """Embedding, layers and final norm: the `model.` of a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if config.cut < config.num_layers:
            self.norm_swiftkv = RMSNorm(config.hidden_size, config.norm_eps)
        cos, sin = rope_tables(config.max_position, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def lower(self, input_ids: Tensor, stop: int | None = None) -> Tensor:
        """input_ids [B, T] -> residual stream entering layer `stop` (by default the cut) [B, T, hidden]."""
        cos, sin = self.cos[: input_ids.shape[1]], self.sin[: input_ids.shape[1]]
        h = self.embed_tokens(input_ids)
        for layer in self.layers[: self.config.cut if stop is None else stop]:
            h = layer(h, None, cos, sin)
        return h

    def upper(self, h: Tensor, start: int | None = None) -> tuple[Tensor, Tensor]:
        """Layers from `start` (by default the cut; at most the cut) on.

        Returns the normalised output and the residual stream entering the last layer, each [B, T, hidden].
        """
        cos, sin = self.cos[: h.shape[1]], self.sin[: h.shape[1]]
        last, shared = h, None
        for i in range(self.config.cut if start is None else start, self.config.num_layers):
            layer, last = self.layers[i], h
            if i == self.config.cut:
                x = self.norm_swiftkv(h)
            if i >= self.config.cut and self.config.leader(i) == i:
                shared = layer.self_attn.key_value(x, cos, sin)
            h = layer(h, shared, cos, sin)
        return self.norm(h), last

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.upper(self.lower(input_ids))[0]


class LanguageModel(nn.Module):
    """A causal language model with tied embeddings; `state_dict` keys are Hugging Face names."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def head(self, hidden: Tensor) -> Tensor:
        """Normalised hidden states [..., hidden] -> logits [..., vocab]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] -> logits [B, T, vocab]."""
        return self.head(self.model(input_ids))
