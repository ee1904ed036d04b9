"""What one layer of the source makes its K and V from, or what updates its state."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvforge.rewire.source import PlainCheckpoint
from kvforge.rewire.states import state_updates
from model_defs import ModelConfig


def normalise(hidden: Tensor, eps: float | None) -> Tensor:
    """Return ``hidden`` ``[T, hidden]`` over its root mean square in float64: RMSNorm with a gain of ones. It stays as
    it is where ``eps`` is None."""
    wide = hidden.double()
    if eps is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class ProjectionPart:
    """Rows of a projection: the tensor above a cut that they become, one of the source that it is like, how many."""

    name: str
    like: str
    size: int


@dataclass(frozen=True)
class Projection:
    """A layer's products with its input that later tokens need, side by side, from the residual stream entering it;
    float64: K and V before rotation and k_norm, or those that update its state, before convolution and activations.

    ``weight`` ``[outputs, hidden]``, ``bias`` ``[outputs]`` or None, ``gain`` ``[hidden]`` of the layer's norm; gains
    are 1, and ``eps`` None, where it has none. ``parts`` are those of the outputs, in order.
    """

    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    eps: float | None
    parts: tuple[ProjectionPart, ...]

    @property
    def sizes(self) -> list[int]:
        """The number of outputs of each part."""
        return [part.size for part in self.parts]

    @property
    def folded(self) -> Tensor:
        """The weight that gives the same from a norm with a gain of ones: W · diag(g)."""
        return self.weight * self.gain

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the products ``[T, outputs]`` of ``hidden`` ``[T, hidden]``."""
        y = normalise(hidden, self.eps) @ self.folded.T
        return y if self.bias is None else y + self.bias


def read_projection(source: PlainCheckpoint, layer: int, device: torch.device | str = "cpu") -> Projection:
    """Read what layer ``layer`` multiplies with its input, and input_layernorm; raises CheckpointError where they are
    not finite."""
    prefix, config = f"model.layers.{layer}", source.config

    def read(name: str) -> Tensor:
        return source.checkpoint.read_raw(f"{prefix}.{name}").to(device, torch.float64)

    bias = None
    if config.is_linear(layer):
        made = state_updates(source, config, layer)
    else:
        names = [f"self_attn.{part}_proj" for part in ("k", "v")]
        likes = [f"{prefix}.{name}.weight" for name in names]
        made = {student_name(like): (like, partial(source.checkpoint.read_raw, like)) for like in likes}
        bias = torch.cat([read(f"{name}.bias") for name in names]) if config.qkv_bias else None
    pieces = [make().to(device, torch.float64) for _, make in made.values()]
    parts = [
        ProjectionPart(name, like, len(piece)) for (name, (like, _)), piece in zip(made.items(), pieces, strict=True)
    ]
    weight = torch.cat(pieces)
    gain = read("input_layernorm.weight") + config.norm_offset if config.pre_norms else weight.new_ones(weight.shape[1])
    return Projection(weight, bias, gain, input_eps(config), tuple(parts))


def student_name(teacher: str) -> str:
    """``…self_attn.k_proj.weight`` to ``…self_attn.k_proj_swiftkv.weight``."""
    module, kind = teacher.rsplit(".", 1)
    return f"{module}_swiftkv.{kind}"


def input_eps(config: ModelConfig) -> float | None:
    """Return the epsilon of a layer's norm of its input; None where it has none."""
    return config.rms_norm_eps if config.pre_norms else None


def average(projections: list[Projection]) -> tuple[Tensor, Tensor | None]:
    """Return the mean of the folded weights ``[outputs, hidden]``, and of the biases where there are some."""
    weight = torch.stack([projection.folded for projection in projections]).mean(0)
    biases = [projection.bias for projection in projections if projection.bias is not None]
    return weight, torch.stack(biases).mean(0) if biases else None
