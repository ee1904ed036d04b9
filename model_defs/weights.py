"""Where each engine tensor comes from in a Hugging Face checkpoint, and its shape.

Engine tensors are named as the graphs' parameters; projections that read the same input are fused by
concatenation along dim 0. The teacher's q, k and v of layers above a SwiftKV cut have no entry here, so they
are never read.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from model_defs.channel_delta import ChannelDelta
from model_defs.config import ModelConfig
from model_defs.gated_conv import GatedConv
from model_defs.latent import LatentAttention
from model_defs.linear import LinearAttention
from model_defs.mamba2 import Mamba2
from model_defs.rope_config import RotaryRows

SCALAR_COPIES = 16
"""How often an engine has a layer's scalar, or its few numbers of heads and experts: compiling takes tensors of up to 8
elements for constants of the code."""

FLOAT32 = frozenset({"score_bias", "decay_log", "decay_bias", "skip"})
"""Tensors that engines have in float32 whatever they compute in, by the last part of their names."""

_PROJECTION = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.([qkv]_(proj|norm|conv1d)|(b|f_a|g_a)_proj|(q|kv)_(a_proj(_with_mqa)?|a_layernorm|b_proj))\."
)
_OF_STATE = re.compile(r"model\.layers\.(\d+)\.linear_attn\.(in_proj(_(qkvz|ba|qkv|z|b|a))?|conv1d)\.")
_ROTATED = re.compile(r"\.(\d+)\.self_attn\.([qk])_(proj|norm)(_swiftkv)?\.")
_NORM = re.compile(r"(?<!linear_attn\.)norm(_swiftkv|_early_exit)?\.weight$")
_LATENT = re.compile(r"\.self_attn\.(q_proj|q_b_proj|kv_a_proj_with_mqa)(_swiftkv)?\.weight$")


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``stop`` of a tensor, ``transposed`` as columns, all dimensions in the other order."""

    start: int
    stop: int
    transposed: bool = False


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor, the shape it must have, and how its rows become the engine's where they do not stay; first
    ``offset`` is added to its elements. With ``rows`` only those are taken."""

    name: str
    shape: tuple[int, ...]
    rotary: RotaryRows | None = None
    offset: float = 0.0
    rows: Rows | None = None

    @property
    def taken_shape(self) -> tuple[int, ...]:
        """The shape of what the engine takes of it."""
        if self.rows is None:
            return self.shape
        taken = (self.rows.stop - self.rows.start, *self.shape[1:])
        return taken[::-1] if self.rows.transposed else taken


@dataclass(frozen=True)
class WeightSpec:
    """One engine tensor: its sources, concatenated along dim 0.

    With ``stacked`` it is so many matrices, each of as many sources, one after the other.
    """

    name: str
    sources: tuple[Source, ...]
    stacked: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the fused tensor."""
        if self.stacked:
            return (self.stacked, *self.matrices[0].shape)
        taken = [source.taken_shape for source in self.sources]
        return (sum(shape[0] for shape in taken), *taken[0][1:])

    @property
    def num_parameters(self) -> int:
        """Numbers of the model in it; of a tensor that is a source several times, each once."""
        return sum(math.prod(source.taken_shape) for source in dict.fromkeys(self.sources))

    @property
    def matrices(self) -> "tuple[WeightSpec, ...]":
        """The matrices that are stacked, or the tensor itself."""
        each = len(self.sources) // max(self.stacked, 1)
        return tuple(
            WeightSpec(self.name, self.sources[first : first + each]) for first in range(0, len(self.sources), each)
        )


def _linear(name: str, sources: list[tuple[str, int]], columns: int, bias: bool) -> Iterator[WeightSpec]:
    """Yield the weight and, where there is one, the bias of a fused projection of ``columns`` inputs."""
    yield WeightSpec(f"{name}.weight", tuple(Source(f"{src}.weight", (rows, columns)) for src, rows in sources))
    if bias:
        yield WeightSpec(f"{name}.bias", tuple(Source(f"{src}.bias", (rows,)) for src, rows in sources))


