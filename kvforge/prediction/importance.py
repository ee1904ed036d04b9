"""How important a prompt's tokens are to its end, by the auxiliary model's own attention."""

import torch
from torch import Tensor

from kvforge.common.mean_attention import NUM_QUERIES, mean_attention
from kvforge.prediction.predictor import KVPredictor
from kvforge.swiftkv import Layout


@torch.inference_mode()
def importance(predictor: KVPredictor, inputs: list[Tensor], layout: Layout) -> Tensor:
    """Return ``[n]`` float32 of a prompt's tokens: ``mean_attention`` of its last ``NUM_QUERIES`` queries, on average
    over the layers that are run. ``inputs`` are those of ``KVPredictor.inputs`` for one prompt, of which the last one's
    layer is not; ``layout`` is the same."""
    total = torch.zeros(inputs[0].shape[1])
    for layer, x in zip(predictor.model.layers, inputs[:-1], strict=False):
        attention = layer.self_attn
        q, (k, _) = attention.query(x, layout)[0], attention.key_value(x, layout)
        total += mean_attention(q[-NUM_QUERIES:], k[0], attention.scale, attention.window)
    return total / max(len(inputs) - 1, 1)
