"""What each layer has of a token by itself, besides the residual stream."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_defs.config import ModelConfig
from model_defs.layers import Linear, RMSNorm, scaled


class PerLayerInput(nn.Module):
    """The sum of a row of a table, by the token's id, and of a normed projection of its embedding, for all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width, total = config.per_layer_input, config.num_layers * config.per_layer_input
        self.scale = config.hidden_size**-0.5
        self.embed = nn.Parameter(torch.empty(config.per_layer_vocab, total))
        self.context = Linear(config.hidden_size, total, False)
        self.norm = RMSNorm(self.width, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return ``[T, layers, width]`` of ``input_ids`` ``[T]`` and their scaled embeddings ``[T, hidden]``."""
        rows = scaled(F.embedding(input_ids, self.embed), self.width**0.5).unflatten(-1, (-1, self.width))
        context = (self.context(embedded) * self.scale).unflatten(-1, (-1, self.width))
        return (self.norm(context) + rows) * 2**-0.5
