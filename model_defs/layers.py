"""The blocks that all families are made of. Tokens are packed: the first dimension is T, no batch, no padding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.cache_insertion import AfterAttention, AfterWrite, Attention, BeforeAttention, Pages, Pool
from model_defs.config import ModelConfig
from model_defs.experts import Experts
from model_defs.rope import apply_rope
from model_defs.weights import SCALAR_COPIES
from plugins.expert_linear import expert_linear
from plugins.paged_attention import paged_attention
from plugins.route_experts import route_experts

KVScales = tuple[float, float]
"""Static scales of one owner's K and V; (1.0, 1.0) where the format has none."""


@dataclass(frozen=True)
class PolicyPart:
    """What a KV policy puts into layers, and how many tensors at the end of each pool are its own."""

    num_pools: int = 0
    after_write: AfterWrite | None = None
    before_attention: BeforeAttention | None = None
    attention: Attention | None = None
    after_attention: AfterAttention | None = None


@dataclass(frozen=True)
class StepInputs:
    """What attention needs to know of the packed step, besides q and the pools.

    ``query_start`` ``[S+1]``, ``kv_length`` ``[S]`` and ``page_table`` ``[S, M]`` are int32; ``cos`` and
    ``sin`` ``[T, head_dim/2]`` fp32 belong to the queries' positions, as does ``growth`` ``[T, 1]`` fp32, what queries
    are multiplied by where the model says so. ``rotates_keys``: whether the pools hold rotated keys in int8.
    """

    query_start: Tensor
    kv_length: Tensor
    page_table: Tensor
    cos: Tensor
    sin: Tensor
    policy: PolicyPart = PolicyPart()
    growth: Tensor | None = None
    rotates_keys: bool = False

    @property
    def pages(self) -> Pages:
        """What of it the cache is read and written by."""
        return Pages(self.query_start, self.kv_length, self.page_table)


class BareNorm(nn.Module):
    """x / rms(x) over the last dimension, as ``RMSNorm`` without gains."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def normed(self, x: Tensor) -> Tensor:
        """Return x / rms(x) in fp32."""
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x).to(x.dtype)


class RMSNorm(BareNorm):
    """x / rms(x) * weight over the last dimension; statistics in fp32, result in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(eps)
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * super().forward(x)


class HeadsNorm(RMSNorm):
    """The same over all heads of a token together: of ``[…, heads, head_dim]``, with as many gains."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


def norm_of_heads(config: ModelConfig, num_heads: int, head_dim: int) -> RMSNorm:
    """Return the norm of q or k ``[…, num_heads, head_dim]`` as a model has it."""
    whole = config.qk_norm_whole
    return (HeadsNorm if whole else RMSNorm)(num_heads * head_dim if whole else head_dim, config.rms_norm_eps)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return ``x`` times ``factor``, which is rounded to its dtype first: so families were trained."""
    return x if factor == 1.0 else x * float(torch.tensor(factor, dtype=x.dtype))


def to_stream(config: ModelConfig, embedded: Tensor) -> Tensor:
    """Return the residual stream of embeddings, in the unit of ``config.stream_eps``."""
    if config.residual_scale == 1.0:
        return scaled(embedded, config.embedding_scale)
    return embedded * (config.embedding_scale / config.residual_scale)


def divided(config: ModelConfig, logits: Tensor) -> Tensor:
    """Return logits over the model's ``logit_divisor``."""
    return logits if config.logit_divisor == 1.0 else logits / config.logit_divisor


def capped(logits: Tensor, cap: float) -> Tensor:
    """Return ``logits``, each moved to within ``cap`` of 0 by tanh."""
    return cap * torch.tanh(logits / cap)


def gelu_gate(x: Tensor) -> Tensor:
    """Return ``gelu(gate) * up`` of ``x`` ``[…, 2 n]``, which is [gate; up]; gelu by tanh."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """Return the squares of what is positive of ``x`` ``[…, n]``, 0 elsewhere."""
    return F.relu(x).square()


INNER = {"gelu_tanh": gelu_gate, "relu2": squared_relu}
"""What makes of an MLP's first product what goes into its last, by activation; of ``silu`` the product itself does."""


