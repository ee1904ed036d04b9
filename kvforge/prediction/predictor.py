"""The predictor: an auxiliary model without its head, and linear maps to the base model's K and V."""

from torch import Tensor, nn

from kvforge.prediction.filled_cache import base_kv
from kvforge.swiftkv import Layout, SwiftKVForCausalLM
from kvforge.swiftkv.attention import KV
from model_defs.prediction import Prediction


class OwnerMaps(nn.Module):
    """Linear maps from an auxiliary layer's normed input ``[…, hidden]`` to one owner's K and V ``[…, kv_dim]``."""

    def __init__(self, hidden_size: int, kv_dim: int) -> None:
        super().__init__()
        self.k_proj = nn.Linear(hidden_size, kv_dim)
        self.v_proj = nn.Linear(hidden_size, kv_dim)


class KVPredictor(SwiftKVForCausalLM):
    """An auxiliary model, whole, so that its checkpoint is one of its family, and ``kv_prediction``: maps by owner of
    the base (arXiv 2410.08391, section 3). Of ``prediction.num_layers`` only the last one's norm is run, and neither
    the layers behind it nor the head."""

    def __init__(self, prediction: Prediction) -> None:
        super().__init__(prediction.auxiliary)
        self.prediction = prediction
        hidden, base = prediction.auxiliary.hidden_size, prediction.base
        self.kv_prediction = nn.ModuleDict(
            {str(owner): OwnerMaps(hidden, base.kv_dim_of(owner)) for owner in base.owners}
        )

    def inputs(self, input_ids: Tensor, layout: Layout) -> list[Tensor]:
        """Return the normed input ``[B, T, hidden]`` of each layer in use, of ``input_ids`` ``[B, T]``; ``layout`` is
        the auxiliary model's."""
        hidden, normed = self.model.embed(input_ids), []
        layers = self.model.layers[: self.prediction.num_layers]
        for layer in layers[:-1]:
            normed.append(layer.input_layernorm(hidden))
            hidden = layer(hidden, None, layout)
        return [*normed, layers[-1].input_layernorm(hidden)]

    def predict(self, inputs: list[Tensor], base: SwiftKVForCausalLM, layout: Layout) -> dict[int, KV]:
        """Return what the base's cache gets, by owner: K behind the base's own norm and rotation, and V, each
        ``[B, T, kv_heads, head_dim]``. ``layout`` is the base model's."""
        caches = {}
        for owner, layer in zip(self.prediction.base.owners, self.prediction.layers, strict=True):
            maps = self.kv_prediction[str(owner)]
            caches[owner] = base_kv(base, owner, maps.k_proj(inputs[layer]), maps.v_proj(inputs[layer]), layout)
        return caches
