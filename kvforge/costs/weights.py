"""Weights: how many there are, and how many of them a decode step reads."""

from typing import Protocol

from kvforge.common.number_formats import WEIGHT_BYTES as ENGINE_WEIGHT_BYTES
from kvforge.costs.shape import Experts, ModelShape

WEIGHT_BYTES = {**ENGINE_WEIGHT_BYTES, "fp8": 1}
"""Bytes of a weight. Engines that store linear layers alone in 8 bits have more: embeddings stay as they were."""


class LinearModel(Protocol):
    """Sizes of a model's linear layers."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_owners(self) -> int: ...
    @property
    def query_dim(self) -> int: ...
    @property
    def output_dim(self) -> int: ...
    @property
    def cached_numbers(self) -> int: ...
    @property
    def expansion_weights(self) -> int: ...
    @property
    def experts(self) -> Experts | None: ...


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Return the bytes of all weights, which lie in memory; ``dtype`` is a key of ``WEIGHT_BYTES``."""
    return shape.num_parameters * WEIGHT_BYTES[dtype]


def step_weights(model: LinearModel) -> int:
    """Return the weights that a decode step of many sequences reads: every linear layer, all experts and the head;
    not biases, scales and norms, the lookup of embeddings, nor an early exit's head."""
    of_layer = model.hidden_size * (model.query_dim + model.output_dim) + model.expansion_weights
    dense = 3 * model.hidden_size * model.intermediate_size
    mlp = model.num_layers * dense
    if model.experts:
        kinds = model.experts
        num_mixed = model.num_layers - kinds.num_dense_layers
        mlp = kinds.num_dense_layers * dense + num_mixed * kinds.weights(model.hidden_size)
    of_owners = model.num_owners * model.hidden_size * model.cached_numbers
    return model.num_layers * of_layer + of_owners + mlp + model.vocab_size * model.hidden_size


def step_weight_bytes(model: LinearModel, dtype: str) -> int:
    """Return the bytes of ``step_weights``; ``dtype`` is a key of ``WEIGHT_BYTES``."""
    return step_weights(model) * WEIGHT_BYTES[dtype]
