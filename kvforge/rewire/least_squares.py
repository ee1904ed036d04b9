"""Ridge regression towards a prior, from sums that are collected chunk by chunk in float64.

For inputs x ``[T, hidden]`` and targets y ``[T, outputs]`` it finds the W and b that minimise

    sum ||y - W x - b||² + lambda (tr(sum x x^T) / hidden) ||W - W0||²

given r = y - W0 x - b0, what a prior (W0, b0) leaves. Without data in some direction, W keeps W0 there. The intercept
is not regularised; where the model has no bias there is none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class InputSums:
    """Sums over the inputs of a cut, shared by all of its owners."""

    def __init__(self, size: int, intercept: bool, device: torch.device | str = "cpu") -> None:
        self.intercept = intercept
        self.count = 0
        self.x = torch.zeros(size, dtype=torch.float64, device=device)
        self.xx = torch.zeros(size, size, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add inputs ``[T, hidden]`` float64."""
        self.count += x.shape[0]
        self.x += x.sum(0)
        self.xx += x.T @ x

    def factor(self, ridge: float) -> Tensor:
        """Return the Cholesky factor ``[hidden, hidden]`` of the regularised normal equations.

        Raises:
            torch.linalg.LinAlgError: the regulariser is too small for inputs that do not span the space.
        """
        matrix = self.xx - torch.outer(self.x, self.x) / self.count if self.intercept else self.xx.clone()
        matrix.diagonal().add_(ridge * self.xx.trace() / matrix.shape[0])
        return torch.linalg.cholesky(matrix)


class ResidualSums:
    """Sums over what the prior leaves of one owner's targets."""

    def __init__(self, size: int, outputs: int, device: torch.device | str = "cpu") -> None:
        self.r = torch.zeros(outputs, dtype=torch.float64, device=device)
        self.xr = torch.zeros(size, outputs, dtype=torch.float64, device=device)

    def add(self, x: Tensor, r: Tensor) -> None:
        """Add inputs ``[T, hidden]`` and what the prior leaves ``[T, outputs]``, both float64."""
        self.r += r.sum(0)
        self.xr += x.T @ r


def solve(inputs: InputSums, factor: Tensor, residuals: ResidualSums) -> tuple[Tensor, Tensor]:
    """Return W - W0 ``[outputs, hidden]`` and b - b0 ``[outputs]`` (zeros without an intercept)."""
    if not inputs.intercept:
        delta = torch.cholesky_solve(residuals.xr, factor).T
        return delta, torch.zeros_like(residuals.r)
    centred = residuals.xr - torch.outer(inputs.x, residuals.r) / inputs.count
    delta = torch.cholesky_solve(centred, factor).T
    return delta, (residuals.r - delta @ inputs.x) / inputs.count


class Unexplained:
    """The share of the variance of targets that a prediction misses, over tokens and outputs."""

    def __init__(self) -> None:
        self.count = 0
        self.y: Tensor | float = 0.0
        self.yy: Tensor | float = 0.0
        self.ee: Tensor | float = 0.0

    def add(self, y: Tensor, prediction: Tensor) -> None:
        """Add targets and their prediction, both ``[T, outputs]`` float64."""
        self.count += y.shape[0]
        self.y = self.y + y.sum(0)
        self.yy = self.yy + y.square().sum(0)
        self.ee = self.ee + (y - prediction).square().sum(0)

    def shares(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return sum ||y - prediction||² / sum ||y - mean y||² of each part of the outputs, which has so many.

        Targets that do not vary beyond the rounding of float32, in which the model runs, count as varying that much.
        """
        rounding, tiny = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).tiny
        energy, missed = torch.as_tensor(self.yy), torch.as_tensor(self.ee)
        variance = energy - torch.as_tensor(self.y).square() / self.count
        shares = []
        for part in zip(variance.split(list(sizes)), energy.split(list(sizes)), missed.split(list(sizes)), strict=True):
            varying, whole, left = (float(each.sum()) for each in part)
            shares.append(left / max(varying, rounding * whole, tiny))
        return tuple(shares)
