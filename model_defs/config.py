"""The frozen description of one model: a shape whose parts fit each other, and those that are made of it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from model_defs.errors import ModelError, no_swiftkv_form
from model_defs.model_shape import ModelShape

MAX_SIZE = 2**31 - 1
"""Of any of a model's sizes: graphs and tables count in 32 bits."""


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """A model that there can be. Raises ModelError where sizes are out of range, or parts do not fit each other."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
            "group_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
                raise ModelError(f"{name} is {value!r} in the model configuration; it must be from 1 to {MAX_SIZE}.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim ({self.head_dim}) must be even for rotary position embedding.")
        if not 1 <= self.cut <= self.num_layers:
            raise ModelError(
                f"num_key_value_layers ({self.cut}) must be between 1 and num_hidden_layers ({self.num_layers})."
            )
        if self.early_exit and not (self.is_swiftkv or self.is_blind):
            raise ModelError(
                "early_exit is true in the model configuration, but the model has no cut to exit at; set "
                "num_key_value_layers below num_hidden_layers, or early_exit to false."
            )
        if len(self.layer_windows) != self.num_layers:
            raise ModelError(
                f"{len(self.layer_windows)} attention windows are configured for "
                f"{self.num_layers} layers; give one per layer."
            )
        if (self.is_swiftkv or self.is_blind) and self._has_own_values:
            raise no_swiftkv_form(self.model_type)
        self._check_sizes()
        self._check_parts()
        self._check_linear()
        self._check_blind()
        for rope, head_dim in self.rotations:
            rope.check(head_dim)
        for layer, owner in enumerate(self.layer_owners):
            if not 0 <= owner <= min(layer, self.cut - 1) or self.layer_owners[owner] != owner:
                raise ModelError(f"Layer {layer} cannot read the K,V cache of layer {owner}, which has none before it.")

    def _check_sizes(self) -> None:
        """Raise ModelError unless sizes of layers, experts and latents are there for all layers and fit each other."""
        of_layers = (self.layer_owners, self.layer_intermediate_sizes)
        experts = () if self.experts is None else self.experts.layers
        sizes = [*self.layer_windows, *self.layer_intermediate_sizes, self.per_layer_input, self.per_layer_vocab]
        sizes.append(self.global_head_dim or 0)
        if (
            any(len(each) not in (0, self.num_layers) for each in of_layers)
            or not all(0 <= size <= MAX_SIZE for size in sizes)
            or 0 in self.layer_intermediate_sizes
            or not all(0 <= layer < self.num_layers for layer in experts)
            or list(experts) != sorted(set(experts))
            or not all(0 <= layer < self.num_layers for layer in self.unrotated_layers)
            or (self.latent is not None and not (self.pre_norms and self.query_growth is None))
            or (self.attention_gate and (self.latent is not None or self.qk_norm_whole))
            or (self.latent is not None and (self.num_kv_heads, self.head_dim) != (1, self.latent.width))
        ):
            raise ModelError("The sizes of the model's layers do not fit each other; config.json is damaged.")

    def _check_parts(self) -> None:
        """Raise ModelError where some layers are a mixer alone or an MLP alone in a model that cannot have them."""
        lone, experts = (self.layers_without_mixer, self.layers_without_mlp), self.experts
        if not any(lone):
            return
        with_mlp = () if experts is None else experts.layers
        every = [layer for layers in lone for layer in layers]
        if (
            any(list(layers) != sorted(set(layers)) for layers in lone)
            or len(set(every)) != len(every)
            or not all(0 <= layer < self.num_layers for layer in every)
            or not set(self.linear_layers).isdisjoint(self.layers_without_mixer)
            or not set(with_mlp).isdisjoint(self.layers_without_mlp)
        ):
            raise ModelError("The parts of the model's layers do not fit each other; config.json is damaged.")
        if self.has_cut or self.layer_owners:
            raise ModelError(
                "Some layers are a mixer alone or an MLP alone, which is not supported in a model with a cut or with "
                "caches that layers share; take it without."
            )

    def _check_linear(self) -> None:
        """Raise ModelError where some layers keep a state in a model that cannot have them."""
        if self.linear is None:
            return
        reasons = {
            "it has fewer layers than its configuration names": self.linear.layers[-1] >= self.num_layers,
            "it has a cut, above which prompt tokens skip layers; take it without one": (
                self.has_cut and not self.linear.may_be_above_a_cut
            ),
            "its cut is blind; take another kind of cut": self.is_blind,
            "it has an early exit; take it without": self.early_exit,
            "its layers share caches": bool(self.layer_owners),
            "some of its layers have a sliding window": any(self.layer_windows),
            "its layers have norms behind attention and MLP": self.branch_norms or not self.pre_norms,
            "its layers have inputs or a scalar of their own": bool(self.per_layer_input) or self.layer_scalar,
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise ModelError(f"Layers that keep a state are not supported in this model: {reason}.")

    def _check_blind(self) -> None:
        """Raise ModelError where a blind cut is in a model whose layers cannot have one."""
        if not 0 <= self.num_anchors <= MAX_SIZE:
            raise ModelError(f"num_anchor_tokens is {self.num_anchors}; it must be from 1 to {MAX_SIZE}.")
        if not self.is_blind:
            return
        reasons = {
            "it has no cut": not self.has_cut,
            "its layers share caches by a table": bool(self.layer_owners),
            "layers above the cut have a sliding window": any(self.layer_windows[self.cut :]),
            "its attention is latent": self.latent is not None,
            "its layers have inputs of their own": bool(self.per_layer_input),
            "it has an early exit": self.early_exit,
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise ModelError(f"A blind cut (num_anchor_tokens above 0) is not for this model: {reason}.")

    def check_shared_caches(self) -> None:
        """Raise ModelError where layers that read one cache do not rotate alike: K is cached rotated."""
        for layer, owner in enumerate(self.owner_of_layer):
            if owner >= 0 and self.rotation_of(layer) != self.rotation_of(owner):
                raise ModelError(
                    f"Layers {owner} and {layer} would share one K,V cache, but only one of them has a sliding window "
                    "and the rotation that goes with it; choose another cut, or smaller groups."
                )

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON-ready data."""
        return asdict(self)

    def for_length(self, length: int) -> "ModelConfig":
        """Return the model as it computes sequences of up to ``length`` tokens."""
        local = self.local_rope.for_length(length) if self.local_rope is not None else None
        return replace(self, rope=self.rope.for_length(length), local_rope=local)

    def first_layers(self, count: int) -> "ModelConfig":
        """Return the first ``count`` layers as a model without a cut."""

        def kept(layers: Iterable[int]) -> tuple[int, ...]:
            return tuple(layer for layer in layers if layer < count)

        experts = self.experts
        if experts is not None:
            layers = kept(experts.layers)
            experts = replace(experts, layers=layers) if layers else None
        linear = self.linear and self.linear.first_layers(count)
        return replace(
            self,
            num_layers=count,
            cut=count,
            group_size=1,
            num_anchors=0,
            early_exit=False,
            layer_windows=self.layer_windows[:count],
            layer_owners=self.layer_owners[:count],
            layer_intermediate_sizes=self.layer_intermediate_sizes[:count],
            experts=experts,
            linear=linear,
            unrotated_layers=kept(self.unrotated_layers),
            layers_without_mixer=kept(self.layers_without_mixer),
            layers_without_mlp=kept(self.layers_without_mlp),
        )
