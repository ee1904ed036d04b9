"""Exact FLOPs of tokens, by part; a multiply-add counts 2 (arXiv 2410.03960, section 3.2 and Table 1)."""

from dataclasses import dataclass, replace
from typing import Any

from kvforge.costs.cache import cached_numbers, keys_at
from kvforge.costs.weights import expansion_weights, query_weights, state_input_weights
from kvforge.kv_policies.visibility import visibility_of
from model_defs import ModelConfig
from model_defs.kv_layout import NO_OWNER


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token: vocabulary (the head), K,V and Q,O projections, MLP, attention."""

    vocabulary: float
    key_value: float
    query_output: float
    mlp: float
    attention: float

    @property
    def total(self) -> float:
        """FLOPs of all parts."""
        return self.vocabulary + self.key_value + self.query_output + self.mlp + self.attention

    def to_json(self) -> dict[str, Any]:
        """Return the parts and their total as JSON-ready data."""
        return {**self.__dict__, "total": self.total}


def skipped_token(model: ModelConfig, context_length: int) -> TokenFlops:
    """Return the mean cost of a prompt token without logits, over a prompt of ``context_length`` tokens.

    Layers below the cut cost everything; above it only each owner's K and V projection is left, and nothing of a blind
    one. The embedding is a
    gather and such a token has no logits, so the vocabulary costs nothing.
    """
    return _token(model, model.cut, [mean_keys(context_length, window) for window in model.layer_windows], True)


def full_token(
    model: ModelConfig, context: float, is_expanded: bool = False, num_prompt_tokens: int | None = None
) -> TokenFlops:
    """Return the cost of an output token that attends ``context`` keys: all layers and the head. Above a blind cut it
    sees no more than anchors and what follows a prompt of ``num_prompt_tokens`` (default: ``context``).

    Latent attention (DeepSeek-V2) works on the cached rows themselves, or ``is_expanded`` as in prompts.
    """
    cost = _token(model, model.num_layers, keys_at(model, context, num_prompt_tokens), is_expanded)
    return replace(cost, vocabulary=2.0 * model.vocab_size * model.hidden_size)


def full_token_below(model: ModelConfig, context: float, is_expanded: bool = False) -> TokenFlops:
    """Return what of ``full_token`` a skipped token at the same place costs as well."""
    return _token(model, model.cut, keys_at(model, context), is_expanded)


def table_1(model: ModelConfig, context_length: int) -> TokenFlops:
    """Return the cost of a prompt token as Table 1 counts it: with the head and the embedding as if it were a GEMM."""
    cost = skipped_token(model, context_length)
    return replace(cost, vocabulary=4.0 * model.vocab_size * model.hidden_size)


def prompt_flops(model: ModelConfig, input_tokens: int) -> float:
    """Return the FLOPs of one prompt and its first output token: of the prompt's tokens only the last runs the layers
    above the cut and the head, and a blind cut's anchors the layers."""
    above = full_token(model, input_tokens).total - full_token_below(model, input_tokens).total
    num_anchors = min(model.num_anchors, input_tokens - 1)
    if num_anchors > 0:
        keys = (num_anchors + 1) / 2
        anchor = full_token(model, keys)
        above += num_anchors * (anchor.total - anchor.vocabulary - full_token_below(model, keys).total)
    return skipped_token(model, input_tokens).total * input_tokens + above


def output_flops(model: ModelConfig, input_tokens: int, output_tokens: int) -> float:
    """Return the FLOPs of the output tokens after the first, each of which attends all before it and itself."""
    steps = output_tokens - 1
    if steps < 1:
        return 0.0
    last = input_tokens + steps
    sums = [
        mean_keys(last, window) * last - mean_keys(input_tokens, window) * input_tokens
        for window in model.layer_windows
    ]
    if (visibility := visibility_of(model)) is not None:
        seen = visibility.num_seen(input_tokens, input_tokens) + (steps + 1) / 2
        sums[model.cut :] = [seen * steps] * (model.num_layers - model.cut)
    cost = _token(model, model.num_layers, [total / steps for total in sums], False)
    return (cost.total + 2.0 * model.vocab_size * model.hidden_size) * steps