def _norm(name: str, source: str, size: int) -> WeightSpec:
    return WeightSpec(f"{name}.weight", (Source(f"{source}.weight", (size,)),))


def _copied(name: str, source: Source) -> WeightSpec:
    return WeightSpec(name, (source,) * SCALAR_COPIES)


def _experts(config: ModelConfig, name: str, source: str) -> Iterator[WeightSpec]:
    """Yield the router, and of all experts the fused gate and up projections, or those up alone, and those down."""
    assert config.experts is not None
    hidden, inner, count = config.hidden_size, config.experts.intermediate_size, config.experts.num_experts
    yield from _linear(f"{name}.router", [(f"{source}.gate", count)], hidden, False)
    parts = (("gate_up", config.mlp_inputs, (inner, hidden)), ("down", ("down",), (hidden, inner)))
    for part, projections, shape in parts:
        names = [f"{source}.experts.{expert}.{one}_proj.weight" for expert in range(count) for one in projections]
        yield WeightSpec(f"{name}.{part}.weight", tuple(Source(each, shape) for each in names), count)
        if config.experts.bias:
            biases = tuple(Source(f"{each.removesuffix('weight')}bias", shape[:1]) for each in names)
            yield WeightSpec(f"{name}.{part}_bias", biases, count)
    if config.experts.bias:
        yield _copied(f"{name}.router_bias", Source(f"{source}.gate.bias", (count,)))
    if config.experts.by_sigmoid:
        yield _copied(f"{name}.score_bias", Source(f"{source}.gate.e_score_correction_bias", (count,)))
    if shared := config.experts.shared_size:
        module = config.experts.shared_name(source)
        gate_up = [(f"{module}.{one}_proj", shared) for one in config.mlp_inputs]
        yield from _linear(f"{name}.shared_gate_up", gate_up, hidden, False)
        yield from _linear(f"{name}.shared_down", [(f"{module}.down_proj", hidden)], shared, False)
    if config.experts.shared_gate:
        yield from _linear(f"{name}.shared_gate", [(f"{source}.shared_expert_gate", 1)], hidden, False)


def _attention(config: ModelConfig, layer: int, name: str, source: str, suffix: str) -> Iterator[WeightSpec]:
    """Yield what makes a layer's q, and its k and v where they are its own."""
    hidden, q_dim, kv_dim = config.hidden_size, config.projected_q_dim_of(layer), config.kv_dim_of(layer)
    has_own_kv = config.has_own_kv(layer)
    projections = [(f"{source}.q_proj{suffix}", q_dim)]
    if has_own_kv:
        projections += [(f"{source}.k_proj", kv_dim), (f"{source}.v_proj", kv_dim)]
    yield from _linear(f"{name}.{'qkv' if has_own_kv else 'q'}", projections, hidden, config.qkv_bias)
    if config.qk_norm:
        of_head, whole = config.head_dim_of(layer), config.qk_norm_whole
        yield _norm(f"{name}.q_norm", f"{source}.q_norm{suffix}", q_dim if whole else of_head)
        if layer in config.owners:
            yield _norm(f"{name}.k_norm", f"{source}.k_norm{suffix}", kv_dim if whole else of_head)


