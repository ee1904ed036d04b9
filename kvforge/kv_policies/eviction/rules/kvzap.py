"""KVzap (arXiv 2601.07891): a small model predicts from hidden states what KVzip would score, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies.eviction.budgets.ceiling import CeilingBudget
from kvforge.kv_policies.eviction.budgets.division import best_of_all, divide_pages
from kvforge.kv_policies.eviction.calendar import Calendar, When
from kvforge.kv_policies.eviction.names import ScoredLanes, Slots, Tensor
from kvforge.kv_policies.eviction.observation import IS_CUT
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import Need
from kvforge.kv_policies.state import EngineMemory, PolicyState, StatePool


@dataclass(frozen=True)
class GrowingCalendar(Calendar):
    """Evictions at the prompt's end and after every ``block`` tokens that follow. How many tokens are left, their
    scores say: at most ``budget`` and those of a page that the prompt did not fill, of which a block has some whole
    ones."""

    def first(self, num_prompt_tokens: int) -> int:
        return num_prompt_tokens

    def cached(self, num_prompt_tokens: int, num_computed: int) -> int:
        since = (num_computed - num_prompt_tokens) % self.block
        most = self.budget + num_prompt_tokens % self.block + since
        return num_computed if num_computed < num_prompt_tokens else min(num_computed, most)

    def cached_before(self, num_prompt_tokens: int, num_computed: int) -> int:
        if num_computed <= num_prompt_tokens:
            return num_computed
        return min(num_computed, self.budget + num_prompt_tokens % self.block + self.block)

    def max_cached(self, num_prompt_tokens: int, num_tokens: int, start: int = 0) -> int:
        if num_tokens <= num_prompt_tokens and start < num_prompt_tokens:
            return num_tokens
        before = num_prompt_tokens if start < num_prompt_tokens else 0
        begin = max(start, num_prompt_tokens)
        after = self.cached(num_prompt_tokens, begin) + num_tokens - begin
        return max(before, min(after, self.budget + num_prompt_tokens % self.block + self.block))


@dataclass(frozen=True)
class KVzap(CeilingBudget):
    """At the prompt's end, and again after every ``block`` tokens, those are evicted whose score is below minus
    ``threshold`` hundredths (section 3.3; 0: not one for its score alone), but the newest ``window`` (0: 128, or a
    quarter of a smaller budget). Of all heads of all owners at most ``budget`` stay on average, those of the largest
    scores. Scores are logarithms of KVzip+'s (section 3.1), which the engine's scorer predicts as tokens are written.

    A head's tokens fill whole pages, so of those below the threshold it keeps the best, fewer than a page has. The
    tokens of the last page of a prompt, where that is not full, are not evicted before it is.

    Raises:
        BuildError: also from ``check`` for a block of parts of pages.
    """

    budget: int = 4096
    threshold: int = 400
    window: int = 0

    name: ClassVar[str] = "kvzap"
    title: ClassVar[str] = "KVzap"
    when: ClassVar[When] = When.END_DECODE
    keeps_by_content: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset({"threshold"})

    def __post_init__(self) -> None:
        if self.window == 0:
            object.__setattr__(self, "window", max(min(128, self.budget // 4), 1))
        super().__post_init__()

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.TOKEN_SCORES, Need.PLAIN_WRITES}

    @property
    def default_block(self) -> int:
        return max(min(64, self.budget // 2), 1)

    @property
    def calendar(self) -> Calendar:
        return GrowingCalendar(self.budget, self.block, When.END_DECODE)

    @property
    def num_protected(self) -> int:
        return self.window

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        super().check(num_kv_heads, head_dim, page_size)
        if self.block % page_size:
            raise BuildError(
                f"{self.name}: block {self.block} is no multiple of the {page_size} tokens of a page; give "
                f"{-(-self.block // page_size) * page_size}."
            )

    def score(self, slots: Slots) -> Tensor:
        import torch

        least = torch.finfo(torch.float32).min  # minus infinity are places without a token
        score = slots.statistics["score"].nan_to_num(nan=least, neginf=least)
        return slots.protect(score, slots.newest(self.window))

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        """See ``SharedBudget``; fewer than the budget where fewer are above the threshold."""
        import torch

        best, num_heads = torch.cat([one.best for one in owners]), len(owners[0].best)
        there, fewest = (best > -torch.inf).sum(1), int(best.isposinf().sum(1).max())
        above = (best >= -self.threshold / 100).sum(1) if self.threshold else there
        most = [min(self.max_pages(num_heads, page_size), one // page_size) for one in there.tolist()]
        wanted = [
            min(one, passed, pages * page_size)
            for one, passed, pages in zip(best_of_all(best, fewest, self.budget), above.tolist(), most, strict=True)
        ]
        total = sum(-(-tokens // page_size) for tokens in wanted) if self.threshold else sum(most)
        total = min(total, len(best) * (self.budget // page_size))
        pages = divide_pages(wanted, total, page_size, -(-fewest // page_size), most)
        return [pages[first : first + num_heads] for first in range(0, len(pages), num_heads)]

    @property
    def slot_columns(self) -> tuple[str, ...]:
        return (IS_CUT,)

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        return (int(num_computed >= num_prompt_tokens),)

    # -- memory ------------------------------------------------------------------------------------------------

    def num_state_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        return -(-max(num_prompt_tokens, self.budget + 2 * self.block) // page_size)

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Beside the others', the score of the token in each place of the cache, and of each running sequence the pages
        that its lanes are in."""
        position, *lanes = super().state_pools(cache)
        score = StatePool("score", "cache", (cache.page_size, cache.num_kv_heads), "float32")
        return (position, score, StatePool("shared_pages", "sequences", (1,), "int32"), *lanes)

    def _slot_bytes(self, cache: OwnerCache) -> int:
        return super()._slot_bytes(cache) + 4

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """At most: where all tokens are above the threshold."""
        cached = self.num_cached(num_prompt_tokens, num_prompt_tokens + num_generated_tokens)
        state = self.num_state_pages(num_prompt_tokens, cache.page_size) * cache.page_size * self._state_bytes(cache)
        return cache.padded(cached) * self._token_bytes(cache) + state + self._slot_bytes(cache)

    def prefill_bytes(self, cache: OwnerCache, num_prompt_tokens: int) -> int:
        left = self.num_cached(num_prompt_tokens, num_prompt_tokens)
        return (cache.padded(num_prompt_tokens) - cache.padded(left)) * self._token_bytes(cache)

    @staticmethod
    def _token_bytes(cache: OwnerCache) -> int:
        """Of K, V and the scores."""
        return cache.token_bytes + 4 * cache.num_kv_heads

    def layer_insertion(self) -> Any:
        """See ``model_defs.lane_attention``."""
        from model_defs.lane_attention import MeasuredLanes

        return MeasuredLanes(None, num_pools=len(self.named_pools), owners_share=self.owners_share)

    def make_state(self, memory: EngineMemory) -> PolicyState:
        from kvforge.kv_policies.eviction.score_lanes import ScoreLanes

        return ScoreLanes(self, memory)
