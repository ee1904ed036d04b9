"""Expected attention (arXiv 2510.00636): the tokens that queries to come will probably attend to."""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.noted import NotesTokens
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import check_largest
from kvforge.kv_policies.state import StatePool


@dataclass(frozen=True)
class Expected(NotesTokens):
    """At the prompt's end, keeps the first ``sinks`` tokens and those with the largest expected weight times the norm
    of their value. Queries at the next ``future`` positions are taken for Gaussian, with the mean and, unless
    ``covariance`` is 0, the covariance of the prompt's last ``window`` queries before RoPE (section 3; there of all
    queries). Those of the first ``sinks`` tokens do not count.
    """

    window: int = 64
    future: int = 512
    sinks: int = 4
    covariance: int = 1

    name: ClassVar[str] = "expected"
    title: ClassVar[str] = "expected attention"
    when: ClassVar[When] = When.END
    is_by_sequence: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset({"sinks", "covariance"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_largest(self, "window", 4096)
        check_largest(self, "covariance", 1)

    @classmethod
    def variants(cls) -> tuple[str, ...]:
        return ()

    @property
    def num_noted(self) -> int:
        return self.window

    @property
    def num_protected(self) -> int:
        return self.sinks

    def score(self, slots: Slots) -> Tensor:
        import torch

        exponent = slots.expected_exponent(self.window, self.sinks, self.future, bool(self.covariance))
        is_sink = slots.position < self.sinks
        weights = exponent.masked_fill(is_sink[:, :, None], -torch.inf).log_softmax(-1).logsumexp(2)
        # Logarithms: float32 has none of the weights that are far below the largest.
        return slots.protect((weights + slots.values.norm(dim=-1).log()).float(), is_sink)

    def _slot_bytes(self, cache: OwnerCache) -> int:
        return 4 * (self.window + 1) * cache.num_heads * cache.head_dim

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Beside positions, the noted queries of each running sequence, and a place for those that are not noted."""
        shape = (self.window + 1, cache.num_heads, cache.head_dim)
        return (*super().state_pools(cache), StatePool("queries", "sequences", shape, "float32"))

    def layer_insertion(self) -> Any:
        """See ``model_defs.noted_queries``."""
        from model_defs.noted_queries import NotedQueries

        return NotedQueries(num_pools=len(self.named_pools))
