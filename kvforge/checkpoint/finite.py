"""That a tensor holds numbers: NaN and infinity in one weight end every text an engine writes."""

import math
from pathlib import Path

from torch import Tensor

from kvforge.common.errors import CheckpointError


def check_finite(tensor: Tensor, name: str, path: Path) -> None:
    """Raise CheckpointError unless every element of tensor ``name`` of the checkpoint at ``path`` is finite.

    The least and the largest element say it: both are NaN where any element is. It reads the tensor once and copies
    nothing.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    least, largest = (tensor.float() if tensor.itemsize == 1 else tensor).aminmax()
    for value in (float(least), float(largest)):
        if not math.isfinite(value):
            raise CheckpointError(
                f"Tensor {name} in {path} holds {value} as {str(tensor.dtype).removeprefix('torch.')}; the weights are "
                "damaged, or too large for that dtype: download or export the checkpoint again."
            )
