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

_MAX, _LOW = 2**31 - 1, 2**32 - 1


@dataclass(frozen=True)
class Located:
    """Where the tokens of each KV head of an owner lie: rows of the pool, which has one for each head of each place of
    each page, int64; ``state`` has what lies in pools of the policy as they do, by the pool's name. All ``[kv_heads,
    L]``."""

    row: Tensor
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
            self._divide(group, *self._lanes(group, places), places)
        self._count(places)

    def _lanes(self, owners: Sequence[int], places: Places) -> tuple[list[ScoredLanes], list[Located]]:
        """Return the tokens of ``owners`` before anything of the transition is written."""
        slots = [self._slots(owner, places) for owner in owners]
        scored = [ScoredLanes.of(one, self._rule.score(one)) for one in slots]
        return scored, [self._located(owner, places) for owner in owners]

    def _located(self, owner: int, places: Places) -> Located:
        num_heads = self._caches[owner][0].shape[2]
        place = (places.pages[0] + self._first_page(owner)) * self._page_size + places.place
        row = place * num_heads + torch.arange(num_heads, device=self._device)[:, None]
        return Located(row, {"position": (places.index + places.shift).expand_as(row)})

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
        pages_of_lane = torch.tensor(self._pages_of_lanes(scored, places), device=device)
        page, room = _columns(pages_of_lane, places.keep // size)
        owner_of, head = room // num_heads, room % num_heads
        first = torch.tensor([self._first_page(owner) for owner in owners], device=device)
        target = self._kept_table(places)[page] + first[owner_of]
        columns = target * size * num_heads + head

        order = torch.cat([one.order for one in scored])
        is_best = torch.arange(order.shape[1], device=device) < pages_of_lane[:, None] * size
        stays = torch.zeros_like(is_best).scatter_(1, order, is_best).flatten().nonzero()[:, 0]
        source = torch.cat([one.row for one in located]).flatten()[stays]
        places_of = torch.arange(size, device=device) * num_heads
        state = {
            name: torch.cat([one.state[name] for one in located]).flatten()[stays].view(-1, size)
            for name in located[0].state
        }
        move_tokens(self._caches[owners[0]], source, (columns[:, None] + places_of).flatten())

        state_page = places.state_table[0].long()[page]
        slot, longest = places.transitions[0].sequence.slot, int(pages_of_lane.max())
        is_there = torch.arange(longest, device=device) < pages_of_lane[:, None]
        table = torch.zeros(is_there.shape, dtype=torch.int32, device=device)
        table[is_there] = columns.int()
        columns_of = owner_of.argsort(stable=True).split(owner_of.bincount(minlength=len(owners)).tolist())
        for index, (owner, here) in enumerate(zip(owners, columns_of, strict=True)):
            *_, lane_pages, lane_table = self._states[owner]
            for pool, tensor in zip(self._rule.named_pools, self._states[owner], strict=True):
                if pool.name in state:
                    rows = (state_page if pool.rows == "pages" else target - first[index])[here]
                    tensor.transpose(1, 2)[rows, head[here]] = state[pool.name][here].to(tensor.dtype)
            lanes = slice(index * num_heads, (index + 1) * num_heads)
            lane_pages[slot] = pages_of_lane[lanes]
            lane_table[slot, :, :longest] = table[lanes]


def _sorted(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``ScoredLanes.of`` sorts, by one number of each token: its score's bits in the order of floats, and
    below them its index. numpy sorts these in a tenth of torch's time."""
    bits = (score + 0.0).contiguous().view(torch.int32).long()  # there is one zero
    keys = ((bits ^ ((bits >> 31) & _MAX)) << 32) + torch.arange(score.shape[-1])
    order = torch.from_numpy(np.sort(keys.numpy(), axis=-1)).flip(-1) & _LOW
    return score.gather(-1, order), order


def _columns(pages_of_lane: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Return for each lane, one after the other, the columns that it gets: which of ``num_pages`` pages, and the lane
    whose own it is."""
    is_own = torch.arange(num_pages, device=pages_of_lane.device) < pages_of_lane[:, None]
    lane, page = is_own.nonzero().T
    other = torch.repeat_interleave((pages_of_lane - num_pages).clamp(min=0))
    free_page, room = (~is_own.T).nonzero()[: len(other)].T
    order = torch.cat((lane, other)).argsort(stable=True)
    return torch.cat((page, free_page))[order], torch.cat((lane, room))[order]
