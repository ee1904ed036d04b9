"""Norms whose gains are those of the checkpoint."""

from torch import Tensor

from model_defs import ModelConfig
from model_defs.layers import RMSNorm


class OffsetNorm(RMSNorm):
    """An RMSNorm to whose gains ``offset`` is added."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__(size, eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normed over its last dimension; all of it in fp32, rounded to its dtype once."""
        return (self.normed(x) * (self.weight.float() + self.offset)).to(x.dtype)


def make_norm(config: ModelConfig, size: int) -> RMSNorm:
    """Return a norm over ``size`` elements as the model's family has it."""
    offset, eps = config.norm_offset, config.rms_norm_eps
    return OffsetNorm(size, eps, offset) if offset else RMSNorm(size, eps)
