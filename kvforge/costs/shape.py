"""The sizes of a model that its costs follow from."""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from kvforge.common.errors import KvforgeError


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek-V2's attention: the cache holds ``rank`` latent numbers and a shared rotated key of ``rope_dim``;
    a head's query and key have ``nope_dim + rope_dim`` numbers, its value ``value_dim``. Queries are made of a latent
    of ``query_rank`` numbers, where that is not None."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in all layers but ``dense_layers``: of ``num_routed`` experts ``num_active`` run, and
    always ``num_shared``; each is an MLP of ``intermediate_size``."""

    num_routed: int
    num_active: int
    num_shared: int
    intermediate_size: int
    dense_layers: tuple[int, ...] = ()

    def weights(self, hidden_size: int, tokens: int | None = None) -> float:
        """Return the weights of one layer's experts and of what chooses among them; with ``tokens``, of the experts
        that so many tokens choose on average, where each is chosen as often as another."""
        return self.count(tokens) * 3 * hidden_size * self.intermediate_size + hidden_size * self.num_routed

    def count(self, tokens: int | None = None) -> float:
        """Return the number of experts of a layer, or of those that so many ``tokens`` use on average."""
        share = 1 if tokens is None else 1 - (1 - self.num_active / self.num_routed) ** tokens
        return self.num_routed * share + self.num_shared


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
    def cut(self) -> int: ...
    @property
    def query_dim(self) -> int: ...
    @property
    def output_dim(self) -> int: ...
    @property
    def cached_numbers(self) -> int: ...
    @property
    def expansion_weights(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def owner_of_layer(self) -> tuple[int, ...]: ...
    @property
    def layer_head_dims(self) -> tuple[int, ...]: ...
    @property
    def layer_intermediate_sizes(self) -> tuple[int, ...]: ...
    @property
    def per_layer_input(self) -> int | None: ...
    @property
    def experts(self) -> Experts | None: ...
    @property
    def latent(self) -> LatentAttention | None: ...
    @property
    def num_heads(self) -> int: ...


class AttentionSizes(Protocol):
    """Sizes of a model's attention."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def latent(self) -> LatentAttention | None: ...


class HeadSizes(Protocol):
    """Sizes of a model's heads."""

    @property
    def head_dim(self) -> int: ...
    @property
    def layer_head_dims(self) -> tuple[int, ...]: ...


