"""Weights: how many there are, and how many of them a decode step reads."""

from kvforge.common.number_formats import ELEMENT_BYTES, SCALE_BYTES
from kvforge.common.number_formats import WEIGHT_BYTES as ENGINE_WEIGHT_BYTES
from kvforge.costs.shape import LinearModel, ModelShape, mlp_weights, num_routers, router_weights

WEIGHT_BYTES = {**ENGINE_WEIGHT_BYTES, "fp8": 1}
"""Bytes of a weight. Engines that store linear layers alone in 8 or 4 bits have more: embeddings stay as they were."""

_FLOATS_OF_ROW = {"int8": 2, "int4": 1, "int4_zeros": 1}
"""Numbers in float32 that each output of a quantized linear layer has."""


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Return the bytes of all weights, which lie in memory; ``dtype`` is a key of ``WEIGHT_BYTES``.

    Where linear layers are quantized they have some float32 numbers a row besides: int8 its scale and its sum, int4 the
    factor of its scales, which are counted with the weights. Everything else stays in bf16, the table of embeddings
    too where it is the head's, and what chooses among experts.
    """
    if dtype not in _FLOATS_OF_ROW:
        return round(shape.num_parameters * WEIGHT_BYTES[dtype])
    lookup = shape.vocab_size * shape.hidden_size
    linear = step_weights(shape) - router_weights(shape) + (lookup if shape.exit_head else 0)
    others = shape.num_parameters - linear
    if others < lookup:  # the embeddings are the head's
        others += lookup
    of_rows = _FLOATS_OF_ROW[dtype] * _linear_rows(shape) * SCALE_BYTES
    return round(linear * WEIGHT_BYTES[dtype]) + of_rows + others * ELEMENT_BYTES["bfloat16"]


def step_weights(model: LinearModel, tokens: int | None = None) -> int:
    """Return the weights that a decode step of many sequences reads: every linear layer, all experts and the head;
    not biases, scales and norms, the lookup of embeddings, nor an early exit's head. Of ``tokens`` it reads the experts
    that so many choose, each as often as another."""
    of_layer = model.hidden_size * (model.query_dim + model.output_dim) + model.expansion_weights
    of_owners = model.num_owners * model.hidden_size * model.cached_numbers
    return model.num_layers * of_layer + of_owners + mlp_weights(model, tokens) + model.vocab_size * model.hidden_size


def step_weight_bytes(model: LinearModel, dtype: str, tokens: int | None = None) -> int:
    """Return the bytes of ``step_weights``; ``dtype`` is a key of ``WEIGHT_BYTES``."""
    in_bf16 = router_weights(model) if dtype in _FLOATS_OF_ROW else 0
    linear = (step_weights(model, tokens) - in_bf16) * WEIGHT_BYTES[dtype]
    return round(linear) + in_bf16 * ELEMENT_BYTES["bfloat16"]


def _linear_rows(shape: ModelShape) -> int:
    """Rows, which are outputs, of all quantized layers of a model without latent attention."""
    hidden, heads, sparse = shape.hidden_size, shape.vocab_size * (2 if shape.exit_head else 1), num_routers(shape)
    mlps = (shape.num_layers - sparse) * (2 * shape.intermediate_size + hidden)
    if shape.experts:
        mlps += sparse * shape.experts.num_routed * (2 * shape.experts.intermediate_size + hidden)
    return shape.num_layers * (shape.query_dim + hidden) + mlps + shape.num_owners * shape.cached_numbers + heads