def request_flops(model: ModelConfig, input_tokens: int, output_tokens: int) -> float:
    """Return the FLOPs of a request of ``input_tokens`` that produces ``output_tokens`` >= 1."""
    return prompt_flops(model, input_tokens) + output_flops(model, input_tokens, output_tokens)


def mean_keys(context_length: int, window: int) -> float:
    """Return the mean number of keys a causal query sees over positions 0..context_length-1."""
    if not window or window >= context_length:
        return (context_length + 1) / 2
    return (window * (window + 1) / 2 + (context_length - window) * window) / context_length


def _token(model: ModelConfig, num_full_layers: int, keys: list[float], is_expanded: bool) -> TokenFlops:
    """Cost without the vocabulary of a token that runs ``num_full_layers`` layers, ``keys[i]`` keys in layer i."""
    hidden, layers, of_expansion = model.hidden_size, range(num_full_layers), expansion_weights(model)
    owners = [owner for layer in layers if (owner := model.owner_of_layer[layer]) != NO_OWNER]
    expanded = len(set(owners)) if is_expanded else len(owners)
    attended = sum(query_weights(model, layer) + hidden * model.attended_dim_of(layer) for layer in layers)
    own = 2 * hidden * model.per_layer_input
    made = cached_numbers(model)
    if model.is_blind:  # a layer's K and V are made where it runs
        made = sum(model.cached_numbers_of(owner) for owner in model.owners if owner < num_full_layers)
    return TokenFlops(
        vocabulary=0.0,
        key_value=2.0 * hidden * made + 2.0 * of_expansion * expanded + 2.0 * state_input_weights(model),
        query_output=2.0 * attended,
        mlp=float(sum(_mlp(model, layer) for layer in layers) + own * (2 * num_full_layers + model.num_layers)),
        attention=float(
            sum(_mixing(model, layer, is_expanded, keys[layer]) for layer in layers)
            + sum(_updating(model, layer) for layer in model.linear_layers if layer >= model.cut or layer in layers)
        ),
    )


def _mlp(model: ModelConfig, layer: int) -> int:
    """FLOPs of a layer's MLP, or of the experts that a token goes to and of the choice among all."""
    if model.experts is None or not model.has_experts(layer):
        return 2 * model.mlp_matrices * model.hidden_size * model.intermediate_of(layer)
    experts = model.experts
    inner = experts.intermediate_size * experts.num_active + experts.shared_size
    chosen = experts.num_experts + experts.shared_gate
    return 2 * model.hidden_size * (model.mlp_matrices * inner + chosen)


def _mixing(model: ModelConfig, layer: int, is_expanded: bool, keys: float) -> float:
    """FLOPs by which one token reads those before it in a layer: ``keys`` of them, or a state."""
    if model.linear is None or not model.is_linear(layer):
        return _attention(model, layer, is_expanded) * keys
    return model.linear.read_flops + (model.linear.own_flops if layer >= model.cut else 0)


def _updating(model: ModelConfig, layer: int) -> int:
    """FLOPs by which one token changes a layer's state."""
    assert model.linear is not None
    return model.linear.update_flops(layer >= model.cut)


def _attention(model: ModelConfig, layer: int, is_expanded: bool) -> int:
    """FLOPs of one query and key in a layer. Latent rows themselves are attended unless ``is_expanded``; expanding
    query and result takes the weights that would expand the token's own row."""
    if model.latent and not is_expanded:
        return 2 * model.num_heads * (2 * model.latent.rank + model.latent.rope_dim)
    return 2 * (model.q_dim_of(layer) + model.attended_dim_of(layer))
