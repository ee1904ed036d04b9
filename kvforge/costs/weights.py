"""Weights: how many there are, and how many of them a decode step reads."""

from kvforge.common.number_formats import ELEMENT_BYTES, HEAD_DTYPES, SCALE_BYTES
from kvforge.common.number_formats import WEIGHT_BYTES as ENGINE_WEIGHT_BYTES
from kvforge.costs.shape import (
    LinearModel,
    ModelShape,
    at_layer,
    mlp_weights,
    num_routers,
    numbers_of_owners,
    own_input_weights,
    query_weights,
    router_weights,
)

WEIGHT_BYTES = {**ENGINE_WEIGHT_BYTES, "fp8": 1}
"""Bytes of a weight. Engines that store linear layers alone in 8 or 4 bits have more: embeddings stay as they were."""

_FLOATS_OF_ROW = {"int8": 2, "int4": 1, "int4_scales": 1, "int4_zeros": 1}
"""Numbers in float32 that each output of a quantized linear layer has."""

_DEPTH = {"int8": 4, "int4": 32, "int4_scales": 32, "int4_zeros": 32}
_PANEL = 64
"""Inputs and outputs of quantized layers are padded to multiples of these, gates and what they multiply to half a panel
each (``plugins/packed_linear``)."""


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Return the bytes of all weights, which lie in memory; ``dtype`` is a key of ``WEIGHT_BYTES``.

    Where linear layers are quantized they are padded and have some float32 numbers a row besides: int8 its scale and
    its sum, int4 the scale of its steps or the factor of its scales, which are counted with the weights. Everything
    else stays in bf16, the table of embeddings too where it is the head's, and what chooses among experts.
    """
    if dtype not in _FLOATS_OF_ROW:
        return round(shape.num_parameters * WEIGHT_BYTES[dtype])
    lookup = shape.vocab_size * shape.hidden_size
    head = lookup if shape.exit_head else 0
    others = shape.num_parameters - step_weights(shape) - head
    if others < lookup:  # the embeddings are the head's
        others += lookup
    count, rows = _padded(shape, dtype)
    of_rows = _FLOATS_OF_ROW[dtype] * rows * SCALE_BYTES
    if shape.exit_head:
        count, rows = _padded_matrix(shape.vocab_size, shape.hidden_size, dtype)
        of_rows += round(count * _head_bytes(dtype)) + _FLOATS_OF_ROW[dtype] * rows * SCALE_BYTES
    return step_weight_bytes(shape, dtype) + of_rows + others * ELEMENT_BYTES["bfloat16"]


def step_weights(model: LinearModel, tokens: int | None = None) -> int:
    """Return the weights that a decode step of many sequences reads: every linear layer, all experts and the head;
    not biases, scales and norms, the lookup of embeddings, nor an early exit's head. Of ``tokens`` it reads the experts
    that so many choose, each as often as another."""
    hidden, layers = model.hidden_size, range(model.num_layers)
    of_layers = sum(query_weights(model, layer) + hidden * at_layer(model, model.output_dim, layer) for layer in layers)
    of_owners = hidden * numbers_of_owners(model)
    attention = of_layers + model.num_owners * model.expansion_weights + of_owners
    return attention + mlp_weights(model, tokens) + own_input_weights(model) + model.vocab_size * hidden


def step_weight_bytes(model: LinearModel, dtype: str, tokens: int | None = None) -> int:
    """Return the bytes of ``step_weights``, with the padding of quantized ones; ``dtype`` is a key of
    ``WEIGHT_BYTES``."""
    if dtype not in _DEPTH:
        return round(step_weights(model, tokens) * WEIGHT_BYTES[dtype])
    linear = _padded(model, dtype, tokens)[0] * WEIGHT_BYTES[dtype]
    head = _padded_matrix(model.vocab_size, model.hidden_size, dtype)[0]
    linear += head * (_head_bytes(dtype) - WEIGHT_BYTES[dtype])
    return round(linear) + router_weights(model) * ELEMENT_BYTES["bfloat16"]


def _head_bytes(dtype: str) -> float:
    """Return the bytes of a weight of the head."""
    return WEIGHT_BYTES[HEAD_DTYPES.get(dtype, dtype)]


def _padded(model: LinearModel, dtype: str, tokens: int | None = None) -> tuple[int, int]:
    """Return the weights and the rows of all quantized layers but an exit's head, padded as they are packed, those that
    read the same input as one."""
    num_layers, hidden, cached = model.num_layers, model.hidden_size, model.cached_numbers
    below = min(model.cut, model.num_owners)  # fewer than the cut where all layers share one cache
    mlps: list[tuple[float, int]] = [(num_layers - num_routers(model), model.intermediate_size)]
    if model.layer_intermediate_sizes:
        mlps = [(1, size) for size in model.layer_intermediate_sizes]
    layers, own = range(num_layers), model.per_layer_input or 0
    if model.experts:
        shared = model.experts.num_shared * model.experts.intermediate_size
        routed = model.experts.count(tokens) - model.experts.num_shared
        mlps.append((num_routers(model) * routed, model.experts.intermediate_size))
        mlps += [(num_routers(model), shared)] if shared else []
    first = (model.latent.query_rank if model.latent else None) or model.query_dim  # what the input is projected to
    matrices = [
        *((1, _padded_matrix(at_layer(model, first + cached, i), hidden, dtype)) for i in layers[:below]),
        (1, _padded_matrix((model.num_owners - below) * cached, hidden, dtype)),
        *((1, _padded_matrix(at_layer(model, first, i), hidden, dtype)) for i in layers[below:]),
        *_padded_latent(model, dtype),
        *((1, _padded_matrix(hidden, at_layer(model, model.output_dim, i), dtype)) for i in layers),
        (num_layers, _padded_matrix(own, hidden, dtype)),
        (num_layers, _padded_matrix(hidden, own, dtype) if own else (0, 0)),
        (1, _padded_matrix(num_layers * own, hidden, dtype)),
        *((2 * times, _padded_matrix(inner, hidden, dtype, _PANEL // 2)) for times, inner in mlps),
        *((times, _padded_matrix(hidden, inner, dtype)) for times, inner in mlps),
        (1, _padded_matrix(model.vocab_size, hidden, dtype)),
    ]
    weights = sum(times * count for times, (count, _) in matrices)
    return round(weights), round(sum(times * rows for times, (_, rows) in matrices))


def _padded_latent(model: LinearModel, dtype: str) -> list[tuple[int, tuple[int, int]]]:
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
        matrices.append((model.num_layers, _padded_matrix(model.query_dim, latent.query_rank, dtype)))
    return matrices


def _padded_matrix(outputs: int, inputs: int, dtype: str, panel: int = _PANEL) -> tuple[int, int]:
    """Return the weights and the rows of a matrix with its padding."""
    rows, depth = -(-outputs // panel) * panel, -(-inputs // _DEPTH[dtype]) * _DEPTH[dtype]
    return rows * depth, rows
