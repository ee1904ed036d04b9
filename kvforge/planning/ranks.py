"""What each of several ranks keeps where heads and inner rows are divided among them (tensor parallelism)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.number_formats import ELEMENT_BYTES
from kvforge.costs.cache import kv_bytes
from kvforge.costs.shape import ModelShape
from kvforge.costs.weights import WEIGHT_BYTES, weight_bytes
from kvforge.planning.capacity import GIB
from kvforge.planning.plan import Fleet, Variant, Workload


@dataclass(frozen=True)
class Division:
    """A model's heads among ``size`` ranks. Where there are fewer KV heads than ranks, several ranks have the same one.

    Raises:
        KvforgeError: the heads cannot be divided so.
    """

    shape: ModelShape
    size: int

    def __post_init__(self) -> None:
        shape, size = self.shape, self.size
        if shape.latent is not None:
            raise KvforgeError(
                f"{shape.model} keeps one latent for all heads, which ranks do not divide; leave out "
                "--tensor-parallel-size."
            )
        if shape.num_heads % size or (shape.num_kv_heads % size and size % shape.num_kv_heads):
            raise KvforgeError(
                f"the {shape.num_heads} heads and {shape.num_kv_heads} KV heads of {shape.model} cannot be divided "
                f"among {size} ranks; give a --tensor-parallel-size that divides them."
            )

    @property
    def kv_heads(self) -> int:
        """KV heads of a rank."""
        return max(self.shape.num_kv_heads // self.size, 1)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes that a token keeps on a rank."""
        return kv_bytes(self.shape, kv_dtype) * self.kv_heads // self.shape.num_kv_heads

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of a rank's weights: its part of every matrix, all norms, and the KV heads that others have
        too."""
        shape = self.shape
        norms = (2 * shape.num_layers + 1 + (shape.cut < shape.num_layers)) * shape.hidden_size
        again = self.kv_heads * self.size - shape.num_kv_heads
        heads = again * 2 * shape.head_dim * shape.hidden_size * shape.num_owners
        whole = weight_bytes(shape, dtype)
        norm_bytes = norms * (ELEMENT_BYTES["bfloat16"] if dtype != "float32" else ELEMENT_BYTES["float32"])
        return round((whole - norm_bytes + heads * WEIGHT_BYTES[dtype]) / self.size + norm_bytes)


def plan_ranks(variants: Sequence[Variant], work: Workload, fleet: Fleet, size: int) -> dict[str, Any]:
    """Return bytes per rank of each variant, and for each memory the tokens and requests that fit.

    Raises:
        KvforgeError: the heads cannot be divided among ``size`` ranks.
    """
    rows = []
    for variant in variants:
        division = Division(variant.shape, size)
        weights, per_token = division.weight_bytes(work.weight_dtype), division.kv_bytes_per_token(variant.kv_dtype)
        row: dict[str, Any] = {"name": variant.name, "weight_bytes": weights, "kv_bytes_per_token": per_token}
        row["requests"] = {}
        for memory in fleet.memory_gib:
            free = (memory - fleet.reserve_gib) * GIB - weights
            row["requests"][f"{memory:g}"] = max(int(free // per_token), 0) // (work.input_tokens + work.output_tokens)
        rows.append(row)
    return {"tensor_parallel_size": size, "variants": rows}
