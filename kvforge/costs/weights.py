"""Weights: how many there are, and how many of them a decode step reads."""

import functools
import math
from collections.abc import Iterable

from kvforge.common.number_formats import ELEMENT_BYTES, HEAD_DTYPES, SCALE_BYTES
from kvforge.common.number_formats import WEIGHT_BYTES as ENGINE_WEIGHT_BYTES
from kvforge.costs.cache import cached_numbers
from model_defs import ModelConfig
from model_defs.draft_head import DraftHead
from model_defs.experts import Experts
from model_defs.weights import weight_specs

WEIGHT_BYTES = {**ENGINE_WEIGHT_BYTES, "fp8": 1}
"""Bytes of a weight. Engines that store linear layers alone in 8 or 4 bits have more: embeddings stay as they were."""

_FLOATS_OF_ROW = {"int8": 2, "int4": 1, "int4_scales": 1, "int4_zeros": 1}
"""Numbers in float32 that each output of a quantized linear layer has."""

_DEPTH = {"int8": 4, "int4": 32, "int4_scales": 32, "int4_zeros": 32}
HEADS = ("lm_head", "embed")
"""The name of the head among linear layers, and its name where it is the table of embeddings."""
_PANEL = 64
"""Inputs and outputs of quantized layers are padded to multiples of these, gates and what they multiply to half a panel
each (``plugins/packed_linear``)."""


