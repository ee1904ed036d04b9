"""The models of the paper (arXiv 2410.03960) with the cuts it tried, best first, and newer ones, as published."""

from dataclasses import dataclass

from model_defs import ModelConfig, RopeConfig
from model_defs.experts import Experts
from model_defs.latent import LatentAttention


@dataclass(frozen=True)
class Preset:
    """A model without a cut, and the cuts to show for it; groups are shown at the first."""

    name: str
    model: ModelConfig
    cuts: tuple[int, ...]


def _preset(
    name: str,
    sizes: tuple[int, int, int],
    heads: tuple[int, int, int],
    vocab_size: int,
    max_position: int,
    cuts: tuple[int, ...],
    *,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    latent: LatentAttention | None = None,
    experts: Experts | None = None,
) -> Preset:
    """``sizes``: layers, hidden, intermediate; ``heads``: heads, KV heads, head_dim."""
    num_layers, hidden_size, intermediate_size = sizes
    num_heads, num_kv_heads, head_dim = heads
    model = ModelConfig(
        model_type=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        max_position=max_position,
        rope=RopeConfig(),
        layer_windows=(0,) * num_layers,
        cut=num_layers,
        tie_embeddings=tied,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        latent=latent,
        experts=experts,
    )
    return Preset(name, model, cuts)


def _experts(sizes: tuple[int, int, int], layers: range, num_shared: int = 0) -> Experts:
    """``sizes``: experts, those that run, their inner size."""
    return Experts(*sizes, normalize=False, layers=tuple(layers), num_shared=num_shared)


def _latents(query_rank: int | None = None) -> LatentAttention:
    return LatentAttention(rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=query_rank)


_PRESETS = (
    _preset("llama-3.2-3b", (28, 3072, 8192), (24, 8, 128), 128256, 131072, (16, 21), tied=True),
    _preset("llama-3.1-8b", (32, 4096, 14336), (32, 8, 128), 128256, 131072, (16, 24, 12)),
    _preset("llama-3.1-70b", (80, 8192, 28672), (64, 8, 128), 128256, 131072, (40, 60)),
    _preset("llama-3.1-405b", (126, 16384, 53248), (128, 8, 128), 128256, 131072, (63,)),
    _preset("mistral-small-2409", (56, 6144, 16384), (48, 8, 128), 32768, 32768, (28,)),
    _preset("mistral-small-2501", (40, 5120, 32768), (32, 8, 128), 131072, 32768, (20,)),
    _preset("qwen2.5-7b", (28, 3584, 18944), (28, 4, 128), 152064, 32768, (21,), qkv_bias=True),
    _preset("qwen2.5-14b", (48, 5120, 13824), (40, 8, 128), 152064, 32768, (36,), qkv_bias=True),
    _preset("qwen2.5-32b", (64, 5120, 27648), (40, 8, 128), 152064, 32768, (48,), qkv_bias=True),
    _preset("qwen3-4b", (36, 2560, 9728), (32, 8, 128), 151936, 40960, (18, 27), tied=True, qk_norm=True),
    _preset("qwen3-8b", (36, 4096, 12288), (32, 8, 128), 151936, 40960, (18, 27), qk_norm=True),
    _preset("qwen3-14b", (40, 5120, 17408), (40, 8, 128), 151936, 40960, (20, 30), qk_norm=True),
    _preset("qwen3-32b", (64, 5120, 25600), (64, 8, 128), 151936, 40960, (32, 48), qk_norm=True),
    _preset(
        "qwen3-30b-a3b",
        (48, 2048, 6144),
        (32, 4, 128),
        151936,
        40960,
        (24, 36),
        qk_norm=True,
        experts=_experts((128, 8, 768), range(48)),
    ),
    _preset("phi-4-mini", (32, 3072, 8192), (24, 8, 128), 200064, 131072, (16, 24), tied=True),
    _preset("yi-1.5-9b", (48, 4096, 11008), (32, 4, 128), 64000, 4096, (24, 36)),
    _preset("yi-1.5-34b", (60, 7168, 20480), (56, 8, 128), 64000, 4096, (30, 45)),
    _preset(
        "deepseek-v2-lite",
        (27, 2048, 10944),
        (16, 1, 576),
        102400,
        163840,
        (15,),
        latent=_latents(),
        experts=_experts((64, 6, 1408), range(1, 27), num_shared=2),
    ),
    _preset(
        "deepseek-v2",
        (60, 5120, 12288),
        (128, 1, 576),
        102400,
        163840,
        (30, 45),
        latent=_latents(query_rank=1536),
        experts=_experts((160, 6, 1536), range(1, 60), num_shared=2),
    ),
)

PRESETS = {preset.name: preset for preset in _PRESETS}
"""By the name that ``--model`` takes."""
