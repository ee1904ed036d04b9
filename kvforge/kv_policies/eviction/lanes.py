"""Cuts caches down to a budget that the KV heads of an owner share."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvforge.kv_policies.eviction.division import divide_pages
from kvforge.kv_policies.eviction.state import EvictionState, Places, Rule
from kvforge.kv_policies.state import EngineMemory
from model_defs.cache_access import move_tokens


class SharedBudgets(Rule, Protocol):
    """What is asked of a ``HeadBudgets``; see there."""

    @property
    def budget(self) -> int: ...

    def min_pages(self, page_size: int) -> int: ...

    def max_pages(self, num_kv_heads: int, page_size: int) -> int: ...

    def wanted(self, score: Tensor) -> list[int]: ...


class LaneState(EvictionState):
    """Divides the columns of the pages that a sequence keeps among an owner's heads, and moves into them what stays.

    A head keeps its own columns, as many as it gets pages; those that others do not need go to the heads that get more,
    in the order of pages and heads. Positions lie as the tokens do.
    """

    def __init__(self, rule: SharedBudgets, memory: EngineMemory) -> None:
        super().__init__(rule, memory)
        self._budgets = rule

    def _keep(self, owner: int, score: Tensor, numbers: Sequence[Tensor], places: Places) -> None:
        (transition,), page_size = places.transitions, self._page_size
        best, order = _best_first(score[0])
        num_heads, length = best.shape
        num_kept = self._budgets.budget // page_size
        pages_of_head = divide_pages(
            self._budgets.wanted(best),
            num_heads * num_kept,
            page_size,
            self._budgets.min_pages(page_size),
            min(self._budgets.max_pages(num_heads, page_size), length // page_size),
        )
        columns = _columns(pages_of_head, num_kept)
        tokens = torch.cat([order[head, : n * page_size].sort().values for head, n in enumerate(pages_of_head)])
        heads = torch.repeat_interleave(torch.tensor(pages_of_head, device=tokens.device) * page_size)
        page, column = torch.tensor([one for of_head in columns for one in of_head], device=tokens.device).T
        target = page.repeat_interleave(page_size), column.repeat_interleave(page_size)
        place = places.places[: num_kept * page_size].repeat(num_heads)
        move_tokens(
            self._caches[owner],
            (places.pages[0][tokens], places.places[tokens], heads),
            (places.pages[0, ::page_size][target[0]], place, target[1]),
        )
        position, *_, lane_pages, lane_table = self._states[owner]
        position[places.state_pages[0, ::page_size][target[0]], place, target[1]] = tokens.int()
        slot = transition.sequence.slot
        lane_pages[slot] = torch.tensor(pages_of_head, dtype=torch.int32, device=tokens.device)
        kept = places.pages[0, ::page_size].tolist()
        for head, of_head in enumerate(columns):
            numbers_of_head = [kept[p] * page_size * num_heads + c for p, c in of_head]
            lane_table[slot, head, : len(of_head)] = torch.tensor(numbers_of_head, dtype=torch.int32)


def _best_first(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return each head's scores ``[kv_heads, L]`` from the best on, of equals the newer token first, and the tokens; a
    score that is not a number is the worst."""
    newest_first = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).flip(-1)
    best, order = newest_first.sort(dim=-1, descending=True, stable=True)
    return best, score.shape[-1] - 1 - order


def _columns(pages_of_head: Sequence[int], num_pages: int) -> list[list[tuple[int, int]]]:
    """Return for each head the (page, column) that it gets, of ``num_pages`` pages."""
    columns = [[(page, head) for page in range(min(n, num_pages))] for head, n in enumerate(pages_of_head)]
    free = iter([(page, head) for page in range(num_pages) for head, n in enumerate(pages_of_head) if page >= n])
    for head, n in enumerate(pages_of_head):
        columns[head] += [next(free) for _ in range(n - num_pages)]
    return columns