class Linear(nn.Linear):
    """A linear layer with what stands around it in a transformer, as ``plugins.packed_linear`` fuses it.

    Its input is normed where a norm is given. ``gated``: the outputs are [gate; up] and the result is
    ``silu(gate) * up``. The result is added to a residual where there is one; with ``float32_out`` it is float32.
    Without ``quantizes`` the weights are never packed in fewer bits than the activations have. ``is_head``: it gives
    the logits, so few tokens meet it and rounding shows most. ``has_outliers``: its inputs are products of a gate and
    another number, some far larger than the rest, which a packed layer spreads before it rounds them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        gated: bool = False,
        float32_out: bool = False,
        quantizes: bool = True,
        is_head: bool = False,
        has_outliers: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.gated, self.float32_out, self.quantizes, self.is_head = gated, float32_out, quantizes, is_head
        self.has_outliers = has_outliers

    def forward(self, x: Tensor, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        y = super().forward(x if norm is None else norm(x))
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        if residual is not None:
            y = residual + y
        return y.float() if self.float32_out else y


class ExpertLinear(nn.Module):
    """A linear layer of each of several experts, as ``plugins.expert_linear`` has it: ``weight`` ``[E, N, K]``."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, gated: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.num_experts = num_experts
        self.out_features = out_features // (2 if gated else 1)
        self.gated = gated

    def forward(self, x: Tensor, expert_ids: Tensor, float32_out: bool = False) -> Tensor:
        """Return ``[T, k, out_features]`` of x ``[T, in_features]`` or ``[T, k, in_features]``."""
        return expert_linear(x, self.weight, expert_ids, self.out_features, gated=self.gated, float32_out=float32_out)


