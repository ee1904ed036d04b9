"""Exact FLOPs of tokens, by part; a multiply-add counts 2 (arXiv 2410.03960, section 3.2 and Table 1)."""

from dataclasses import dataclass, replace
from typing import Any

from kvforge.costs.shape import ModelShape, at_layer, inner_sizes, numbers_of_owners, query_weights


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


def skipped_token(shape: ModelShape, context_length: int) -> TokenFlops:
    """Return the mean cost of a prompt token without logits, over a prompt of ``context_length`` tokens.

    Layers below the cut cost everything; above it only each owner's K and V projection is left. The embedding is a
    gather and such a token has no logits, so the vocabulary costs nothing.
    """
    return _token(shape, shape.cut, [mean_keys(context_length, window) for window in shape.layer_windows], True)


def full_token(shape: ModelShape, context: float, is_expanded: bool = False) -> TokenFlops:
    """Return the cost of an output token that attends ``context`` keys: all layers and the head.

    Latent attention (DeepSeek-V2) works on the cached rows themselves, or ``is_expanded`` as in prompts.
    """
    cost = _token(shape, shape.num_layers, _keys_at(shape, context), is_expanded)
    return replace(cost, vocabulary=2.0 * shape.vocab_size * shape.hidden_size)


def full_token_below(shape: ModelShape, context: float, is_expanded: bool = False) -> TokenFlops:
    """Return what of ``full_token`` a skipped token at the same place costs as well."""
    return _token(shape, shape.cut, _keys_at(shape, context), is_expanded)


def table_1(shape: ModelShape, context_length: int) -> TokenFlops:
    """Return the cost of a prompt token as Table 1 counts it: with the head and the embedding as if it were a GEMM."""
    cost = skipped_token(shape, context_length)
    return replace(cost, vocabulary=4.0 * shape.vocab_size * shape.hidden_size)


def prompt_flops(shape: ModelShape, input_tokens: int) -> float:
    """Return the FLOPs of one prompt and its first output token: of the prompt's tokens only the last runs the layers
    above the cut and the head."""
    above = full_token(shape, input_tokens).total - full_token_below(shape, input_tokens).total
    return skipped_token(shape, input_tokens).total * input_tokens + above


def output_flops(shape: ModelShape, input_tokens: int, output_tokens: int) -> float:
    """Return the FLOPs of the output tokens after the first, each of which attends all before it and itself."""
    steps = output_tokens - 1
    if steps < 1:
        return 0.0
    last = input_tokens + steps
    sums = [
        mean_keys(last, window) * last - mean_keys(input_tokens, window) * input_tokens
        for window in shape.layer_windows
    ]
    cost = _token(shape, shape.num_layers, [total / steps for total in sums], False)
    return (cost.total + 2.0 * shape.vocab_size * shape.hidden_size) * steps


def request_flops(shape: ModelShape, input_tokens: int, output_tokens: int) -> float:
    """Return the FLOPs of a request of ``input_tokens`` that produces ``output_tokens`` >= 1."""
    return prompt_flops(shape, input_tokens) + output_flops(shape, input_tokens, output_tokens)


def mean_keys(context_length: int, window: int) -> float:
    """Return the mean number of keys a causal query sees over positions 0..context_length-1."""
    if not window or window >= context_length:
        return (context_length + 1) / 2
    return (window * (window + 1) / 2 + (context_length - window) * window) / context_length


def _keys_at(shape: ModelShape, context: float) -> list[float]:
    """Keys that a token sees in each layer where ``context`` are there."""
    return [min(context, window) if window else context for window in shape.layer_windows]


def _token(shape: ModelShape, num_full_layers: int, keys: list[float], is_expanded: bool) -> TokenFlops:
    """Cost without the vocabulary of a token that runs ``num_full_layers`` layers, ``keys[i]`` keys in layer i."""
    hidden, heads, layers = shape.hidden_size, shape.num_heads, range(num_full_layers)
    per_key = 2 * (shape.query_dim + shape.output_dim)
    if shape.latent and not is_expanded:
        # The latent rows themselves are attended; expanding query and result takes the weights that would expand
        # the token's own row.
        per_key = 2 * heads * (2 * shape.latent.rank + shape.latent.rope_dim)
    expanded = len({shape.owner_of_layer[layer] for layer in layers}) if is_expanded else num_full_layers
    dense = 6 * hidden * shape.intermediate_size
    mlp = 6 * hidden * sum(inner_sizes(shape)[:num_full_layers])
    own = 2 * hidden * (shape.per_layer_input or 0)
    if shape.experts:
        kinds = shape.experts
        mixed = 6 * hidden * kinds.intermediate_size * (kinds.num_active + kinds.num_shared)
        num_dense = sum(layer < num_full_layers for layer in kinds.dense_layers)
        mlp = num_dense * dense + (num_full_layers - num_dense) * (mixed + 2 * hidden * kinds.num_routed)
    attended = sum(query_weights(shape, layer) + hidden * at_layer(shape, shape.output_dim, layer) for layer in layers)
    return TokenFlops(
        vocabulary=0.0,
        key_value=2.0 * hidden * numbers_of_owners(shape) + 2.0 * shape.expansion_weights * expanded,
        query_output=2.0 * attended,
        mlp=float(mlp + own * (2 * num_full_layers + shape.num_layers)),
        attention=float(sum(at_layer(shape, per_key, layer) * keys[layer] for layer in layers)),
    )