def _latent_attention(
    config: ModelConfig, latent: LatentAttention, layer: int, name: str, source: str, suffix: str
) -> Iterator[WeightSpec]:
    """Yield the same of latent attention, with the matrices of the heads, a part of one tensor for each."""
    hidden, q_dim, rank = config.hidden_size, config.q_dim_of(layer), latent.rank
    has_own_kv, query_rank = config.has_own_kv(layer), latent.query_rank
    first = (f"{source}.q_proj{suffix}", q_dim) if query_rank is None else (f"{source}.q_a_proj{suffix}", query_rank)
    own = [(f"{source}.kv_a_proj_with_mqa", latent.width)] if has_own_kv else []
    yield from _linear(f"{name}.{'qkv' if has_own_kv else 'q'}", [first, *own], hidden, False)
    if query_rank is not None:
        yield _norm(f"{name}.query_norm", f"{source}.q_a_layernorm{suffix}", query_rank)
        yield from _linear(f"{name}.query", [(f"{source}.q_b_proj{suffix}", q_dim)], query_rank, False)
    if layer not in config.owners:
        return
    yield _norm(f"{name}.rows.norm", f"{source}.kv_a_layernorm{suffix}", rank)
    each, split = latent.expanded_dim, latent.nope_dim
    starts = range(0, config.num_heads * each, each)
    of_heads = {
        "absorb": [Rows(start, start + split, transposed=True) for start in starts],
        "expand": [Rows(start + split, start + each) for start in starts],
    }
    whole = Source(f"{source}.kv_b_proj{suffix}.weight", (config.num_heads * each, rank))
    for part, rows in of_heads.items():
        sources = tuple(replace(whole, rows=one) for one in rows)
        yield WeightSpec(f"{name}.of_heads.{part}.weight", sources, config.num_heads)


def _linear_attention(
    config: ModelConfig, linear: LinearAttention, layer: int, name: str, source: str
) -> Iterator[WeightSpec]:
    """Yield what linear attention has but its output projection."""
    columns, heads = config.hidden_size, linear.num_value_heads
    is_above = layer >= config.cut
    if is_above:
        rows = {"q": linear.keys_dim, "z": linear.values_dim}
        sources = [(f"{source}.in_proj_{part}_swiftkv", count) for part, count in rows.items()]
        yield from _linear(f"{name}.qz", sources, columns, False)
    elif linear.by_key_head:
        parts = parts_by_key_head(linear, columns, source)
    else:
        rows = {"qkv": linear.conv_channels, "z": linear.values_dim, "b": heads, "a": heads}
        parts = {part: [Source(f"{source}.in_proj_{part}.weight", (count, columns))] for part, count in rows.items()}
    if not is_above:
        yield WeightSpec(f"{name}.qkvz.weight", tuple(parts["qkv"] + parts["z"]))
        yield WeightSpec(f"{name}.ba.weight", tuple(parts["b"] + parts["a"]))
    conv, channels = ("conv1d_swiftkv", linear.state_channels) if is_above else ("conv1d", linear.conv_channels)
    yield _convolution(linear.conv_width, channels, f"{name}.state.conv", f"{source}.{conv}")
    yield _copied(f"{name}.state.decay_log", Source(f"{source}.A_log", (heads,)))
    yield _copied(f"{name}.state.decay_bias", Source(f"{source}.dt_bias", (heads,)))
    yield _norm(f"{name}.result_norm", f"{source}.norm", linear.value_dim)


def _channel_delta(kind: ChannelDelta, columns: int, name: str, source: str, is_above: bool) -> Iterator[WeightSpec]:
    """Yield what such a layer has but its output projection; of the convolutions one matrix each."""
    suffix, own, convolved = ("_swiftkv", "q", "kv") if is_above else ("", "qkv", "qkv")
    inner, rank = kind.decay_matrix
    projected = [(f"{source}.{part}_proj{suffix}", inner) for part in own]
    yield from _linear(f"{name}.{own}z", [*projected, (f"{source}.g_a_proj{suffix}", rank)], columns, False)
    if not is_above:
        exact = [(f"{source}.b_proj", kind.num_heads), (f"{source}.f_a_proj", rank)]
        yield from _linear(f"{name}.ba", exact, columns, False)
    convolutions = [_convolution(kind.conv_width, inner, "", f"{source}.{part}_conv1d{suffix}") for part in convolved]
    sources = tuple(source for each in convolutions for source in each.sources)
    yield WeightSpec(f"{name}.state.conv", sources, len(sources))
    yield _copied(f"{name}.state.decay_log", Source(f"{source}.A_log", (1, 1, kind.num_heads, 1)))
    yield WeightSpec(f"{name}.state.decay_bias", (Source(f"{source}.dt_bias", (inner,)),))
    yield from _linear(f"{name}.state.decays", [(f"{source}.f_b_proj", inner)], rank, False)
    yield from _linear(f"{name}.gates", [(f"{source}.g_b_proj", inner)], rank, False)
    yield _norm(f"{name}.result_norm", f"{source}.o_norm", kind.head_dim)


