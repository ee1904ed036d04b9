"""A transformer block, and K and V of all owners above the cut, of vLLM's tensor-parallel layers.

Modules are named as the tensors of ``model_defs.weights``. T is packed tokens, of several sequences.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope

from model_defs import ModelConfig


def rotary(config: ModelConfig, vllm_config: VllmConfig) -> nn.Module:
    """Return the family's rotation of q and k, from the checkpoint's own parameters."""
    parameters = vllm_config.model_config.hf_config.rope_parameters
    rope: nn.Module = get_rope(config.head_dim, max_position=config.max_position, rope_parameters=parameters)
    return rope


def attention(
    config: ModelConfig, vllm_config: VllmConfig, name: str, window: int, owner_name: str | None = None
) -> Attention:
    """Return this rank's heads of an attention layer; with ``owner_name`` it reads that layer's cache."""
    size = get_tensor_model_parallel_world_size()
    return Attention(
        config.num_heads // size,
        config.head_dim,
        config.head_dim**-0.5,
        num_kv_heads=config.num_kv_heads // size,
        cache_config=vllm_config.cache_config,
        per_layer_sliding_window=window or None,
        prefix=name,
        kv_sharing_target_layer_name=owner_name,
    )


def norm_heads(norm: RMSNorm, x: Tensor, head_dim: int) -> Tensor:
    """Norm each head of ``[T, heads * head_dim]``."""
    return norm(x.unflatten(-1, (-1, head_dim)).contiguous()).flatten(-2)


class VllmBlock(nn.Module):
    """Layer ``layer``: below the cut it has q, k and v, above it q alone, and reads the cache of ``owner_name``."""

    def __init__(self, config: ModelConfig, vllm_config: VllmConfig, layer: int, owner_name: str | None = None) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.has_kv = owner_name is None
        size = get_tensor_model_parallel_world_size()
        self.q_dim, self.kv_dim = config.q_dim // size, config.kv_dim // size
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.input_norm = RMSNorm(hidden, eps)
        if self.has_kv:
            self.qkv = QKVParallelLinear(hidden, config.head_dim, heads, kv_heads, bias=config.qkv_bias)
        else:
            self.q = ColumnParallelLinear(hidden, config.q_dim, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps)
            if layer in config.owners:
                self.k_norm = RMSNorm(config.head_dim, eps)
        self.rope = rotary(config, vllm_config)
        self.attn = attention(
            config, vllm_config, f"model.layers.{layer}.self_attn.attn", config.layer_windows[layer], owner_name
        )
        self.o = RowParallelLinear(config.q_dim, hidden, bias=config.output_bias)
        self.post_norm = RMSNorm(hidden, eps)
        self.gate_up = MergedColumnParallelLinear(hidden, [inner, inner], bias=config.mlp_bias)
        self.silu_and_mul = SiluAndMul()
        self.down = RowParallelLinear(inner, hidden, bias=config.mlp_bias)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Return the hidden state ``[T, hidden]`` behind the layer; ``positions`` int64 ``[T]``."""
        x = self.input_norm(hidden)
        k = v = None
        if self.has_kv:
            q, k, v = self.qkv(x)[0].split([self.q_dim, self.kv_dim, self.kv_dim], dim=-1)
        else:
            q = self.q(x)[0]
        if self.config.qk_norm:
            q = norm_heads(self.q_norm, q, self.config.head_dim)
            k = norm_heads(self.k_norm, k, self.config.head_dim) if k is not None else None
        if k is not None:
            q, k = self.rope(positions, q.contiguous(), k.contiguous())
        else:
            q, _ = self.rope(positions, q.contiguous(), torch.zeros_like(q[:, : self.kv_dim]))
        hidden = hidden + self.o(self.attn(q, k, v))[0]
        x = self.gate_up(self.post_norm(hidden))[0]
        return hidden + self.down(self.silu_and_mul(x))[0]


class VllmSingleInputKV(nn.Module):
    """K and V of every owner above the cut from the hidden state that enters it, in one product, into their caches.

    Each owner's cache belongs to an attention layer that never attends. These layers are made before those above the
    cut, and those all share: vLLM drops prompt tokens in the layers at the end that own no cache.
    """

    def __init__(self, config: ModelConfig, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.config = config
        self.kv_heads = config.num_kv_heads // get_tensor_model_parallel_world_size()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        outputs = [config.kv_dim] * (2 * len(config.upper_owners))
        self.kv = MergedColumnParallelLinear(config.hidden_size, outputs, bias=config.qkv_bias)
        self.rope = rotary(config, vllm_config)
        self.caches = nn.ModuleList(
            attention(config, vllm_config, self.cache_name(owner), self._window(owner)) for owner in config.upper_owners
        )
        for cache in self.caches:
            if cache.attn_backend.forward_includes_kv_cache_update:
                raise ValueError(
                    f"the attention backend {cache.attn_backend.get_name()} writes K and V only where it attends, and "
                    "SwiftKV writes them alone; choose another one with --attention-backend."
                )

    @staticmethod
    def cache_name(owner: int) -> str:
        """Return the name that vLLM knows an owner's cache by."""
        return f"model.layers.{owner}.swiftkv_cache.attn"

    def _window(self, owner: int) -> int:
        """The largest window of the layers that read the cache, 0 where one of them sees all."""
        readers = enumerate(self.config.owner_of_layer)
        windows = [self.config.layer_windows[layer] for layer, of in readers if of == owner]
        return 0 if 0 in windows else max(windows)

    def forward(self, positions: Tensor, hidden: Tensor, k_norms: Mapping[int, nn.Module]) -> None:
        """Write K and V of ``[T, hidden]``; ``k_norms`` are those of the owners, where the family has any."""
        head_shape = (self.kv_heads, self.config.head_dim)
        parts = self.kv(self.norm(hidden))[0].chunk(2 * len(self.caches), dim=-1)
        for owner, cache, k, v in zip(self.config.upper_owners, self.caches, parts[0::2], parts[1::2], strict=True):
            if owner in k_norms:
                k = norm_heads(k_norms[owner], k, self.config.head_dim)
            k, _ = self.rope(positions, k.contiguous(), torch.zeros_like(k))
            keys, values = k.unflatten(-1, head_shape), v.contiguous().unflatten(-1, head_shape)
            unified_kv_cache_update(keys, values, cache.layer_name)