@functools.lru_cache(maxsize=64)
def num_parameters(model: ModelConfig) -> int:
    """Return the parameters of the model's graphs: K and V projections of the owners only, an exit's head."""
    return sum(spec.num_parameters for spec in weight_specs(model))


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of all weights, which lie in memory; ``dtype`` is a key of ``WEIGHT_BYTES``.

    Where linear layers are quantized they are padded and have some float32 numbers a row besides: int8 its scale and
    its sum, int4 the scale of its steps or the factor of its scales, which are counted with the weights. Everything
    else stays in bf16, the table of embeddings too where it is the head's, and what chooses among experts.
    """
    if dtype not in _FLOATS_OF_ROW:
        return round(num_parameters(model) * WEIGHT_BYTES[dtype])
    lookup = model.vocab_size * model.hidden_size
    head = lookup if model.early_exit else 0
    others = num_parameters(model) - step_weights(model) - head
    if others < lookup:  # the embeddings are the head's
        others += lookup
    count, rows = _padded(model, dtype)
    of_rows = _FLOATS_OF_ROW[dtype] * rows * SCALE_BYTES
    if model.early_exit:
        count, rows = _padded_matrix(model.vocab_size, model.hidden_size, dtype)
        of_rows += round(count * _head_bytes(dtype)) + _FLOATS_OF_ROW[dtype] * rows * SCALE_BYTES
    return step_weight_bytes(model, dtype) + of_rows + others * ELEMENT_BYTES["bfloat16"]


def head_weight_bytes(model: ModelConfig, head: DraftHead, dtype: str) -> int:
    """Return the bytes of a draft head's weights but those that it shares with its model, whose ``dtype`` its experts
    have; all others are as wide as what is computed."""
    one, width, table = head.model, head.width, head.model.vocab_size * head.width
    count = num_parameters(one) - 2 * table + head.own_embedding * table + head.own_lm_head * head.draft_vocab * width
    if len(head.layers) == 1:  # a module's norms and projection, and what turns the state
        count += (3 + (2 + head.is_turned) * width) * width
    else:
        count += (1 + len(head.layers) * model.hidden_size + one.q_dim + 2 * one.kv_dim) * width
    experts = 3 * one.experts.num_experts * width * one.experts.intermediate_size if one.experts else 0
    wide = ELEMENT_BYTES["float32" if dtype == "float32" else "bfloat16"]
    return round((count - experts) * wide + experts * WEIGHT_BYTES[dtype])


def step_weights(model: ModelConfig, tokens: int | None = None) -> int:
    """Return the weights that a decode step of many sequences reads: every linear layer, all experts and the head;
    not biases, scales and norms, the lookup of embeddings, nor an early exit's head. Of ``tokens`` it reads the experts
    that so many choose, each as often as another."""
    hidden, layers = model.hidden_size, range(model.num_layers)
    of_layers = sum(query_weights(model, layer) + hidden * model.attended_dim_of(layer) for layer in layers)
    of_owners = model.num_owners * expansion_weights(model) + hidden * cached_numbers(model)
    of_inputs = 3 * model.num_layers * hidden * model.per_layer_input + state_input_weights(model)
    return of_layers + of_owners + mlp_weights(model, tokens) + of_inputs + model.vocab_size * hidden


def query_weights(model: ModelConfig, layer: int) -> int:
    """Return the weights that make a layer's queries and gates, through a latent of their own where there is one; in
    layers that keep a state all that reads the stream."""
    if model.linear is not None and model.is_linear(layer):
        kind, is_above = model.linear, layer >= model.cut
        behind = math.prod(kind.gate_matrix) + (0 if is_above else math.prod(kind.decay_matrix))
        return model.hidden_size * (kind.rounded_rows(is_above) + kind.exact_rows(is_above)) + behind
    rank = model.latent.query_rank if model.latent else None
    rows = model.projected_q_dim_of(layer)
    return model.hidden_size * rows if rank is None else rank * (model.hidden_size + model.q_dim)


def state_input_weights(model: ModelConfig) -> int:
    """Return the weights that make the updates of states above a cut, of the single input."""
    if (kind := model.linear) is None:
        return 0
    return len(model.upper_linear) * (model.hidden_size * sum(kind.input_rows) + math.prod(kind.decay_matrix))


def expansion_weights(model: ModelConfig) -> int:
    """Return the weights of one owner that expand a latent row to keys and values; 0 where the cache holds these."""
    return model.latent.rank * model.num_heads * model.latent.expanded_dim if model.latent else 0


def mlp_weights(model: ModelConfig, tokens: int | None = None) -> int:
    """Return the weights of all layers' MLPs, where there are experts of all, or of those that ``tokens`` choose, and
    what chooses among them."""
    dense = sum(model.intermediate_of(layer) for layer in range(model.num_layers) if not model.has_experts(layer))
    found = model.mlp_matrices * model.hidden_size * dense + router_weights(model)
    if model.experts:
        inner = experts_used(model.experts, tokens) * model.experts.intermediate_size + model.experts.shared_size
        found += round(len(model.experts.layers) * inner * model.mlp_matrices * model.hidden_size)
    return found


def experts_used(experts: Experts, tokens: int | None = None) -> float:
    """Return the number of experts of a layer, or of those that so many ``tokens`` use on average, where each is chosen
    as often as another; without shared ones."""
    share = 1 if tokens is None else 1 - (1 - experts.num_active / experts.num_experts) ** tokens
    return experts.num_experts * share


def router_weights(model: ModelConfig) -> int:
    """Return the weights of all layers that choose among experts, and that weigh shared ones."""
    experts = model.experts
    rows = experts.num_experts + experts.shared_gate if experts else 0
    return len(experts.layers) * model.hidden_size * rows if experts else 0


def _float_weights(model: ModelConfig) -> int:
    """Return the weights of linear layers that are never quantized: routers, and gates of layers that keep a state."""
    if (kind := model.linear) is None:
        return router_weights(model)
    rows = sum(kind.exact_rows(layer >= model.cut) for layer in kind.layers)
    rows += len(model.upper_linear) * kind.input_rows[1]
    return router_weights(model) + model.hidden_size * rows + len(kind.layers) * math.prod(kind.decay_matrix)


def step_weight_bytes(model: ModelConfig, dtype: str, tokens: int | None = None) -> int:
    """Return the bytes of ``step_weights``, with the padding of quantized ones; ``dtype`` is a key of
    ``WEIGHT_BYTES``. Where some layers are int8 beside others in 4 bits, ``bytes_more_as_int8`` come on top."""
    if dtype not in _DEPTH:
        return round(step_weights(model, tokens) * WEIGHT_BYTES[dtype])
    linear = _padded(model, dtype, tokens)[0] * WEIGHT_BYTES[dtype]
    head = _padded_matrix(model.vocab_size, model.hidden_size, dtype)[0]
    linear += head * (_head_bytes(dtype) - WEIGHT_BYTES[dtype])
    return round(linear) + _float_weights(model) * ELEMENT_BYTES["bfloat16"]


def bytes_more_as_int8(model: ModelConfig, dtype: str, layers: Iterable[str]) -> int:
    """Return how many more bytes of weights a step reads where the linear ``layers`` of these names are int8, not
    ``dtype`` in 4 bits."""
    shapes, more = matrix_shapes(model), 0.0
    for name in layers:
        *experts, rows, depth = shapes[name]
        own = _head_bytes(dtype) if name in HEADS else WEIGHT_BYTES[dtype]
        of_one = _padded_matrix(rows, depth, "int8")[0] - _padded_matrix(rows, depth, dtype)[0] * own
        more += math.prod(experts) * of_one
    return round(more)


@functools.lru_cache(maxsize=64)
def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights that are matrices, or those of all experts, by the names of their layers."""
    return {spec.name.removesuffix(".weight"): spec.shape for spec in weight_specs(model) if len(spec.shape) > 1}


