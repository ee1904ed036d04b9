"""Modules for multi-token prediction that a checkpoint carries behind its model (DeepSeek-V3, arXiv 2412.19437, section
2.2), as draft heads: what families call their parts, and the head that one is."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from model_defs.config import ModelConfig
from model_defs.draft_head import DraftHead


@dataclass(frozen=True)
class MtpLayout:
    """What a family's checkpoints call the parts of a module; ``{}`` in ``prefix`` stands for the number of layers of
    the model. ``layer`` is what goes before the names of the decoder layer's tensors.

    A module that lacks ``embedding`` or ``lm_head`` takes the model's.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    norm: str
    embedding: str = "embed_tokens"
    lm_head: str = "lm_head"

    @property
    def is_behind_layers(self) -> bool:
        """Whether config.json says how many modules there are, each stored as one more layer."""
        return "{}" in self.prefix

    def count(self, names: Iterable[str]) -> int:
        """Return how many modules tensors of these ``names`` are of, where they are not stored as layers."""
        start = f"{self.prefix}{self.layer.partition('.')[0]}."
        return len({name.removeprefix(start).partition(".")[0] for name in names if name.startswith(start)})

    def prefix_of(self, config: ModelConfig) -> str:
        """Return what the names of a module's tensors begin with in a checkpoint of the model."""
        return self.prefix.format(config.num_layers)

    def stored_name(self, config: ModelConfig, name: str) -> str:
        """Return what a checkpoint calls a tensor that is ``name`` in a model of one layer."""
        prefix = self.prefix_of(config)
        for start, own in (
            ("model.layers.0.", self.layer),
            ("model.norm.", f"{self.norm}."),
            ("model.embed_tokens.", f"{self.embedding}."),
            ("lm_head.", f"{self.lm_head}."),
        ):
            if name.startswith(start):
                return f"{prefix}{own}{name.removeprefix(start)}"
        raise ValueError(f"{name} is no tensor of a model of one layer")


BEHIND_LAYERS = MtpLayout(
    "model.layers.{}.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", lm_head="shared_head.head"
)
"""The module is stored as one more layer."""
BESIDE = "mtp."
BY_ITSELF = MtpLayout(BESIDE, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0.", "norm")
"""The module is stored beside the layers."""


def mtp_head(config: ModelConfig) -> DraftHead:
    """Return the module of a model, with an embedding and an LM head of its own: one layer with full attention, and
    with experts where the model has any."""
    experts = None if config.experts is None else replace(config.experts, layers=(0,))
    layer = replace(
        config.first_layers(1),
        layer_windows=(0,),
        layer_owners=(),
        unrotated_layers=(),
        tie_embeddings=False,
        kv_scorer=None,
        linear=None,
        experts=experts,
    )
    return DraftHead(layer, (config.num_layers,), config.vocab_size, own_embedding=True, kind="mtp")
