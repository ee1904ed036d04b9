"""KVzip (arXiv 2505.23416): the tokens that a model looks at when it is asked to repeat the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.kv_policies.capabilities import Probing
from kvforge.kv_policies.eviction.budgets.ceiling import CeilingBudget
from kvforge.kv_policies.eviction.budgets.division import best_of_all, divide_pages
from kvforge.kv_policies.eviction.calendar import Calendar
from kvforge.kv_policies.eviction.names import ScoredLanes, Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import NOT_OBSERVED
from kvforge.kv_policies.owner_cache import OwnerCache

_TAIL = 8
"""Tokens before a part that say where it begins."""


@dataclass(frozen=True)
class Repetition(Probing):
    """A prompt repeated, ``chunk`` tokens at a time, where a calendar says that it is cut down."""

    chunk: int
    calendar: Calendar

    texts: ClassVar[tuple[str, ...]] = (
        "\n\nRepeat the previous context exactly.\n",
        "\n\nRepeat the part of the previous context exactly that starts after: ",
        "\n",
    )

    def num_probes(self, num_prompt_tokens: int) -> int:
        return 0 if self.calendar.first(num_prompt_tokens) is None else -(-num_prompt_tokens // self.chunk)

    def tokens(self, tokens: Sequence[int], texts: Sequence[Sequence[int]], index: int) -> list[int]:
        start, (first, later, end) = index * self.chunk, texts
        request = [*later, *tokens[max(start - _TAIL, 0) : start], *end] if index else [*first]
        return [*request[: self._longest_request], *tokens[start : start + self.chunk]]

    def inputs(self, state_table: Any, num_queries: int, num_scored: int) -> tuple[Any, ...]:
        import torch

        return state_table, *torch.tensor([[num_queries], [num_scored], [-1]], dtype=torch.int32)

    @property
    def _longest_request(self) -> int:
        """No tokenizer makes more tokens than bytes, and one for the beginning of a text."""
        return sum(len(text.encode()) + 1 for text in self.texts) + _TAIL

    def num_scratch_pages(self, page_size: int) -> int:
        return -(-(self._longest_request + self.chunk) // page_size)


@dataclass(frozen=True)
class KVzip(CeilingBudget):
    """At the prompt's end the model is asked to repeat the prompt, ``chunk`` tokens at a time. A token's score is the
    largest weight that it gets from any head of any token of these repetitions (section 3.2); the first ``sinks``
    stay. Of all heads of all owners the best tokens together do (section 3.3)."""

    chunk: int = 512
    sinks: int = 4

    name: ClassVar[str] = "kvzip"
    title: ClassVar[str] = "KVzip"
    statistic: ClassVar[Statistic] = Statistic.MAXIMUM
    optional: ClassVar[frozenset[str]] = frozenset({"sinks"})

    @property
    def num_observed(self) -> int:
        return self.chunk

    def observe_from(self, num_prompt_tokens: int, num_computed: int) -> int:
        """No token of the text is observed."""
        return NOT_OBSERVED

    @property
    def num_protected(self) -> int:
        return self.sinks

    def score(self, slots: Slots) -> Tensor:
        return slots.protect(slots.mass, slots.position < self.sinks)

    @property
    def probing(self) -> "Repetition":
        return Repetition(self.chunk, self.calendar)

    def prefill_bytes(self, cache: OwnerCache, num_prompt_tokens: int) -> int:
        """Also those of a part that is repeated, as one prompt is at a time."""
        num_tokens = self.probing.num_scratch_pages(cache.page_size) * cache.page_size
        repeated = num_tokens * (cache.token_bytes + self._state_bytes(cache))
        return super().prefill_bytes(cache, num_prompt_tokens) + repeated

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        import torch

        best, (num_heads, length) = torch.cat([one.best for one in owners]), owners[0].best.shape
        most = min(self.max_pages(num_heads, page_size), length // page_size)
        fewest = max(self.num_protected, 1)
        wanted = best_of_all(best, fewest, self.budget)
        total = len(best) * (self.budget // page_size)
        pages = divide_pages(wanted, total, page_size, -(-fewest // page_size), most)
        return [pages[first : first + num_heads] for first in range(0, len(pages), num_heads)]
