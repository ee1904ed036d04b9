"""KV prediction (arXiv 2410.08391): which layer of an auxiliary model gives the K and V of each owner of a base."""

from dataclasses import dataclass

from model_defs.config import ModelConfig
from model_defs.errors import ModelError

MAPS = "kv_prediction"
"""What the maps' tensors begin with: ``kv_prediction.<owner>.k_proj.weight``, and so on."""


@dataclass(frozen=True)
class Prediction:
    """An auxiliary model, the base model whose cache it predicts, and for each of ``base.owners`` the auxiliary layer
    whose normed input a linear map turns into the owner's K and V."""

    auxiliary: ModelConfig
    base: ModelConfig
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        auxiliary, base = self.auxiliary, self.base
        if auxiliary.vocab_size != base.vocab_size:
            raise ModelError(
                f"The auxiliary model has {auxiliary.vocab_size} tokens and the base {base.vocab_size}; both must have "
                "one tokenizer."
            )
        for model, what in ((auxiliary, "auxiliary"), (base, "base")):
            if model.has_cut or model.layer_head_dims or model.per_layer_input:
                raise ModelError(f"KV prediction takes a plain model as the {what}, without a cut or shared caches.")
            if model.latent is not None:
                raise ModelError(f"KV prediction takes a model with K and V as the {what}, and this one has latents.")
        if len(self.layers) != len(base.owners):
            raise ModelError(
                f"{len(self.layers)} layers are named for the {len(base.owners)} owners of the base model."
            )
        if not all(0 <= layer < auxiliary.num_layers for layer in self.layers):
            raise ModelError(f"The auxiliary model has layers 0 to {auxiliary.num_layers - 1}, and others are named.")

    @property
    def num_layers(self) -> int:
        """Layers of the auxiliary model that the maps need the input of; of the last one nothing else is run."""
        return max(self.layers) + 1

    def layer_of(self, owner: int) -> int:
        """Return the auxiliary layer whose input an owner's K and V come from."""
        return self.layers[self.base.owners.index(owner)]


def check_runs(prediction: Prediction) -> None:
    """Raise ModelError where no engine runs the auxiliary model, however it is built."""
    if prediction.auxiliary.attention_scale is not None or prediction.auxiliary.query_growth is not None:
        raise ModelError("An engine's auxiliary model attends with the usual scale; choose another one.")
    if prediction.num_layers < 2:
        raise ModelError(
            "The predictor reads the auxiliary model's embedding alone; choose --layers of which one is layer 1 or "
            "more, and an auxiliary model that has it."
        )


def spread_layers(num_owners: int, num_layers: int) -> tuple[int, ...]:
    """Return for each owner the auxiliary layer at the same share of the depth: each layer where there are as many."""
    return tuple(index * num_layers // num_owners for index in range(num_owners))
