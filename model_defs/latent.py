"""The sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_defs.errors import ModelError
from model_defs.fields import optional_int, require_int

LATENT_EPS = 1e-6
"""The epsilon of the latents' own norms, whatever that of the others is."""


@dataclass(frozen=True)
class LatentAttention:
    """A token keeps a row of ``rank`` numbers, normed, and ``rope_dim`` of a key that all heads share, rotated.

    A head's query and key have ``nope_dim + rope_dim`` numbers, its value ``value_dim``. Keys without rotation and
    values are projections of the row, which attention takes to the queries and to the result instead: so all heads
    attend to the row itself. Queries come from a latent of ``query_rank`` numbers of their own, where that is not None.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None

    @property
    def width(self) -> int:
        """Numbers that a token keeps."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Numbers of a head's key without rotation and of its value, which are made of a row."""
        return self.nope_dim + self.value_dim


def latent_from_hf(hf: Mapping[str, Any], query_rank: int | None) -> LatentAttention:
    """Read the sizes from a ``config.json``, ``query_rank`` where it has no ``q_lora_rank``; raises ModelError."""
    if "q_lora_rank" in hf:
        query_rank = None if hf["q_lora_rank"] is None else require_int(hf, "q_lora_rank")
    latent = LatentAttention(
        rank=optional_int(hf, "kv_lora_rank", 512),
        rope_dim=optional_int(hf, "qk_rope_head_dim", 64),
        nope_dim=optional_int(hf, "qk_nope_head_dim", 128),
        value_dim=optional_int(hf, "v_head_dim", 128),
        query_rank=query_rank,
    )
    if latent.rope_dim % 2:
        raise ModelError(f"qk_rope_head_dim is {latent.rope_dim}; rotary position embedding needs an even number.")
    if latent.width % 2:
        raise ModelError(f"kv_lora_rank is {latent.rank}; it must be even.")
    return latent
