"""The models of the paper (arXiv 2410.03960) with the cuts it tried, best first, and newer ones, as published."""

import dataclasses
from dataclasses import dataclass

from kvforge.costs.shape import Experts, LatentAttention, ModelShape, dense_parameters


@dataclass(frozen=True)
class Preset:
    """A model without a cut, and the cuts to show for it; groups are shown at the first."""

    shape: ModelShape
    cuts: tuple[int, ...]


def _shape(
    model: str,
    sizes: tuple[int, int, int],
    heads: tuple[int, int, int],
    vocab_size: int,
    max_position: int,
    *,
    tied: bool = False,
    qkv_bias: bool = False,
    k_norm: bool = False,
    latent: LatentAttention | None = None,
    experts: Experts | None = None,
) -> ModelShape:
    """``sizes``: layers, hidden, intermediate; ``heads``: heads, KV heads, head_dim."""
    num_layers, hidden_size, intermediate_size = sizes
    num_heads, num_kv_heads, head_dim = heads
    bare = ModelShape(
        model=model,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        layer_windows=(0,) * num_layers,
        cut=num_layers,
        owner_of_layer=tuple(range(num_layers)),
        base_parameters=0,
        kv_bias=qkv_bias,
        k_norm=k_norm,
        latent=latent,
        experts=experts,
    )
    return dataclasses.replace(bare, base_parameters=dense_parameters(bare, tied=tied, q_bias=qkv_bias))


_PRESETS = (
    Preset(_shape("llama-3.2-3b", (28, 3072, 8192), (24, 8, 128), 128256, 131072, tied=True), (16, 21)),
    Preset(_shape("llama-3.1-8b", (32, 4096, 14336), (32, 8, 128), 128256, 131072), (16, 24, 12)),
    Preset(_shape("llama-3.1-70b", (80, 8192, 28672), (64, 8, 128), 128256, 131072), (40, 60)),
    Preset(_shape("llama-3.1-405b", (126, 16384, 53248), (128, 8, 128), 128256, 131072), (63,)),
    Preset(_shape("mistral-small-2409", (56, 6144, 16384), (48, 8, 128), 32768, 32768), (28,)),
    Preset(_shape("mistral-small-2501", (40, 5120, 32768), (32, 8, 128), 131072, 32768), (20,)),
    Preset(_shape("qwen2.5-7b", (28, 3584, 18944), (28, 4, 128), 152064, 32768, qkv_bias=True), (21,)),
    Preset(_shape("qwen2.5-14b", (48, 5120, 13824), (40, 8, 128), 152064, 32768, qkv_bias=True), (36,)),
    Preset(_shape("qwen2.5-32b", (64, 5120, 27648), (40, 8, 128), 152064, 32768, qkv_bias=True), (48,)),
    Preset(_shape("qwen3-4b", (36, 2560, 9728), (32, 8, 128), 151936, 40960, tied=True, k_norm=True), (18, 27)),
    Preset(_shape("qwen3-8b", (36, 4096, 12288), (32, 8, 128), 151936, 40960, k_norm=True), (18, 27)),
    Preset(_shape("qwen3-14b", (40, 5120, 17408), (40, 8, 128), 151936, 40960, k_norm=True), (20, 30)),
    Preset(_shape("qwen3-32b", (64, 5120, 25600), (64, 8, 128), 151936, 40960, k_norm=True), (32, 48)),
    Preset(
        _shape(
            "qwen3-30b-a3b",
            (48, 2048, 6144),
            (32, 4, 128),
            151936,
            40960,
            k_norm=True,
            experts=Experts(num_routed=128, num_active=8, num_shared=0, intermediate_size=768, dense_layers=()),
        ),
        (24, 36),
    ),
    Preset(_shape("phi-4-mini", (32, 3072, 8192), (24, 8, 128), 200064, 131072, tied=True), (16, 24)),
    Preset(_shape("yi-1.5-9b", (48, 4096, 11008), (32, 4, 128), 64000, 4096), (24, 36)),
    Preset(_shape("yi-1.5-34b", (60, 7168, 20480), (56, 8, 128), 64000, 4096), (30, 45)),
    Preset(
        _shape(
            "deepseek-v2-lite",
            (27, 2048, 10944),
            (16, 16, 128),
            102400,
            163840,
            latent=LatentAttention(rank=512, rope_dim=64, nope_dim=128, value_dim=128),
            experts=Experts(num_routed=64, num_active=6, num_shared=2, intermediate_size=1408, dense_layers=(0,)),
        ),
        (15,),
    ),
    Preset(
        _shape(
            "deepseek-v2",
            (60, 5120, 12288),
            (128, 128, 128),
            102400,
            163840,
            latent=LatentAttention(rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=1536),
            experts=Experts(num_routed=160, num_active=6, num_shared=2, intermediate_size=1536, dense_layers=(0,)),
        ),
        (30, 45),
    ),
)

PRESETS = {preset.shape.model: preset for preset in _PRESETS}
"""By the name that ``--model`` takes."""
