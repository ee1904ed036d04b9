"""Cuts caches down to a budget that KV heads share: those of an owner, or of all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvforge.kv_policies.eviction.slots import Slots
from kvforge.kv_policies.eviction.state import EvictionState, Places, Rule
from kvforge.kv_policies.state import EngineMemory
from kvforge.kv_policies.transition import Transition
from model_defs.cache_access import move_tokens
from model_defs.columns import column_number

_MAX, _LOW = 2**31 - 1, 2**32 - 1


@dataclass(frozen=True)
class Located:
    """Where the tokens of each KV head of an owner lie: pages of the pool, places in these and the heads whose memory
    it is, int64; ``state`` has what lies in pools of the policy as they do, by the pool's name. All ``[kv_heads,
    L]``."""

    page: Tensor
    place: Tensor
    head: Tensor
    state: dict[str, Tensor]


@dataclass(frozen=True)
class ScoredLanes:
    """An owner's tokens of one sequence, those of each KV head from the best on: their scores ``best`` and their
    indices ``order``, each ``[kv_heads, L]``."""

    slots: Slots
    best: Tensor
    order: Tensor

    @classmethod
    def of(cls, slots: Slots, score: Tensor) -> "ScoredLanes":
        """Sort by ``score`` ``[1, kv_heads, L]``, of equals the newer token first; one that is not a number is the
        worst."""
        clean = score[0].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if clean.device.type == "cpu":
            return cls(slots, *_sorted(clean))
        best, order = clean.flip(-1).sort(dim=-1, descending=True, stable=True)
        return cls(slots, best, score.shape[-1] - 1 - order)


class SharedBudgets(Rule, Protocol):
    """What is asked of a ``SharedBudget``; see there."""

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]: ...


class LaneState(EvictionState):
    """Divides the columns of the pages that a sequence keeps among KV heads, and moves into them what stays.

    A head keeps its own columns, as many as it gets pages; those that others do not need go to the heads that get more,
    in the order of pages, owners and heads. Positions, and what else belongs to tokens, lie as the tokens do.
    """

    def __init__(self, rule: SharedBudgets, memory: EngineMemory) -> None:
        super().__init__(rule, memory)
        self._budgets = rule

    def _evict(self, transitions: Sequence[Transition]) -> None:
        places, every = self._places(transitions), range(len(self._caches))
        for group in [list(every)] if self._rule.owners_share else [[owner] for owner in every]:
            located = [self._located(owner, places) for owner in group]
            scored = [self._scored(owner, places, one) for owner, one in zip(group, located, strict=True)]
            self._divide(group, scored, located, places)
        self._count(places)

    def _located(self, owner: int, places: Places) -> Located:
        """Return where tokens are before anything of the transition is written."""
        num_heads = self._caches[owner][0].shape[2]
        page, place, position = places.pages[0] + self._first_page(owner), places.place, places.index + places.shift
        head = torch.arange(num_heads, device=self._device)[:, None].expand(-1, places.length)
        return Located(page.expand_as(head), place.expand_as(head), head, {"position": position.expand_as(head)})

    def _scored(self, owner: int, places: Places, located: Located) -> ScoredLanes:
        slots = self._slots(owner, places)
        return ScoredLanes.of(slots, self._rule.score(slots))

    def _kept_table(self, places: Places) -> Tensor:
        """Return the pages that the lanes fill, int64."""
        return places.page_table[0].long()

    def _pages_of_lanes(self, scored: Sequence[ScoredLanes], places: Places) -> list[int]:
        return [n for of_owner in self._budgets.divide(scored, self._page_size) for n in of_owner]

    def _divide(
        self, owners: Sequence[int], scored: Sequence[ScoredLanes], located: Sequence[Located], places: Places
    ) -> None:
        """Give the columns of the pages of ``owners`` to their heads, and move into them what stays.

        A *lane* is an owner and one of its heads, numbered in this order.
        """
        size, num_heads, device = self._page_size, len(scored[0].best), self._device
        pages_of_lane = self._pages_of_lanes(scored, places)
        page, room = torch.tensor(_columns(pages_of_lane, places.keep // size), device=device).T
        first = torch.tensor([self._first_page(owner) for owner in owners], device=device)
        target, head = self._kept_table(places)[page] + first[room // num_heads], room % num_heads
        columns = column_number(target, 0, size, num_heads)[head, torch.arange(len(head), device=device)]

        order = [order for one in scored for order in one.order]
        tokens = torch.cat([best[: n * size].sort().values for best, n in zip(order, pages_of_lane, strict=True)])
        lane = torch.repeat_interleave(torch.tensor(pages_of_lane, device=device) * size)
        whole, names = (
            torch.cat([torch.stack((one.page, one.place, one.head), -1) for one in located]),
            located[0].state,
        )
        source = whole[lane, tokens].unbind(-1)
        state = {name: torch.cat([one.state[name] for one in located])[lane, tokens] for name in names}
        place, target, head, owner_of = (
            torch.arange(size, device=device).repeat(len(page)),
            *(x.repeat_interleave(size) for x in (target, head, room // num_heads)),
        )
        move_tokens(self._caches[owners[0]], source, (target, place, head))

        state_page = places.state_table[0].long()[page].repeat_interleave(size)
        slot = places.transitions[0].sequence.slot
        columns_of_lane = iter(columns.int().split(pages_of_lane))
        tokens_of = owner_of.argsort(stable=True).split(owner_of.bincount(minlength=len(owners)).tolist())
        for index, (owner, here) in enumerate(zip(owners, tokens_of, strict=True)):
            *_, lane_pages, lane_table = self._states[owner]
            for pool, tensor in zip(self._rule.named_pools, self._states[owner], strict=True):
                if pool.name in state:
                    row = state_page if pool.rows == "pages" else target - first[index]
                    tensor[row[here], place[here], head[here]] = state[pool.name][here].to(tensor.dtype)
            for one in range(num_heads):
                of_lane = next(columns_of_lane)
                lane_pages[slot, one] = len(of_lane)
                lane_table[slot, one, : len(of_lane)] = of_lane


def _sorted(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``ScoredLanes.of`` sorts, by one number of each token: its score's bits in the order of floats, and
    below them its index. numpy sorts these in a tenth of torch's time."""
    bits = (score + 0.0).contiguous().view(torch.int32).long()  # there is one zero
    keys = ((bits ^ ((bits >> 31) & _MAX)) << 32) + torch.arange(score.shape[-1])
    order = torch.from_numpy(np.sort(keys.numpy(), axis=-1)).flip(-1) & _LOW
    return score.gather(-1, order), order


def _columns(pages_of_lane: Sequence[int], num_pages: int) -> list[tuple[int, int]]:
    """Return for each lane, one after the other, the columns that it gets: which of ``num_pages`` pages, and the lane
    whose own it is."""
    columns = [[(page, lane) for page in range(min(n, num_pages))] for lane, n in enumerate(pages_of_lane)]
    free = iter([(page, lane) for page in range(num_pages) for lane, n in enumerate(pages_of_lane) if page >= n])
    for lane, n in enumerate(pages_of_lane):
        columns[lane] += [next(free) for _ in range(n - num_pages)]
    return [column for of_lane in columns for column in of_lane]