def _gated_conv(kind: GatedConv, columns: int, name: str, source: str, is_above: bool) -> Iterator[WeightSpec]:
    """Yield what a layer with a gated convolution has but its output projection."""
    suffix, state = ("_swiftkv", f"{name}.state") if is_above else ("", name)
    yield from _linear(f"{name}.bcx", [(f"{source}.in_proj{suffix}", 3 * kind.channels)], columns, False)
    yield _convolution(kind.conv_width, kind.channels, f"{state}.conv", f"{source}.conv1d{suffix}")


def _mamba2(mamba: Mamba2, columns: int, name: str, source: str, is_above: bool) -> Iterator[WeightSpec]:
    """Yield what a layer of Mamba-2 has but its output projection."""
    suffix, state = ("_swiftkv", f"{name}.state") if is_above else ("", name)
    if is_above:
        own = [(f"{source}.in_proj_z_swiftkv", mamba.inner_dim), (f"{source}.in_proj_c_swiftkv", mamba.queries_dim)]
        yield from _linear(f"{name}.zc", own, columns, False)
    else:
        yield from _mamba2_projection(mamba, columns, name, source)
    yield _convolution(mamba.conv_width, mamba.conv_channels, f"{state}.conv", f"{source}.conv1d{suffix}")
    yield WeightSpec(f"{state}.conv_bias", (Source(f"{source}.conv1d{suffix}.bias", (mamba.conv_channels,)),))
    yield _copied(f"{state}.decay_log", Source(f"{source}.A_log", (mamba.num_heads,)))
    yield _copied(f"{state}.decay_bias", Source(f"{source}.dt_bias", (mamba.num_heads,)))
    yield _copied(f"{name}.skip", Source(f"{source}.D", (mamba.num_heads,)))
    yield _norm(f"{name}.result_norm", f"{source}.norm", mamba.inner_dim)


def _mamba2_projection(mamba: Mamba2, columns: int, name: str, source: str) -> Iterator[WeightSpec]:
    """Yield the parts of the one projection that a layer has below a cut."""
    ends = (0, mamba.inner_dim + mamba.conv_channels, mamba.inner_dim + mamba.conv_channels + mamba.num_heads)
    whole = Source(f"{source}.in_proj.weight", (ends[2], columns))
    for part, start, stop in zip(("zxbc", "steps"), ends, ends[1:], strict=False):
        yield WeightSpec(f"{name}.{part}.weight", (replace(whole, rows=Rows(start, stop)),))


def _convolution(width: int, channels: int, name: str, source: str) -> WeightSpec:
    """Return the weights of a convolution, with its channels last."""
    rows = Rows(0, channels, transposed=True)
    return WeightSpec(name, (Source(f"{source}.weight", (channels, 1, width), rows=rows),))


def parts_by_key_head(linear: LinearAttention, columns: int, source: str) -> dict[str, list[Source]]:
    """Return q, k, v, z, b and a where they lie key head by key head in two tensors of a layer's ``source``: the first
    four in one, b and a in the other; and ``qkv``, the first three together."""
    shares = linear.num_value_heads // linear.num_key_heads
    values = shares * linear.value_dim
    stored = {"qkvz": {"q": linear.key_dim, "k": linear.key_dim, "v": values, "z": values}}
    stored["ba"] = {"b": shares, "a": shares}
    parts: dict[str, list[Source]] = {}
    for module, sizes in stored.items():
        each = sum(sizes.values())
        whole = Source(f"{source}.in_proj_{module}.weight", (linear.num_key_heads * each, columns))
        start = 0
        for part, size in sizes.items():
            firsts = range(start, linear.num_key_heads * each, each)
            parts[part] = [replace(whole, rows=Rows(first, first + size)) for first in firsts]
            start += size
    return {**parts, "qkv": parts["q"] + parts["k"] + parts["v"]}


