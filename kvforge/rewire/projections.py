"""What one layer of the source makes its K and V from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvforge.rewire.source import PlainCheckpoint


def normalise(hidden: Tensor, eps: float) -> Tensor:
    """Return ``hidden`` ``[T, hidden]`` over its root mean square in float64: RMSNorm with a gain of ones."""
    wide = hidden.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class KeyValueProjection:
    """A layer's K and V before rotation and k_norm, side by side, from the residual stream entering it; float64.

    ``weight`` ``[2 * kv_dim, hidden]``, ``bias`` ``[2 * kv_dim]`` or None, ``gain`` ``[hidden]`` of the layer's norm.
    """

    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    eps: float

    @property
    def folded(self) -> Tensor:
        """The weight that gives the same from a norm with a gain of ones: W · diag(g)."""
        return self.weight * self.gain

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return K and V ``[T, 2 * kv_dim]`` of ``hidden`` ``[T, hidden]``."""
        y = normalise(hidden, self.eps) @ self.folded.T
        return y if self.bias is None else y + self.bias


def read_projection(source: PlainCheckpoint, layer: int, device: torch.device | str = "cpu") -> KeyValueProjection:
    """Read layer ``layer``'s k_proj, v_proj and input_layernorm; raises CheckpointError where they are not
    finite."""
    prefix, config = f"model.layers.{layer}", source.config

    def read(name: str) -> Tensor:
        return source.checkpoint.read_raw(f"{prefix}.{name}").to(device, torch.float64)

    def pair(kind: str) -> Tensor:
        return torch.cat([read(f"self_attn.{part}_proj.{kind}") for part in ("k", "v")])

    weight, gain = pair("weight"), read("input_layernorm.weight") + config.norm_offset
    bias = pair("bias") if config.qkv_bias else None
    return KeyValueProjection(weight, bias, gain, config.rms_norm_eps)


def average(projections: list[KeyValueProjection]) -> tuple[Tensor, Tensor | None]:
    """Return the mean of the folded weights ``[2 * kv_dim, hidden]``, and of the biases where there are some."""
    weight = torch.stack([projection.folded for projection in projections]).mean(0)
    biases = [projection.bias for projection in projections if projection.bias is not None]
    return weight, torch.stack(biases).mean(0) if biases else None
