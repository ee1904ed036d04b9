"""The definition of every model here in plain torch: one sequence, all tokens through all layers, no cache.

Slow and short. It reads checkpoint tensors by their Hugging Face names and shares only the configuration and the
8-bit number formats with the compiled graphs, so it can be held against them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from model_defs.channel_delta import ChannelDelta
from model_defs.config import ModelConfig
from model_defs.gated_conv import GatedConv
from model_defs.latent import LATENT_EPS
from model_defs.linear_reference import channel_delta, gated_conv, linear_attention, mamba2
from model_defs.mamba2 import Mamba2
from model_defs.rope import inverse_frequencies
from model_defs.rope_config import RopeConfig
from plugins.kv_quantization import INT4, LARGEST, dequantize, dynamic_scale, quantize
from plugins.kv_rotation import rotate_blocks


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    normed = x.float() / torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return ((weight.float() + offset) * normed).to(x.dtype) if offset else weight * normed.to(x.dtype)


def _rotate(x: Tensor, rope: RopeConfig) -> Tensor:
    """Rotate ``[heads, tokens, head_dim]`` at positions 0, 1, …, with the amplitude in cos and sin."""
    dim = rope.rotary_dim(x.shape[-1])
    angles = torch.outer(torch.arange(x.shape[1]).float(), inverse_frequencies(rope, x.shape[-1])[: dim // 2])
    cos, sin = rope.amplitude * angles.cos(), rope.amplitude * angles.sin()
    rotated, passed = x[..., :dim].float(), x[..., dim:]
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if rope.interleaved else rotated.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, -1).flatten(-2) if rope.interleaved else torch.cat(turned, -1)
    return torch.cat((joined.to(x.dtype), passed), -1)


Attend = Callable[..., Tensor]
"""Attention over the cache of an owner: of its number, rotated q ``[heads, n, d]`` and k ``[kv_heads, n, d]``, v
``[kv_heads, n, v]``, the window and, in models with sinks, the layer's, it returns ``[n, heads * v]``. Above a blind
cut ``hidden`` bool ``[n]`` says which keys nobody sees."""


def attend(
    owner: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Causal attention of ``[heads, n, d]`` over k ``[kv_heads, n, d]`` and v; see ``Attend``. ``sinks`` ``[heads]``
    are the scores of one key more, whose value is zero; ``hidden`` bool ``[n]`` are keys that nobody sees."""
    heads, tokens, head_dim = q.shape
    k, v = (x.repeat_interleave(heads // k.shape[0], dim=0) for x in (k, v))
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    seen = column <= row
    if window:
        seen &= column > row - window
    if hidden is not None:
        seen &= ~hidden
    scores = (q.float() @ k.float().transpose(1, 2)) * head_dim**-0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, tokens, 1)), -1)
    weights = scores.softmax(-1)[..., :tokens]
    return (weights @ v.float()).to(q.dtype).transpose(0, 1).flatten(1)


def _cached(x: Tensor, stored: torch.dtype | None, scale: float | None, is_rotated: bool = False) -> Tensor:
    """Return what attention reads back of K or V ``[kv_heads, tokens, head_dim]`` from a pool of ``stored``, which
    int4's is rotated in anyway."""
    if stored is None:
        return x
    if stored not in LARGEST:
        return x.to(stored).to(x.dtype)
    if stored == INT4 or is_rotated:
        rotated = rotate_blocks(x)
        scales = dynamic_scale(rotated, stored)
        return rotate_blocks(dequantize(quantize(rotated, scales[..., None], stored), scales)).to(x.dtype)
    factor = dynamic_scale(x, stored)[..., None] if scale is None else torch.tensor(scale)
    return (quantize(x, factor, stored).float() * factor).to(x.dtype)


def _mlp(config: ModelConfig, linear: Callable[[Tensor, str], Tensor], x: Tensor, name: str) -> Tensor:
    if config.activation == "relu2":
        return linear(F.relu(linear(x, f"{name}.up_proj")) ** 2, f"{name}.down_proj")
    gate, up = linear(x, f"{name}.gate_proj"), linear(x, f"{name}.up_proj")
    clamped = config.experts.gate if config.experts is not None and ".experts." in name else None
    if clamped is not None:
        low, high = up.new_tensor(-clamped.limit), up.new_tensor(clamped.limit)
        gate = torch.minimum(gate, high)
        gate, up = gate / (1 + torch.exp(-clamped.alpha * gate)), torch.maximum(torch.minimum(up, high), low) + 1
    else:
        gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
    return linear(gate * up, f"{name}.down_proj")


