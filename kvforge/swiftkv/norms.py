"""Norms whose gains are those of the checkpoint."""

from torch import Tensor, nn

from model_defs import ModelConfig
from model_defs.layers import RMSNorm, norm_of_heads


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


def norm_before(config: ModelConfig) -> nn.Module:
    """Return what is before attention, an MLP and a cut's K and V: a norm, or nothing."""
    return make_norm(config, config.hidden_size) if config.pre_norms else nn.Identity()


def make_norm_of_heads(config: ModelConfig, num_heads: int) -> RMSNorm:
    """Return the norm of q or k ``[…, num_heads, head_dim]``."""
    size = config.head_dim
    return make_norm(config, size) if config.norm_offset else norm_of_heads(config, num_heads, size)
