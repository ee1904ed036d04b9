"""What each of several ranks keeps where heads and inner rows are divided among them (tensor parallelism)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.number_formats import ELEMENT_BYTES
from kvforge.costs.cache import kv_bytes
from kvforge.costs.weights import WEIGHT_BYTES, weight_bytes
from kvforge.planning.capacity import GIB
from kvforge.planning.plan import Fleet, PlannedWorkload, Variant
from model_defs import ModelConfig


@dataclass(frozen=True)
class Division:
    """A model's heads among ``size`` ranks. Where there are fewer KV heads than ranks, several ranks have the same one.

    Raises:
        KvforgeError: the heads cannot be divided so.
    """

    name: str
    model: ModelConfig
    size: int

    def __post_init__(self) -> None:
        model, size = self.model, self.size
        if model.latent is not None:
            raise KvforgeError(
                f"{self.name} keeps one latent for all heads, which ranks do not divide; leave out "
                "--tensor-parallel-size."
            )
        if model.linear is not None:
            raise KvforgeError(
                f"{self.name} keeps states, which ranks do not divide; leave out --tensor-parallel-size."
            )
        if model.num_heads % size or (model.num_kv_heads % size and size % model.num_kv_heads):
            raise KvforgeError(
                f"the {model.num_heads} heads and {model.num_kv_heads} KV heads of {self.name} cannot be divided "
                f"among {size} ranks; give a --tensor-parallel-size that divides them."
            )

    @property
    def kv_heads(self) -> int:
        """KV heads of a rank."""
        return max(self.model.num_kv_heads // self.size, 1)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes that a token keeps on a rank."""
        return kv_bytes(self.model, kv_dtype) * self.kv_heads // self.model.num_kv_heads

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of a rank's weights: its part of every matrix, all norms, and the KV heads that others have
        too."""
        model = self.model
        norms = (2 * model.num_layers + 1 + (model.has_cut)) * model.hidden_size
        again = self.kv_heads * self.size - model.num_kv_heads
        heads = again * 2 * model.head_dim * model.hidden_size * model.num_owners
        whole = weight_bytes(model, dtype)
        norm_bytes = norms * (ELEMENT_BYTES["bfloat16"] if dtype != "float32" else ELEMENT_BYTES["float32"])
        return round((whole - norm_bytes + heads * WEIGHT_BYTES[dtype]) / self.size + norm_bytes)


def plan_ranks(
    name: str, variants: Sequence[Variant], work: PlannedWorkload, fleet: Fleet, size: int
) -> dict[str, Any]:
    """Return bytes per rank of each variant, and for each memory the tokens and requests that fit.

    Raises:
        KvforgeError: the heads cannot be divided among ``size`` ranks.
    """
    rows = []
    for variant in variants:
        if variant.model.is_blind:
            raise KvforgeError("A blind cut is not divided among ranks; leave out --tensor-parallel-size.")
        division = Division(name, variant.model, size)
        weights = division.weight_bytes(work.weight_dtype) + work.bytes_beside(variant.model) // size
        per_token = division.kv_bytes_per_token(variant.kv_dtype)
        row: dict[str, Any] = {"name": variant.name, "weight_bytes": weights, "kv_bytes_per_token": per_token}
        row["requests"] = {}
        for memory in fleet.memory_gib:
            free = (memory - fleet.reserve_gib) * GIB - weights
            row["requests"][f"{memory:g}"] = max(int(free // per_token), 0) // (work.input_tokens + work.output_tokens)
        rows.append(row)
    return {"tensor_parallel_size": size, "variants": rows}