def _mixer(config: ModelConfig, layer: int, name: str, source: str) -> Iterator[WeightSpec]:
    """Yield what a layer has before its MLP, and the norms of what both add."""
    hidden, attention = config.hidden_size, f"{source}.self_attn"
    suffix = "_swiftkv" if layer >= config.cut and config.is_swiftkv else ""
    if config.pre_norms:
        yield _norm(f"{name}.input_norm", f"{source}.input_layernorm", hidden)
    if config.linear is not None and config.is_linear(layer):
        attention, is_above = f"{source}.{config.linear.module}", layer >= config.cut
        if isinstance(config.linear, ChannelDelta):
            yield from _channel_delta(config.linear, hidden, name, attention, is_above)
        elif isinstance(config.linear, GatedConv):
            yield from _gated_conv(config.linear, hidden, name, attention, is_above)
        elif isinstance(config.linear, Mamba2):
            yield from _mamba2(config.linear, hidden, name, attention, is_above)
        else:
            yield from _linear_attention(config, config.linear, layer, name, attention)
    elif config.latent is None:
        yield from _attention(config, layer, name, attention, suffix)
    else:
        yield from _latent_attention(config, config.latent, layer, name, attention, suffix)
    attended = config.attended_dim_of(layer)
    output, has_bias = "o_proj", config.output_bias
    if config.linear is not None and config.is_linear(layer):
        output, has_bias = config.linear.output, False
    yield from _linear(f"{name}.o", [(f"{attention}.{output}", hidden)], attended, has_bias)
    if config.branch_norms:
        yield _norm(f"{name}.o_norm", f"{source}.{config.layer_norms.of_attention}", hidden)
        yield _norm(f"{name}.down_norm", f"{source}.{config.layer_norms.of_mlp}", hidden)


def _extras(config: ModelConfig, name: str, source: str) -> Iterator[WeightSpec]:
    """Yield what a layer adds of its per-layer input, its scalar and its sinks."""
    if config.per_layer_input:
        gate = [(f"{source}.per_layer_input_gate", config.per_layer_input)]
        yield from _linear(f"{name}.own_gate", gate, config.hidden_size, False)
        projection = [(f"{source}.per_layer_projection", config.hidden_size)]
        yield from _linear(f"{name}.own_projection", projection, config.per_layer_input, False)
        yield _norm(f"{name}.own_norm", f"{source}.post_per_layer_input_norm", config.hidden_size)
    if config.layer_scalar:
        yield _copied(f"{name}.scalar", Source(f"{source}.layer_scalar", (1,)))
    if config.attention_sinks:
        yield _copied(f"{name}.sinks", Source(f"{source}.self_attn.sinks", (config.num_heads,)))


def is_teacher_only(name: str, cut: int) -> bool:
    """Whether a checkpoint's tensor is of the q, k and v, or of what makes and reads a state, that a layer above a
    SwiftKV cut had before it."""
    layer = _PROJECTION.match(name) or _OF_STATE.match(name)
    return layer is not None and int(layer[1]) >= cut


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Return every tensor of the graphs in layer order, the early exit's head last."""
    return [
        replace(spec, sources=tuple(_as_stored(source, config) for source in spec.sources)) for spec in _specs(config)
    ]


def _as_stored(source: Source, config: ModelConfig) -> Source:
    """A source with what makes the engine's tensor of the checkpoint's."""
    if config.norm_offset and _NORM.search(source.name):
        source = replace(source, offset=config.norm_offset)
    return _rotated(source, config)