class MixtureOfExperts(nn.Module):
    """A router and the MLPs that it chooses from, in place of one MLP."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.num_active, self.normalize = experts.num_active, experts.normalize
        hidden_size, count, inner = config.hidden_size, experts.num_experts, experts.intermediate_size
        self.gate, self.act = experts.gate, INNER.get(config.activation)
        inputs, is_fused = len(config.mlp_inputs), self.act is None
        self.has_bias = experts.bias
        self.router = Linear(hidden_size, count, False, float32_out=True, quantizes=False)
        gated = is_fused and self.gate is None and not self.has_bias
        self.gate_up = ExpertLinear(count, hidden_size, inputs * inner, gated=gated)
        self.down = ExpertLinear(count, inner, hidden_size)
        if self.has_bias:
            self.router_bias = nn.Parameter(torch.empty(SCALAR_COPIES * count))
            self.gate_up_bias = nn.Parameter(torch.empty(count, inputs * inner))
            self.down_bias = nn.Parameter(torch.empty(count, hidden_size))
        self.by_sigmoid = experts.by_sigmoid
        if self.by_sigmoid:
            self.score_bias = nn.Parameter(torch.empty(SCALAR_COPIES * count))
        self.groups, self.scaling = (experts.num_groups, experts.num_active_groups), experts.scaling
        self.has_shared, self.has_shared_gate = experts.num_shared > 0, experts.shared_gate
        if self.has_shared:
            self.shared_gate_up = Linear(hidden_size, inputs * experts.shared_size, False, gated=is_fused)
            self.shared_down = Linear(experts.shared_size, hidden_size, False, float32_out=True, has_outliers=True)
        if self.has_shared_gate:
            self.shared_gate = Linear(hidden_size, 1, False, float32_out=True, quantizes=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``residual`` and what the chosen experts make of normed ``x``, each ``[T, hidden]``, added in float32
        in the order of their probabilities, and then what shared experts do."""
        logits = self.router(x)
        if self.has_bias:
            logits = logits + self.router_bias[: logits.shape[1]].float()
        expert_ids, weights = self._route(logits)
        parts = self.down(self._inner(x, expert_ids), expert_ids, float32_out=True)
        if self.has_bias:
            parts = parts + self.down_bias[expert_ids]
        total = weights[:, 0, None] * parts[:, 0]
        for index in range(1, self.num_active):
            total = total + weights[:, index, None] * parts[:, index]
        if self.has_shared:
            inner = self.shared_gate_up(x)
            shared = self.shared_down(inner if self.act is None else self.act(inner))
            total = total + (shared * torch.sigmoid(self.shared_gate(x)) if self.has_shared_gate else shared)
        return (residual.float() + total).to(residual.dtype)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts int32 and what each of them counts, ``[T, num_active]``."""
        num_groups, num_active_groups = self.groups
        if self.by_sigmoid:
            expert_ids, weights = self._route_by_sigmoid(logits)
        elif num_active_groups == num_groups:
            expert_ids, weights = route_experts(logits, self.num_active, self.normalize)
        else:
            best = logits.unflatten(-1, (num_groups, -1)).amax(-1)
            expert_ids, weights = route_experts(self._of_groups(logits, best), self.num_active, True)
            if not self.normalize:
                weights = logits.softmax(-1).gather(-1, expert_ids.long())
        return expert_ids, weights if self.scaling == 1.0 else weights * self.scaling

    def _of_groups(self, scores: Tensor, of_groups: Tensor) -> Tensor:
        """Return ``scores`` ``[T, E]`` of experts in the best of ``of_groups`` ``[T, groups]``, -inf for the others."""
        num_groups, num_active_groups = self.groups
        groups, _ = route_experts(of_groups, num_active_groups, False)
        chosen = (groups[:, :, None] == torch.arange(num_groups, device=scores.device)).any(1)
        of_group = chosen.repeat_interleave(scores.shape[-1] // num_groups, dim=-1)
        return scores.masked_fill(~of_group, -torch.inf)

    def _route_by_sigmoid(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        num_groups, num_active_groups = self.groups
        scores = logits.sigmoid()
        sums = scores + self.score_bias[: logits.shape[1]]
        if num_active_groups < num_groups:
            grouped = sums.view(-1, logits.shape[1] // num_groups)
            best, _ = route_experts(grouped, min(2, grouped.shape[1]), False)
            sums = self._of_groups(sums, grouped.gather(1, best.long()).sum(-1).view(-1, num_groups))
        expert_ids, _ = route_experts(sums, self.num_active, False)
        weights = scores.gather(1, expert_ids.long())
        if self.normalize:
            total = weights[:, :1]
            for index in range(1, self.num_active):  # in this order, whatever the other rows are
                total = total + weights[:, index, None]
            weights = weights / (total + 1e-20)
        return expert_ids, weights

    def _inner(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """What goes into the projections down, ``[T, k, inner]``."""
        inner = self.gate_up(x, expert_ids)
        if self.gate_up.gated:
            return inner
        if self.has_bias:
            inner = inner + self.gate_up_bias[expert_ids]
        if self.act is not None and self.gate is None:
            return self.act(inner)
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up if self.gate is None else self.gate(gate, up)


class Block(nn.Module):
    """One transformer layer, split where its K and V come from; of a layer without a mixer ``mlp`` is all, and in one
    without an MLP that gives what it gets.

    ``project_qkv`` and ``finish`` are the halves around the cache write, so that a layer below the cut writes its
    own K,V between them and a layer above the cut writes nothing.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_of(layer)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim_of(layer)
        self.window = config.layer_windows[layer]
        self.scale = config.score_scale(layer)
        self.has_own_kv = config.has_own_kv(layer)
        if config.has_mixer(layer):
            self.input_norm = RMSNorm(hidden, config.stream_eps) if config.pre_norms else None
            self.add_projections(config, layer)
            self.o = Linear(config.attended_dim_of(layer), hidden, config.output_bias and not config.is_linear(layer))
        self.has_mlp, self.has_experts = config.has_mlp(layer), config.has_experts(layer)
        if self.has_mlp:
            self.post_norm = RMSNorm(hidden, config.stream_eps) if config.pre_norms else None
        if self.has_experts and config.experts is not None:
            self.experts = MixtureOfExperts(config, config.experts)
        elif self.has_mlp:
            self.act, rows = INNER.get(config.activation), len(config.mlp_inputs) * inner
            self.gate_up = Linear(hidden, rows, config.mlp_bias, gated=self.act is None)
            self.down = Linear(inner, hidden, config.mlp_bias, has_outliers=True)
        self.branch_norms = config.branch_norms
        if self.branch_norms:
            self.o_norm = RMSNorm(hidden, config.rms_norm_eps)
            self.down_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.has_own_input = bool(config.per_layer_input)
        if self.has_own_input:
            self.own_gate = Linear(hidden, config.per_layer_input, False)
            self.own_projection = Linear(config.per_layer_input, hidden, False)
            self.own_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.scalar = nn.Parameter(torch.empty(SCALAR_COPIES)) if config.layer_scalar else None
        self.sinks = nn.Parameter(torch.empty(SCALAR_COPIES * config.num_heads)) if config.attention_sinks else None

    def add_projections(self, config: ModelConfig, layer: int) -> None:
        """Register what makes q, k and v."""
        hidden, q_dim, kv_dim = config.hidden_size, config.projected_q_dim_of(layer), config.kv_dim_of(layer)
        if self.has_own_kv:
            self.qkv = Linear(hidden, q_dim + 2 * kv_dim, config.qkv_bias)
            self.qkv_ends = (q_dim, q_dim + kv_dim)
        else:
            self.q = Linear(hidden, q_dim, config.qkv_bias)
        self.q_norm = norm_of_heads(config, self.num_heads, self.head_dim) if config.qk_norm else nn.Identity()
        has_k_norm = config.qk_norm and self.has_own_kv
        self.k_norm = norm_of_heads(config, self.num_kv_heads, self.head_dim) if has_k_norm else nn.Identity()
        self.v_norm = BareNorm(config.rms_norm_eps) if config.v_norm else nn.Identity()

    def project_qkv(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return q ``[T, heads, d]``, k and v ``[T, kv_heads, d]``, none rotated (owners below the cut)."""
        q, k, v = self.qkv(hidden, self.input_norm).tensor_split(self.qkv_ends, -1)
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return self.queries(q), self.k_norm(k), self.v_norm(v)

    def project_q(self, hidden: Tensor) -> Tensor:
        """Return q ``[T, heads, d]``, not rotated (layers that read another's cache)."""
        return self.queries(self.q(hidden, self.input_norm))

    def queries(self, projected: Tensor) -> Tensor:
        """Return q ``[T, heads, d]``, not rotated, of what the projection gives."""
        return self.q_norm(projected.unflatten(-1, (self.num_heads, self.head_dim)))

    def finish(
        self,
        hidden: Tensor,
        q: Tensor,
        pool: Pool,
        step: StepInputs,
        kv_scales: KVScales,
        own_input: Tensor | None = None,
    ) -> tuple[Tensor, Pool]:
        """Attend to ``pool``, run the MLP and add what is made of the layer's ``own_input`` ``[T, n]``, where it has
        one; returns the next residual stream ``[T, hidden]``, and the pool as a KV policy leaves it."""
        hidden, pool = self._attend(hidden, q, pool, step, kv_scales)
        hidden = self.mlp(hidden)
        if own_input is not None:
            gate = F.gelu(self.own_gate(hidden), approximate="tanh")
            hidden = hidden + self.own_norm(self.own_projection(gate * own_input))
        return hidden if self.scalar is None else hidden * self.scalar[:1], pool

    def _attend(
        self, hidden: Tensor, q: Tensor, pool: Pool, step: StepInputs, kv_scales: KVScales
    ) -> tuple[Tensor, Pool]:
        policy, before = step.policy, hidden
        attended, pool = self.attended(q, pool, step, kv_scales)
        attended = attended.flatten(1)
        hidden = hidden + self.o_norm(self.o(attended)) if self.branch_norms else self.o(attended, residual=hidden)
        if policy.after_attention is not None:
            policy.after_attention(before, hidden, pool, step.query_start)
        return hidden, pool

    def attended(self, q: Tensor, pool: Pool, step: StepInputs, kv_scales: KVScales) -> tuple[Tensor, Pool]:
        """Return ``[T, heads, d]`` of q ``[T, heads, d]``, not rotated, and the pool that was read."""
        rotation = (step.cos, step.sin) if step.growth is None else (step.cos * step.growth, step.sin * step.growth)
        q = apply_rope(q, *rotation)
        policy, pages = step.policy, step.pages
        if policy.before_attention is not None:
            pool = policy.before_attention(q, pool, pages, self.scale, kv_scales[0])
        if policy.attention is not None:
            return policy.attention(q, pool, pages, self.scale, kv_scales, self.window), pool
        k_scales, v_scales = pool[2 : len(pool) - policy.num_pools] or (None, None)
        attended = paged_attention(
            q,
            pool[0],
            pool[1],
            *pages,
            self.scale,
            self.window,
            k_scales,
            v_scales,
            k_scale=kv_scales[0],
            v_scale=kv_scales[1],
            sinks=None if self.sinks is None else self.sinks[: self.num_heads].float(),
            rotates_keys=step.rotates_keys,
        )
        return attended, pool

    def mlp(self, hidden: Tensor) -> Tensor:
        """Return the residual stream behind the MLP or the experts."""
        if not self.has_mlp:
            return hidden
        if self.has_experts:
            return self.experts(hidden if self.post_norm is None else self.post_norm(hidden), hidden)
        inner = self.gate_up(hidden, self.post_norm)
        if self.act is not None:
            inner = self.act(inner)
        if self.branch_norms:
            return hidden + self.down_norm(self.down(inner))
        return self.down(inner, residual=hidden)