def weight_bits(model: ModelConfig, num_bytes: float) -> float:
    """Return the bits of a weight where those that a step reads take so many bytes."""
    return 8 * num_bytes / step_weights(model)


def _head_bytes(dtype: str) -> float:
    """Return the bytes of a weight of the head."""
    return WEIGHT_BYTES[HEAD_DTYPES.get(dtype, dtype)]


def _padded(model: ModelConfig, dtype: str, tokens: int | None = None) -> tuple[int, int]:
    """Return the weights and the rows of all quantized layers but an exit's head, padded as they are packed, those that
    read the same input as one."""
    layers, hidden, own = range(model.num_layers), model.hidden_size, model.per_layer_input
    mlps: list[tuple[float, int]] = [(1, model.intermediate_of(i)) for i in layers if not model.has_experts(i)]
    if model.experts:
        routed, count = experts_used(model.experts, tokens), len(model.experts.layers)
        mlps.append((count * routed, model.experts.intermediate_size))
        mlps += [(count, model.experts.shared_size)] if model.experts.num_shared else []
    rank = model.latent.query_rank if model.latent else None
    kind = model.linear
    inputs = len(model.mlp_inputs)
    projected = [
        kind.rounded_rows(i >= model.cut) if kind and model.is_linear(i) else rank or model.projected_q_dim_of(i)
        for i in layers
    ]
    of_states = len(model.upper_linear) * kind.input_rows[0] if kind else 0
    of_gate = kind.gate_matrix if kind else (0, 0)
    own_kv = [model.cached_numbers_of(i) if model.has_own_kv(i) else 0 for i in layers]
    single_input = model.upper_owners if model.is_swiftkv else ()
    matrices = [
        *((1, _padded_matrix(projected[i] + own_kv[i], hidden, dtype)) for i in layers),
        (1, _padded_matrix(sum(map(model.cached_numbers_of, single_input)), hidden, dtype)),
        (1, _padded_matrix(of_states, hidden, dtype)),
        (len(model.linear_layers), _padded_matrix(*of_gate, dtype)),
        *_padded_latent(model, dtype),
        *((1, _padded_matrix(hidden, model.attended_dim_of(i), dtype)) for i in layers),
        (len(layers), _padded_matrix(own, hidden, dtype)),
        (len(layers), _padded_matrix(hidden, own, dtype)),
        (1, _padded_matrix(len(layers) * own, hidden, dtype)),
        *((inputs * times, _padded_matrix(inner, hidden, dtype, _PANEL // inputs)) for times, inner in mlps),
        *((times, _padded_matrix(hidden, inner, dtype)) for times, inner in mlps),
        (1, _padded_matrix(model.vocab_size, hidden, dtype)),
    ]
    weights = sum(times * count for times, (count, _) in matrices)
    return round(weights), round(sum(times * rows for times, (_, rows) in matrices))


def _padded_latent(model: ModelConfig, dtype: str) -> list[tuple[int, tuple[int, int]]]:
    """Return how often there is each matrix that latent attention has besides, with its weights and rows: of queries
    from their latent, and of each head and owner."""
    latent = model.latent
    if latent is None:
        return []
    of_heads = (
        _padded_matrix(latent.rank, latent.nope_dim, dtype),
        _padded_matrix(latent.value_dim, latent.rank, dtype),
    )
    matrices = [(model.num_owners * model.num_heads, matrix) for matrix in of_heads]
    if latent.query_rank is not None:
        attending = model.num_layers - len(model.linear_layers)
        matrices.append((attending, _padded_matrix(model.q_dim, latent.query_rank, dtype)))
    return matrices


def _padded_matrix(outputs: int, inputs: int, dtype: str, panel: int = _PANEL) -> tuple[int, int]:
    """Return the weights and the rows of a matrix with its padding; of one without inputs there is nothing."""
    if not inputs:
        return 0, 0
    rows, depth = -(-outputs // panel) * panel, -(-inputs // _DEPTH[dtype]) * _DEPTH[dtype]
    return rows * depth, rows