def _rotated(source: Source, config: ModelConfig) -> Source:
    """A source of q or k as the engine stores it; any other as it is."""
    if config.latent is not None:
        return _rotated_latent(source, config, config.latent)
    part = _ROTATED.search(source.name)
    if part is None:
        return source
    is_last = part[3] == "norm" or not config.qk_norm
    layer = int(part[1])
    has_gate = config.attention_gate and part.group(2, 3) == ("q", "proj")
    behind = config.head_dim_of(layer) if has_gate else 0
    rotary = RotaryRows(*config.rotation_of(layer), is_last, behind=behind)
    return source if rotary.is_nothing else replace(source, rotary=rotary)


def _rotated_latent(source: Source, config: ModelConfig, latent: LatentAttention) -> Source:
    part = _LATENT.search(source.name)
    if part is None:
        return source
    passed = latent.rank if part[1].startswith("kv") else latent.nope_dim
    rotary = RotaryRows(config.rope, latent.rope_dim, passed=passed)
    return source if rotary.is_nothing else replace(source, rotary=rotary)


def _specs(config: ModelConfig) -> Iterator[WeightSpec]:
    hidden = config.hidden_size
    yield WeightSpec("embed.weight", (Source("model.embed_tokens.weight", (config.vocab_size, hidden)),))
    if width := config.per_layer_input:
        rows = (config.per_layer_vocab, config.num_layers * width)
        yield WeightSpec("per_layer.embed", (Source("model.embed_tokens_per_layer.weight", rows),))
        yield from _linear("per_layer.context", [("model.per_layer_model_projection", rows[1])], hidden, False)
        yield _norm("per_layer.norm", "model.per_layer_projection_norm", width)
    for layer in range(config.num_layers):
        name, source = f"layers.{layer}", f"model.layers.{layer}"
        if config.has_mixer(layer):
            yield from _mixer(config, layer, name, source)
        if config.pre_norms and config.has_mlp(layer):
            yield _norm(f"{name}.post_norm", f"{source}.{config.layer_norms.before_mlp}", hidden)
        yield from _extras(config, name, source)
        if config.has_experts(layer):
            yield from _experts(config, f"{name}.experts", f"{source}.mlp")
        elif config.has_mlp(layer):
            inner = config.intermediate_of(layer)
            gate_up = [(f"{source}.mlp.{one}_proj", inner) for one in config.mlp_inputs]
            yield from _linear(f"{name}.gate_up", gate_up, hidden, config.mlp_bias)
            yield from _linear(f"{name}.down", [(f"{source}.mlp.down_proj", hidden)], inner, config.mlp_bias)
    if config.is_swiftkv:
        if config.pre_norms:
            yield _norm("single_input.norm", "model.norm_swiftkv", hidden)
        parts = ("k_proj", "v_proj") if config.latent is None else ("kv_a_proj_with_mqa",)
        leaders = [
            (f"model.layers.{owner}.self_attn.{part}_swiftkv", config.kv_dim)
            for owner in config.upper_owners
            for part in parts
        ]
        if leaders:
            yield from _linear("single_input.kv", leaders, hidden, config.qkv_bias)
        if config.linear is not None and config.upper_linear:
            for name, made in zip(("states", "gates"), config.linear.input_parts, strict=True):
                sources = [
                    (f"model.layers.{layer}.{config.linear.input_name(part)}", rows)
                    for layer in config.upper_linear
                    for part, rows in made.items()
                ]
                if sources:
                    yield from _linear(f"state_input.{name}", sources, hidden, False)
    yield _norm("norm", "model.norm", hidden)
    if not config.tie_embeddings:
        yield WeightSpec("lm_head.weight", (Source("lm_head.weight", (config.vocab_size, hidden)),))
    if config.early_exit:
        yield _norm("norm_early_exit", "model.norm_early_exit", hidden)
        yield from _linear("lm_head_early_exit", [("lm_head_early_exit", config.vocab_size)], hidden, False)