class OwnerSizes(HeadSizes, Protocol):
    """Sizes of a model's caches."""

    @property
    def cached_numbers(self) -> int: ...
    @property
    def owner_of_layer(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class ModelShape:
    """A model with a cut and K,V owners as in ``Manifest``; ``base_parameters`` are those of the model without a cut.

    ``kv_bias`` and ``k_norm`` say whether the K and V projections have biases and K a norm, which a layer without a
    cache of its own lacks; ``early_exit`` that there is a second head at the cut. ``layer_head_dims``,
    ``layer_intermediate_sizes`` and ``per_layer_input`` are as in ``Manifest``. With ``is_native`` the model was
    trained with its cut and its owners, and has no other.
    """

    model: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layer_windows: tuple[int, ...]
    cut: int
    owner_of_layer: tuple[int, ...]
    base_parameters: int
    kv_bias: bool = False
    k_norm: bool = False
    early_exit: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    layer_head_dims: tuple[int, ...] = ()
    layer_intermediate_sizes: tuple[int, ...] = ()
    per_layer_input: int | None = None
    is_native: bool = False

    @property
    def num_owners(self) -> int:
        """Number of layers that have a K,V cache."""
        return len(set(self.owner_of_layer))

    @property
    def query_dim(self) -> int:
        """Outputs of a layer's query projection."""
        return query_dim(self)

    @property
    def output_dim(self) -> int:
        """Inputs of a layer's output projection."""
        return output_dim(self)

    @property
    def cached_numbers(self) -> int:
        """Numbers one token keeps in the cache of one owner."""
        return cached_numbers(self)

    @property
    def cached_rows(self) -> int:
        """Rows of the cache that one token adds to one owner; a dynamic 8-bit cache has one scale for each."""
        return cached_rows(self)

    @property
    def expansion_weights(self) -> int:
        """Weights of one owner that expand a latent row to keys and values; 0 where the cache holds these."""
        return expansion_weights(self)

    @property
    def num_parameters(self) -> int:
        """Parameters of the engine: K and V projections of the owners only, the cut's norm and an exit's head."""
        if self.is_native:
            return self.base_parameters
        of_owner = self.hidden_size * self.cached_numbers + (self.cached_numbers if self.kv_bias else 0)
        of_owner += self.head_dim if self.k_norm else 0
        of_owner += self.latent.rank + self.expansion_weights if self.latent else 0
        at_cut = (self.hidden_size if self.cut < self.num_layers else 0) + self.exit_head
        return self.base_parameters - (self.num_layers - self.num_owners) * of_owner + at_cut

    @property
    def exit_head(self) -> int:
        """Parameters of an early exit: a head and its norm; 0 without one or without a cut to leave at."""
        has_exit = self.early_exit and self.cut < self.num_layers
        return (self.vocab_size + 1) * self.hidden_size if has_exit else 0

    def with_cut(self, cut: int, group_size: int = 1) -> "ModelShape":
        """Return the model with another cut and other AcrossKV groups; ``cut = num_layers`` is the plain model.

        Raises:
            KvforgeError: the cut or the group size is not one of this model.
        """
        if not 1 <= cut <= self.num_layers:
            raise KvforgeError(
                f"--cut {cut} is outside {self.model}; give 1 to {self.num_layers}, where {self.num_layers} is no cut."
            )
        if self.is_native:
            if cut != self.num_layers and cut != 1 + max(self.owner_of_layer):
                raise KvforgeError(
                    f"--cut {cut} is not of {self.model}, whose layers share caches already; give "
                    f"{1 + max(self.owner_of_layer)}, or {self.num_layers} for no cut."
                )
            return dataclasses.replace(self, cut=cut)
        if group_size < 1:
            raise KvforgeError(
                f"--group-size is {group_size}; give the number of layers that share a cache, at least 1."
            )
        from model_defs.kv_layout import owner_table

        return dataclasses.replace(self, cut=cut, owner_of_layer=owner_table(self.num_layers, cut, group_size))

    def without_cut(self) -> "ModelShape":
        """Return the plain model."""
        return self.with_cut(self.num_layers)

    def merged(self) -> "ModelShape":
        """Return the plain model with one cache for all layers: the bound of merging caches without skipping work."""
        return dataclasses.replace(self, cut=self.num_layers, owner_of_layer=(0,) * self.num_layers)


def query_dim(model: AttentionSizes) -> int:
    """Return the outputs of a layer's query projection."""
    dim = model.latent.nope_dim + model.latent.rope_dim if model.latent else model.head_dim
    return model.num_heads * dim


def output_dim(model: AttentionSizes) -> int:
    """Return the inputs of a layer's output projection."""
    return model.num_heads * (model.latent.value_dim if model.latent else model.head_dim)


def cached_numbers(model: AttentionSizes) -> int:
    """Return the numbers that one token keeps in the cache of one owner."""
    return model.latent.rank + model.latent.rope_dim if model.latent else 2 * model.num_kv_heads * model.head_dim


def cached_rows(model: AttentionSizes) -> int:
    """Return the rows of the cache that one token adds to one owner; a dynamic 8-bit cache has one scale for each."""
    return 1 if model.latent else 2 * model.num_kv_heads


def expansion_weights(model: AttentionSizes) -> int:
    """Return the weights of one owner that expand a latent row to keys and values; 0 where the cache holds these."""
    latent = model.latent
    return latent.rank * model.num_heads * (latent.nope_dim + latent.value_dim) if latent else 0


def query_weights(model: LinearModel, layer: int) -> int:
    """Return the weights that make a layer's queries, through a latent of their own where there is one."""
    rank = model.latent.query_rank if model.latent else None
    if rank is None:
        return model.hidden_size * at_layer(model, model.query_dim, layer)
    return rank * (model.hidden_size + model.query_dim)


def dense_parameters(shape: ModelShape, *, tied: bool, q_bias: bool = False) -> int:
    """Return the parameters of the plain model: matrices, two norms a layer, the last norm, K and V biases.

    ``tied`` says that the head is the embedding; ``q_bias`` adds the query's bias.
    """
    hidden = shape.hidden_size
    attention = query_weights(shape, 0) + hidden * (shape.output_dim + shape.cached_numbers) + shape.expansion_weights
    attention += (shape.cached_numbers if shape.kv_bias else 0) + (shape.query_dim if q_bias else 0)
    attention += (shape.head_dim if shape.k_norm else 0) + (
        shape.latent.rank + (shape.latent.query_rank or 0) if shape.latent else 0
    )
    vocabulary = shape.vocab_size * hidden * (1 if tied else 2)
    return shape.num_layers * (attention + 2 * hidden) + mlp_weights(shape) + vocabulary + hidden


def num_routers(model: LinearModel) -> int:
    """Return the number of layers with a mixture of experts."""
    return model.num_layers - len(model.experts.dense_layers) if model.experts else 0


def router_weights(model: LinearModel) -> int:
    """Return the weights of all layers that choose among experts."""
    return num_routers(model) * model.hidden_size * model.experts.num_routed if model.experts else 0


def at_layer(model: HeadSizes, size: int, layer: int) -> int:
    """Return what ``size``, which is so many heads of ``head_dim`` elements, is in a layer."""
    return size * model.layer_head_dims[layer] // model.head_dim if model.layer_head_dims else size


def numbers_of_owners(model: OwnerSizes) -> int:
    """Return the numbers that one token keeps over all owners."""
    return sum(at_layer(model, model.cached_numbers, owner) for owner in set(model.owner_of_layer))


def own_input_weights(model: LinearModel) -> int:
    """Return the weights of what all layers make of their per-layer inputs, and of the projection that these need."""
    return 3 * model.num_layers * model.hidden_size * (model.per_layer_input or 0)


def inner_sizes(model: LinearModel) -> tuple[int, ...]:
    """Return the size of each layer's MLP."""
    return model.layer_intermediate_sizes or (model.intermediate_size,) * model.num_layers


def mlp_weights(model: LinearModel, tokens: int | None = None) -> int:
    """Return the weights of all layers' MLPs, where there are experts of all, or of those that ``tokens`` choose, and
    what chooses among them."""
    dense = 3 * model.hidden_size * model.intermediate_size
    if not model.experts:
        return 3 * model.hidden_size * sum(inner_sizes(model))
    sparse = round(num_routers(model) * model.experts.weights(model.hidden_size, tokens))
    return len(model.experts.dense_layers) * dense + sparse
