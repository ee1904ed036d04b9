"""int8 weights: one scale for each output."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ByteCodes:
    """A weight ``[N, K]``, codes times scales. codes: int8 ``[N, K]``, -127 to 127. scales: float32 ``[N]``,
    positive."""

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """Return the weight, float32 ``[N, K]``."""
        return self.codes.float() * self.scales[:, None]