def _experts(
    config: ModelConfig, linear: Callable[[Tensor, str], Tensor], x: Tensor, name: str, bias: Tensor | None
) -> Tensor:
    """Every expert on every token; those that the router does not choose have weight 0. ``bias`` ``[experts]`` is added
    to what is compared."""
    assert config.experts is not None
    logits, kind = linear(x, f"{name}.gate").float(), config.experts
    probabilities = 1 / (1 + torch.exp(-logits)) if kind.by_sigmoid else logits.softmax(-1)
    compared = probabilities if bias is None else probabilities + bias.float()
    in_each = compared.unflatten(1, (kind.num_groups, -1)).sort(descending=True).values
    best = in_each[..., : 2 if kind.by_sigmoid else 1].sum(-1)
    groups = best.sort(descending=True, stable=True).indices[:, : config.experts.num_active_groups]
    in_groups = torch.zeros_like(best).scatter(1, groups, 1.0)
    of_group = in_groups.repeat_interleave(probabilities.shape[1] // best.shape[1], dim=1)
    eligible = compared.masked_fill(of_group == 0, -torch.inf)
    chosen = eligible.sort(descending=True, stable=True).indices[:, : config.experts.num_active]
    weights = torch.zeros_like(probabilities).scatter(1, chosen, probabilities.gather(1, chosen))
    if config.experts.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    parts = [_mlp(config, linear, x, f"{name}.experts.{expert}") for expert in range(config.experts.num_experts)]
    weights = weights * config.experts.scaling
    total = sum(part.float() * weights[:, expert, None] for expert, part in enumerate(parts))
    if config.experts.num_shared:
        shared = _mlp(config, linear, x, kind.shared_name(name)).float()
        if kind.shared_gate:
            shared = shared * torch.sigmoid(linear(x, f"{name}.shared_expert_gate").float())
        total = total + shared
    return total.to(x.dtype)


def _latent_kv(
    config: ModelConfig,
    linear: Callable[[Tensor, str], Tensor],
    weights: Mapping[str, Tensor],
    x: Tensor,
    name: str,
    suffix: str,
    cached: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """K ``[heads, n, d]``, rotated, and V ``[heads, n, v]`` that are made of a token's latent, where ``cached`` returns
    what attention reads back of rows ``[1, n, width]`` (DeepSeek-V2, arXiv 2405.04434, section 2.1.2)."""
    latent = config.latent
    assert latent is not None
    compressed, shared = linear(x, f"{name}.kv_a_proj_with_mqa{suffix}").split((latent.rank, latent.rope_dim), -1)
    compressed = _rms_norm(compressed, weights[f"{name}.kv_a_layernorm{suffix}.weight"], LATENT_EPS)
    rows = cached(torch.cat((compressed[None], _rotate(shared[None], config.rope)), -1))
    compressed, shared = rows.split((latent.rank, latent.rope_dim), -1)
    heads = linear(compressed[0], f"{name}.kv_b_proj{suffix}").unflatten(-1, (config.num_heads, -1)).transpose(0, 1)
    keys, values = heads.split((latent.nope_dim, latent.value_dim), -1)
    return torch.cat((keys, shared.expand(config.num_heads, -1, -1)), -1), values


def _latent_queries(
    config: ModelConfig,
    linear: Callable[[Tensor, str], Tensor],
    weights: Mapping[str, Tensor],
    x: Tensor,
    name: str,
    suffix: str,
) -> Tensor:
    """Rotated q ``[heads, n, d]``; only the last part of each rotates."""
    latent = config.latent
    assert latent is not None
    if latent.query_rank is None:
        q = linear(x, f"{name}.q_proj{suffix}")
    else:
        gain = weights[f"{name}.q_a_layernorm{suffix}.weight"]
        q = linear(_rms_norm(linear(x, f"{name}.q_a_proj{suffix}"), gain, LATENT_EPS), f"{name}.q_b_proj{suffix}")
    unrotated, rotated = (
        q.unflatten(-1, (config.num_heads, -1)).transpose(0, 1).split((latent.nope_dim, latent.rope_dim), -1)
    )
    return torch.cat((unrotated, _rotate(rotated, config.rope)), -1)


def reference_logits(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    input_ids: Tensor,
    kv_dtype: torch.dtype | tuple[torch.dtype, torch.dtype] | None = None,
    kv_scales: Sequence[tuple[float, float]] = (),
    attend: Attend = attend,
    num_prompt_tokens: int | None = None,
    rotates_keys: bool = False,
) -> Tensor:
    """Return fp32 logits ``[n, vocab]`` of one sequence ``input_ids`` ``[n]``; the cache as in ``reference_hidden``."""
    cache = (kv_dtype, kv_scales, attend, num_prompt_tokens, rotates_keys)
    last = reference_hidden(config, weights, input_ids, *cache)[-1]
    head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return _head(config, weights, last, "model.norm", head)


def reference_early_exit(config: ModelConfig, weights: Mapping[str, Tensor], input_ids: Tensor) -> Tensor:
    """Return the early exit's fp32 logits ``[n, vocab]``: its own norm and LM head on the hidden state entering the cut
    layer (arXiv 2410.03960, appendices E and F)."""
    entering = reference_hidden(config, weights, input_ids)[config.cut]
    return _head(config, weights, entering, "model.norm_early_exit", "lm_head_early_exit")


def _head(config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, norm: str, head: str) -> Tensor:
    normed = _rms_norm(hidden, weights[f"{norm}.weight"], config.rms_norm_eps, config.norm_offset)
    logits = F.linear(normed, weights[f"{head}.weight"]).float() / config.logit_divisor
    return logits if config.logit_cap is None else config.logit_cap * torch.tanh(logits / config.logit_cap)


def _own_inputs(config: ModelConfig, weights: Mapping[str, Tensor], input_ids: Tensor, embedded: Tensor) -> Tensor:
    """What each layer has of the tokens by itself, ``[n, layers, width]``: a row of a table, and a projection of the
    embedding."""
    width = config.per_layer_input
    rows = weights["model.embed_tokens_per_layer.weight"][input_ids]
    rows = (rows * torch.tensor(width**0.5, dtype=rows.dtype)).unflatten(-1, (-1, width))
    context = F.linear(embedded, weights["model.per_layer_model_projection.weight"]) * config.hidden_size**-0.5
    gain = weights["model.per_layer_projection_norm.weight"]
    return (_rms_norm(context.unflatten(-1, (-1, width)), gain, config.rms_norm_eps) + rows) * 2**-0.5


def _hidden_keys(config: ModelConfig, num_prompt_tokens: int | None, num_tokens: int) -> Tensor | None:
    """Which tokens of a sequence nobody sees above a blind cut, bool ``[n]``; raises ValueError without its prompt."""
    if not config.is_blind:
        return None
    if num_prompt_tokens is None:
        raise ValueError("a model with a blind cut needs num_prompt_tokens")
    position = torch.arange(num_tokens)
    return (position >= config.num_anchors) & (position < num_prompt_tokens - 1)


def reference_hidden(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    input_ids: Tensor,
    kv_dtype: torch.dtype | tuple[torch.dtype, torch.dtype] | None = None,
    kv_scales: Sequence[tuple[float, float]] = (),
    attend: Attend = attend,
    num_prompt_tokens: int | None = None,
    rotates_keys: bool = False,
) -> list[Tensor]:
    """Return the residual stream ``[n, hidden]`` entering each layer, and last the one that leaves the last layer.

    Above a SwiftKV cut, K and V of each group come from the group leader's projections of
    ``norm_swiftkv(hidden entering the cut)`` (arXiv 2410.03960, sections 3.2 and 3.3), for every token. With
    ``kv_dtype``, that of the cache or K's and V's, attention sees rotated K and V as such a cache returns them: a
    quantized one with a scale per token and head, or with ``kv_scales`` of each owner, and keys of int8 rotated where
    it ``rotates_keys``. ``attend`` takes the place of exact attention. A model with a blind cut is told the
    ``num_prompt_tokens`` of the sequence: all tokens go through all layers here, but above the cut no query sees the
    prompt's hidden tokens, whose own rows say nothing there.
    """
    hidden_keys = _hidden_keys(config, num_prompt_tokens, len(input_ids))
    scales: dict[int, tuple[float, float]] = dict(zip(config.owners, kv_scales, strict=True)) if kv_scales else {}
    k_dtype, v_dtype = kv_dtype if isinstance(kv_dtype, tuple) else (kv_dtype, kv_dtype)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return _rms_norm(x, weights[f"{name}.weight"], config.rms_norm_eps, config.norm_offset)

    def heads(x: Tensor, name: str, norm_name: str | None) -> Tensor:
        y = linear(x, name)
        if norm_name is not None and config.qk_norm_whole:
            y, norm_name = norm(y, norm_name), None
        y = y.unflatten(-1, (-1, config.head_dim_of(layer))).transpose(0, 1)
        return norm(y, norm_name) if norm_name is not None and config.qk_norm else y

    def before(x: Tensor, name: str) -> Tensor:
        return norm(x, name) if config.pre_norms else x

    def branch(x: Tensor, name: str) -> Tensor:
        return (norm(x, name) if config.branch_norms else x) * config.residual_scale

    def cached(rows: Tensor) -> Tensor:
        return _cached(rows, k_dtype, None)

    def attended(layer: int, owner: int, x: Tensor) -> Tensor:
        """What the layer's attention adds, of the normed stream."""
        above = layer >= config.cut and config.is_swiftkv
        suffix, gate = "_swiftkv" if above else "", None
        attention, rope = f"model.layers.{layer}.self_attn", config.rope_of(layer)
        if config.latent is not None:
            q = _latent_queries(config, linear, weights, x, attention, suffix)
        elif config.attention_gate:
            both = linear(x, f"{attention}.q_proj{suffix}").unflatten(-1, (config.num_heads, 2, -1)).transpose(0, 1)
            q, gate = norm(both[:, :, 0], f"{attention}.q_norm{suffix}"), both[:, :, 1].transpose(0, 1).flatten(1)
            q = _rotate(q, rope)
        else:
            q = _rotate(heads(x, f"{attention}.q_proj{suffix}", f"{attention}.q_norm{suffix}"), rope)
        q = q * (config.score_scale(layer) * q.shape[-1] ** 0.5)  # in place of ``attend``'s
        if (growth := config.query_growth) is not None:
            turns = torch.floor(torch.arange(len(input_ids)) / growth.length)
            q = q * (1 + growth.beta * torch.log(1 + turns))[:, None].to(q.dtype)
        source = single_input if above else x
        if owner == layer and config.latent is not None:
            shared[owner] = _latent_kv(config, linear, weights, source, attention, suffix, cached)
        elif owner == layer:
            k = heads(source, f"{attention}.k_proj{suffix}", f"{attention}.k_norm{suffix}")
            k, v = _rotate(k, rope), heads(source, f"{attention}.v_proj{suffix}", None)
            v = _rms_norm(v, torch.ones_like(v[0, 0]), config.rms_norm_eps) if config.v_norm else v
            k_scale, v_scale = scales.get(owner, (None, None))
            shared[owner] = _cached(k, k_dtype, k_scale, rotates_keys), _cached(v, v_dtype, v_scale)
        sinks = (weights[f"{attention}.sinks"],) if config.attention_sinks else ()
        masks = {"hidden": hidden_keys} if config.is_blind and layer >= config.cut else {}
        result = attend(owner, q, *shared[owner], config.layer_windows[layer], *sinks, **masks)
        return linear(result if gate is None else result * torch.sigmoid(gate), f"{attention}.o_proj")

    def mixed(layer: int, owner: int, x: Tensor) -> Tensor:
        """What the layer's attention or state adds, of the normed stream."""
        if config.linear is None or not config.is_linear(layer):
            return attended(layer, owner, x)
        mixer = f"model.layers.{layer}.{config.linear.module}"
        above = single_input if layer >= config.cut and config.is_swiftkv else None
        if isinstance(config.linear, ChannelDelta):
            result = channel_delta(config.linear, linear, weights, x, mixer, config.rms_norm_eps, above)
        elif isinstance(config.linear, GatedConv):
            result = gated_conv(linear, weights, x, mixer, above)
        elif isinstance(config.linear, Mamba2):
            result = mamba2(config.linear, linear, weights, x, mixer, config.rms_norm_eps, above)
        else:
            result = linear_attention(config.linear, linear, weights, x, mixer, config.rms_norm_eps, above)
        return linear(result, f"{mixer}.{config.linear.output}")

    def mlp(layer: int, x: Tensor) -> Tensor:
        """What the layer's MLP or experts add, of the normed stream."""
        name = f"model.layers.{layer}.mlp"
        if not config.has_experts(layer):
            return _mlp(config, linear, x, name)
        return _experts(config, linear, x, name, weights.get(f"{name}.gate.e_score_correction_bias"))

    embedded = weights["model.embed_tokens.weight"][input_ids]
    hidden = embedded * torch.tensor(config.embedding_scale, dtype=embedded.dtype)
    own_inputs = _own_inputs(config, weights, input_ids, hidden) if config.per_layer_input else hidden
    single_input = hidden
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    states: list[Tensor] = []
    for layer, owner in enumerate(config.owner_of_layer):
        prefix = f"model.layers.{layer}"
        states.append(hidden)
        if layer == config.cut and config.is_swiftkv:
            single_input = before(hidden, "model.norm_swiftkv")
        norms = config.layer_norms
        if config.has_mixer(layer):
            added = mixed(layer, owner, before(hidden, f"{prefix}.input_layernorm"))
            hidden = hidden + branch(added, f"{prefix}.{norms.of_attention}")
        if config.has_mlp(layer):
            added = mlp(layer, before(hidden, f"{prefix}.{norms.before_mlp}"))
            hidden = hidden + branch(added, f"{prefix}.{norms.of_mlp}")
        if config.per_layer_input:
            gate = F.gelu(linear(hidden, f"{prefix}.per_layer_input_gate"), approximate="tanh")
            projected = linear(gate * own_inputs[:, layer], f"{prefix}.per_layer_projection")
            hidden = hidden + norm(projected, f"{prefix}.post_per_layer_input_norm")
        if config.layer_scalar:
            hidden = hidden * weights[f"{prefix}.layer_scalar"]
    return [*states, hidden]
