"""Probes: what a model is asked about a prompt, so that a policy sees how the question attends to it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar


class Probing(ABC):
    """Probes are computed behind the cache of a prompt, one a step, before its first transition. Nobody keeps their K
    and V."""

    texts: ClassVar[tuple[str, ...]]
    """What the model is asked, in words: an engine's manifest has the ids of their tokens."""

    @abstractmethod
    def num_probes(self, num_prompt_tokens: int) -> int:
        """Return how many probes a prompt has."""

    @abstractmethod
    def tokens(self, tokens: Sequence[int], texts: Sequence[Sequence[int]], index: int) -> list[int]:
        """Return the ids of probe ``index`` of the cache of ``tokens``; ``texts`` are the ids of its ``texts``."""

    @abstractmethod
    def inputs(self, state_table: Any, num_queries: int, num_scored: int) -> tuple[Any, ...]:
        """Return the policy's ``state_inputs`` of a step with ``num_queries`` tokens of a probe. How others attend to
        the first ``num_scored`` tokens of the cache was seen before. ``state_table`` is int32 ``[1, Ms]``."""

    @abstractmethod
    def num_scratch_pages(self, page_size: int) -> int:
        """Return the pages beside all sequences' that K and V of a probe go to, and the state pages beside them."""
