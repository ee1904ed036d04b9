"""How alike the inputs of the layers are (arXiv 2410.03960, section 3.2, Figure 2 left)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvforge.rewire.inputs import LayerInputs


def input_similarity(inputs: LayerInputs, num_layers: int) -> Tensor:
    """Return ``[num_layers, num_layers]`` float64: the cosine of what enters layer i and layer j, mean over tokens.

    One sample's inputs of all layers are in memory at a time.
    """
    total = torch.zeros(num_layers, num_layers, dtype=torch.float64)
    for sample in range(len(inputs.lengths)):
        states = torch.stack([F.normalize(inputs.read(layer, sample), dim=-1) for layer in range(num_layers)])
        flat = states.flatten(1)
        total += (flat @ flat.T).double()
    return total / sum(inputs.lengths)


def similarity_to_remaining(similarity: Tensor) -> list[float | None]:
    """Return for each layer the mean similarity of its input to those of all later layers; None for the last."""
    rows = [row[index + 1 :] for index, row in enumerate(similarity)]
    return [float(row.mean()) if len(row) else None for row in rows]
