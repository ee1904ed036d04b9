"""How llama.cpp's GGUF files hold the models of a family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = Mapping[str, Any]
"""The metadata of a file below its architecture, such as ``attention.head_count``."""


def no_fields(keys: Keys) -> dict[str, Any]:
    """Return no field: the family's config.json has the common ones alone."""
    return {}


@dataclass(frozen=True)
class GgufForm:
    """What a family says of its files.

    ``architecture`` is llama.cpp's name; of several families that share one, that with the same ``has_experts`` is the
    file's. ``fields`` makes of the metadata the fields of config.json that are this family's own, or are not as in
    others, and raises ModelError. ``reads`` are the keys that it reads besides the common ones; all others are refused.
    ``names`` are modules that these files call otherwise than those of most families, such as ``ffn_up``, and their
    names in ``model_defs.weights`` or the family's ``fused``. With ``is_paired`` rows of q and k that rotate together
    stand beside each other, and not half a head apart as in Hugging Face's files. Spaces behind special tokens of
    SentencePiece belong to these where ``keeps_space_after`` is not None, but for those that it names.
    """

    architecture: str
    fields: Callable[[Keys], dict[str, Any]] = no_fields
    reads: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    has_experts: bool = False
    is_paired: bool = False
    keeps_space_after: frozenset[str] | None = None


def expert_fields(keys: Keys) -> dict[str, Any]:
    """Return how many experts a layer has, and how many of them a token uses."""
    return {"num_local_experts": keys.get("expert_count"), "num_experts_per_tok": keys.get("expert_used_count")}


EXPERTS = ("expert_count", "expert_used_count")
"""The keys that ``expert_fields`` reads."""
