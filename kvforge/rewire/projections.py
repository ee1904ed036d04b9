"""What one layer of the source makes its K and V from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvforge.rewire.source import PlainCheckpoint
from model_defs import ModelConfig


def normalise(hidden: Tensor, eps: float | None) -> Tensor:
    """Return ``hidden`` ``[T, hidden]`` over its root mean square in float64: RMSNorm with a gain of ones. It stays as
    it is where ``eps`` is None."""
    wide = hidden.double()
    if eps is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class KeyValueProjection:
    """A layer's K and V before rotation and k_norm, side by side, from the residual stream entering it; float64.

    ``weight`` ``[2 * kv_dim, hidden]``, ``bias`` ``[2 * kv_dim]`` or None, ``gain`` ``[hidden]`` of the layer's norm;
    gains are 1, and ``eps`` None, where it has none.
    """

    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    eps: float | None

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

    weight, bias = pair("weight"), pair("bias") if config.qkv_bias else None
    gain = read("input_layernorm.weight") + config.norm_offset if config.pre_norms else weight.new_ones(weight.shape[1])
    return KeyValueProjection(weight, bias, gain, input_eps(config))


def input_eps(config: ModelConfig) -> float | None:
    """Return the epsilon of a layer's norm of its input; None where it has none."""
    return config.rms_norm_eps if config.pre_norms else None


def average(projections: list[KeyValueProjection]) -> tuple[Tensor, Tensor | None]:
    """Return the mean of the folded weights ``[2 * kv_dim, hidden]``, and of the biases where there are some."""
    weight = torch.stack([projection.folded for projection in projections]).mean(0)
    biases = [projection.bias for projection in projections if projection.bias is not None]
    return weight, torch.stack(biases).mean(0) if biases else None
