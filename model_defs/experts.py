"""The sizes of a mixture of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_defs.errors import ModelError
from model_defs.fields import number, optional_flag, optional_int, require_int

if TYPE_CHECKING:
    from torch import Tensor

MAX_EXPERTS = 2**12


@dataclass(frozen=True)
class ClampedGate:
    """``(up + 1) * gate * sigmoid(alpha * gate)``, with gate at most ``limit`` and up within ``limit`` of 0."""

    alpha: float
    limit: float

    def __call__(self, gate: "Tensor", up: "Tensor") -> "Tensor":
        """Return the gated tensor, of one shape with both."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * (gate * self.alpha).sigmoid())


@dataclass(frozen=True)
class Experts:
    """MLPs of ``intermediate_size``, of which a router chooses ``num_active`` of ``num_experts`` for each token.

    ``normalize`` says that the chosen experts' probabilities are divided by their sum; they are multiplied by
    ``scaling``. ``layers`` have a mixture in place of their MLP, ascending; all others are as in a model without one.
    Every token goes to ``num_shared`` more experts, which are one MLP of as many times the size. The experts are in
    ``num_groups`` groups of neighbours, and a token chooses within the ``num_active_groups`` whose best is best.
    ``by_sigmoid`` a logit's sigmoid is in place of its probability, and what is chosen is that of the greatest sums of
    it and the expert's own bias, groups by the two best of each (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). With
    ``bias`` router and projections have biases. Where there is a ``gate``, it takes the place of the activation. A
    shared expert has ``shared_intermediate_size``, where that is not 0; with ``shared_gate`` what they give is
    multiplied by the sigmoid of a projection of the token. Where ``shared_is_mlp``, checkpoints call it as they
    call a layer's MLP without a mixture."""

    num_experts: int
    num_active: int
    intermediate_size: int
    normalize: bool
    layers: tuple[int, ...]
    scaling: float = 1.0
    num_shared: int = 0
    num_groups: int = 1
    num_active_groups: int = 1
    bias: bool = False
    by_sigmoid: bool = False
    gate: ClampedGate | None = None
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    shared_is_mlp: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ModelError(f"The model has {self.num_experts} experts; it must have from 1 to {MAX_EXPERTS}.")
        if not 1 <= self.num_active <= self.num_experts:
            raise ModelError(
                f"num_experts_per_tok is {self.num_active}; it must be from 1 to the {self.num_experts} experts of the "
                "model."
            )
        in_groups = self.num_experts // self.num_groups * self.num_active_groups
        if self.num_experts % self.num_groups or not self.num_active <= in_groups <= self.num_experts:
            raise ModelError(
                f"{self.num_active} experts for each token cannot be chosen in {self.num_active_groups} of "
                f"{self.num_groups} groups of {self.num_experts} experts; config.json is damaged."
            )
        if not self.layers:
            raise ModelError("config.json has experts, but says of every layer that it has none.")

    def shared_name(self, mlp: str) -> str:
        """Return what checkpoints call the shared experts of a layer's ``mlp``."""
        return mlp if self.shared_is_mlp else f"{mlp}.shared_experts"

    @property
    def shared_size(self) -> int:
        """The size of the shared experts as one MLP; 0 without them."""
        return self.num_shared * (self.shared_intermediate_size or self.intermediate_size)


def count_experts(hf: Mapping[str, Any], otherwise: int) -> int:
    """Return the number of experts, by ``num_experts`` or ``num_local_experts``: the Hub has the first in families that
    transformers saves with the second. Returns ``otherwise`` without either; raises ModelError where they differ."""
    names = [name for name in ("num_experts", "num_local_experts") if hf.get(name) is not None]
    counts = {require_int(hf, name) for name in names} or {otherwise}
    if len(counts) > 1:
        raise ModelError(f"{names[0]} and {names[1]} of config.json differ; they are one number.")
    return counts.pop()


def experts_everywhere(hf: Mapping[str, Any], count: int, num_active: int, **more: Any) -> Experts:
    """Return a config.json's mixture in every layer, by default ``num_active`` of ``count`` experts; raises
    ModelError."""
    return Experts(
        num_experts=count_experts(hf, count),
        num_active=optional_int(hf, "num_experts_per_tok", num_active),
        intermediate_size=require_int(hf, "intermediate_size"),
        normalize=True,
        layers=tuple(range(require_int(hf, "num_hidden_layers"))),
        **more,
    )


STACKED = (("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")), ("mlp.experts.down_proj", ("down_proj",)))
"""Tensors of all experts of a layer, as families store them that ``stacked`` says it of."""


def experts_by_sigmoid(
    hf: Mapping[str, Any], count: int, layers: Sequence[int] | None = None, shared_size: int = 0
) -> Experts | None:
    """Return a config.json's mixture, by default of ``count`` experts; None where no layer has one. It is in ``layers``
    (default: behind the first ones that have none), and a shared expert of ``shared_size``, where that is not 0. Raises
    ModelError."""
    if layers is None:
        num_layers = require_int(hf, "num_hidden_layers")
        layers = range(optional_int(hf, "first_k_dense_replace", 0, minimum=0), num_layers)
    if not layers:
        return None
    return Experts(
        num_experts=optional_int(hf, "n_routed_experts", optional_int(hf, "num_local_experts", count)),
        num_active=optional_int(hf, "num_experts_per_tok", 8),
        intermediate_size=require_int(hf, "moe_intermediate_size"),
        normalize=optional_flag(hf, "norm_topk_prob", True),
        layers=tuple(layers),
        scaling=number(hf.get("routed_scaling_factor", 1.0), "routed_scaling_factor", 1e-6, 1e6),
        num_shared=optional_int(hf, "n_shared_experts", 1, minimum=0),
        num_groups=optional_int(hf, "n_group", 1),
        num_active_groups=optional_int(hf, "topk_group", 1),
        by_sigmoid=True,
        shared_intermediate_size=shared_size,
    )


READS_BY_SIGMOID = (
    *("n_routed_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
)
FIXED_BY_SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
"""Keys that ``experts_by_sigmoid`` reads, and those that say it is one."""
