"""The whole model over whole sequences, for every family in ``model_defs``: no cache, all tokens through all layers."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvforge.swiftkv.attention import KV, SwiftKVAttention
from kvforge.swiftkv.latent_attention import SwiftKVLatentAttention
from kvforge.swiftkv.norms import make_norm, norm_before
from kvforge.swiftkv.state_mixers import STATES
from kvforge.swiftkv.token_layout import Layout, make_layout
from model_defs import ModelConfig
from model_defs.experts import ClampedGate, Experts
from model_defs.layers import divided, scaled


class MLP(nn.Module):
    """A gated MLP, the gate by ``activation`` of ``ModelConfig``, or by ``clamped`` where it is given."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        bias: bool = False,
        activation: str = "silu",
        clamped: ClampedGate | None = None,
    ) -> None:
        super().__init__()
        self.is_silu, self.clamped = activation == "silu", clamped
        self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same shape."""
        gate = self.gate_proj(x)
        if self.clamped is not None:
            return self.down_proj(self.clamped(gate, self.up_proj(x)))
        gate = F.silu(gate) if self.is_silu else F.gelu(gate, approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Router(nn.Module):
    """Logits of the experts; no ``nn.Linear``, as it is not quantized."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden: int, num_experts: int, bias: bool = False, has_scores: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        if has_scores:
            self.register_buffer("e_score_correction_bias", torch.empty(num_experts))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[…, hidden]`` to ``[…, num_experts]`` in float32."""
        logits = F.linear(x, self.weight).float()
        return logits if self.bias is None else logits + self.bias.float()


class SwiftKVExperts(nn.Module):
    """Each token's chosen experts, weighed by their probabilities."""

    def __init__(self, hidden: int, sizes: Experts) -> None:
        super().__init__()
        self.sizes = sizes
        self.gate = Router(hidden, sizes.num_experts, sizes.bias, sizes.by_sigmoid)
        self.experts = nn.ModuleList(
            MLP(hidden, sizes.intermediate_size, sizes.bias, clamped=sizes.gate) for _ in range(sizes.num_experts)
        )
        if sizes.num_shared:
            self.shared_experts = MLP(hidden, sizes.shared_size)
        if sizes.shared_gate:
            self.shared_expert_gate = Router(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same shape; experts that no token chose do not run."""
        rows = x.flatten(0, -2)
        logits = self.gate(rows)
        if self.sizes.by_sigmoid:
            probabilities = logits.sigmoid()
            compared = probabilities + self.gate.e_score_correction_bias.float()
            chosen = self._eligible(compared).topk(self.sizes.num_active, dim=-1).indices
            weights = probabilities.gather(-1, chosen)
        else:
            weights, chosen = self._eligible(logits.softmax(-1)).topk(self.sizes.num_active, dim=-1)
        if self.sizes.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.sizes.scaling
        total = self.shared_experts(rows) if self.sizes.num_shared else torch.zeros_like(rows)
        if self.sizes.shared_gate:
            total = total * self.shared_expert_gate(rows).sigmoid().to(rows.dtype)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            part = self.experts[expert](rows[token]) * weights[token, place, None].to(x.dtype)
            total = total.index_add(0, token, part)
        return total.view_as(x)

    def _eligible(self, probabilities: Tensor) -> Tensor:
        """The probabilities of experts in the groups whose best is best, or whose two best, and -inf for the others."""
        sizes = self.sizes
        if sizes.num_groups == sizes.num_active_groups:
            return probabilities
        groups = probabilities.unflatten(-1, (sizes.num_groups, -1))
        of_groups = groups.sort(descending=True).values[..., : 2 if sizes.by_sigmoid else 1].sum(-1)
        best = of_groups.topk(sizes.num_active_groups, dim=-1).indices
        chosen = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0)
        return groups.masked_fill(chosen[..., None] == 0, -torch.inf).flatten(-2)


class ExpertsBesideMLP(MLP):
    """The same, where checkpoints call the shared expert as they call an MLP without a mixture."""

    def __init__(self, hidden: int, sizes: Experts) -> None:
        super().__init__(hidden, sizes.shared_size)
        mixture = SwiftKVExperts(hidden, replace(sizes, num_shared=0))
        self.gate, self.experts, self._mixed = mixture.gate, mixture.experts, mixture.forward

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]`` to the same shape."""
        return super().forward(x) + self._mixed(x)


class DecoderLayer(nn.Module):
    """One transformer layer; works alone, so that a model can be run layer by layer."""

    def __init__(self, config: ModelConfig, layer: int, with_teacher: bool = False) -> None:
        super().__init__()
        self.input_layernorm = norm_before(config)
        self.states = config.linear.module if config.linear is not None and config.is_linear(layer) else None
        if self.states is not None:
            self.add_module(self.states, STATES[type(config.linear)](config, layer, with_teacher))
        else:
            attention = SwiftKVAttention if config.latent is None else SwiftKVLatentAttention
            self.self_attn = attention(config, layer, with_teacher)
        self.norms = config.layer_norms
        self.add_module(self.norms.before_mlp, norm_before(config))
        sizes, has_experts = config.experts, config.has_experts(layer)
        dense = (config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)
        mixture = ExpertsBesideMLP if sizes and sizes.shared_is_mlp else SwiftKVExperts
        self.mlp = mixture(config.hidden_size, sizes) if sizes and has_experts else MLP(*dense)
        self.branch_norms, self.residual_scale = config.branch_norms, config.residual_scale
        for name in (self.norms.of_attention, self.norms.of_mlp) if self.branch_norms else ():
            self.add_module(name, make_norm(config, config.hidden_size))

    def forward(
        self,
        hidden: Tensor,
        kv: KV | None,
        layout: Layout,
        teacher: bool = False,
        single_input: Tensor | None = None,
    ) -> Tensor:
        """Return the next residual stream ``[B, T, hidden]``; without ``kv``, K and V come from ``hidden`` itself, as
        states do without ``single_input``, a layer's own input where it keeps one."""
        x = self.input_layernorm(hidden)
        if self.states is not None:
            mixed = self.get_submodule(self.states)(x, single_input, layout)
        else:
            kv = self.self_attn.key_value(x, layout, teacher) if kv is None else kv
            mixed = self.self_attn(x, kv, layout, teacher)
        hidden = hidden + self._branch(mixed, self.norms.of_attention)
        return hidden + self._branch(self.mlp(self.get_submodule(self.norms.before_mlp)(hidden)), self.norms.of_mlp)

    def _branch(self, x: Tensor, norm: str) -> Tensor:
        x = self.get_submodule(norm)(x) if self.branch_norms else x
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class Decoder(nn.Module):
    """Embedding, layers and norms: the ``model.`` of a checkpoint."""

    def __init__(self, config: ModelConfig, with_teacher: bool) -> None:
        super().__init__()
        self.sizes = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, with_teacher) for layer in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)
        if config.is_swiftkv:
            self.norm_swiftkv = norm_before(config)
        if config.early_exit:
            self.norm_early_exit = make_norm(config, config.hidden_size)

    def embed(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` ``[B, T]`` to the residual stream entering layer 0 ``[B, T, hidden]``."""
        return scaled(self.embed_tokens(input_ids), self.sizes.embedding_scale)

    def lower(self, input_ids: Tensor, layout: Layout) -> Tensor:
        """``input_ids`` ``[B, T]`` to the residual stream entering the cut layer ``[B, T, hidden]``."""
        hidden = self.embed(input_ids)
        for layer in self.layers[: self.sizes.cut]:
            hidden = layer(hidden, None, layout)
        return hidden

    def upper(self, hidden: Tensor, layout: Layout, teacher: bool = False) -> tuple[Tensor, Tensor]:
        """Run the layers from the cut on; ``teacher`` runs them as they were before the cut.

        Returns the normalised output, and the residual stream entering the last layer, each ``[B, T, hidden]``.
        """
        config, last = self.sizes, hidden
        single_input = self.norm_swiftkv(hidden) if config.is_swiftkv and not teacher else None
        shared: dict[int, KV] = {}
        for index in range(config.cut, config.num_layers):
            layer, owner, kv, last = self.layers[index], config.owner_of_layer[index], None, hidden
            if single_input is not None and layer.states is None:
                if owner == index:
                    shared[owner] = layer.self_attn.key_value(single_input, layout)
                kv = shared[owner]
            hidden = layer(hidden, kv, layout, teacher, single_input)
        return self.norm(hidden), last


class SwiftKVForCausalLM(nn.Module):
    """A causal language model; ``state_dict`` has the names of a Hugging Face checkpoint.

    ``with_teacher`` keeps the q, k and v projections that the layers above the cut had before it, so that teacher and
    student are one set of weights. With ``config.early_exit`` there are a norm and an LM head on the hidden state
    entering the cut (arXiv 2410.03960, appendices E and F).
    """

    def __init__(self, config: ModelConfig, *, with_teacher: bool = False) -> None:
        super().__init__()
        self.sizes = config
        self.model = Decoder(config, with_teacher)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False)
        if config.early_exit:
            self.lm_head_early_exit = nn.Linear(config.hidden_size, config.vocab_size, False)

    def head(self, output: Tensor) -> Tensor:
        """Normalised output ``[…, hidden]`` to logits ``[…, vocab]``."""
        if self.sizes.tie_embeddings:
            return divided(self.sizes, F.linear(output, self.model.embed_tokens.weight))
        return divided(self.sizes, self.lm_head(output))

    def early_exit_logits(self, hidden: Tensor) -> Tensor:
        """Residual stream entering the cut layer ``[…, hidden]`` to logits ``[…, vocab]``."""
        return divided(self.sizes, self.lm_head_early_exit(self.model.norm_early_exit(hidden)))

    def forward(self, input_ids: Tensor, layout: Layout | None = None) -> Tensor:
        """Return logits ``[B, T, vocab]`` of ``input_ids`` ``[B, T]``."""
        if layout is None:
            layout = make_layout(self.sizes, input_ids.shape[1], device=input_ids.device)
        return self.head(self.model.upper(self.model.lower(input_ids, layout), layout)[0])
