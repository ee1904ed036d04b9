"""Evicts tokens in the pools of all owners."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from kvforge.kv_policies.eviction.calendar import Calendar
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.slots import Slots
from kvforge.kv_policies.state import EngineMemory, StatePool
from kvforge.kv_policies.transition import Transition
from model_defs.cache_access import copy_pages, evict, read_keys


class Rule(Protocol):
    """What is asked of an ``Eviction``; see there."""

    @property
    def calendar(self) -> Calendar: ...

    @property
    def statistic(self) -> Statistic | None: ...

    @property
    def is_by_sequence(self) -> bool: ...

    def score(self, slots: Slots) -> Tensor: ...

    def state_pools(self, num_kv_heads: int, head_dim: int, page_size: int) -> tuple[StatePool, ...]: ...


@dataclass(frozen=True)
class Places:
    """Where the L tokens of S sequences are: rows of ``pages`` and of ``state_pages``, int64 ``[S, L]``, at ``places``
    ``[L]`` in them."""

    transitions: Sequence[Transition]
    pages: Tensor
    state_pages: Tensor
    places: Tensor


class EvictionState:
    """Carries out evictions: a rule's score for each owner, then the operator that moves what stays together."""

    def __init__(self, rule: Rule, memory: EngineMemory) -> None:
        self._rule = rule
        self._statistics = () if rule.statistic is None else rule.statistic.pool_names
        num_state_pools = len(rule.state_pools(1, 1, 1))
        self._caches = [pool[: len(pool) - num_state_pools] for pool in memory.pools]
        self._states = [pool[len(pool) - num_state_pools :] for pool in memory.pools]
        self._scales = memory.kv_scales
        self._device, self._page_size = memory.pools[0][0].device, memory.pools[0][0].shape[1]
        self._num_evictions = self._num_evicted = 0

    def counters(self) -> dict[str, int]:
        return {"evictions": self._num_evictions, "evicted_tokens": self._num_evicted}

    @torch.inference_mode()
    def apply(self, transitions: Sequence[Transition]) -> None:
        """Evict tokens of sequences. None of the pages that one gives up is another's in this step's transitions."""
        self._copy_pages(transitions)
        for _, alike in groupby(sorted(transitions, key=self._shape), key=self._shape):
            batch = list(alike)
            size = 1 if self._rule.is_by_sequence else len(batch)
            for start in range(0, len(batch), size):
                self._evict(batch[start : start + size])

    def _shape(self, transition: Transition) -> tuple[int, int]:
        """Tokens that were placed by an eviction before, and all in the cache."""
        sequence, calendar = transition.sequence, self._rule.calendar
        lengths = sequence.num_prompt_tokens, sequence.num_computed
        is_first = calendar.previous(*lengths) is None
        return 0 if is_first else calendar.kept, calendar.cached_before(*lengths)

    def _copy_pages(self, transitions: Sequence[Transition]) -> None:
        """Fill pages that a sequence takes in the place of those that others hold too."""
        pairs = [
            (old, new)
            for transition in transitions
            for old, new in zip(transition.old_pages, self._kept_pages(transition), strict=False)
            if old != new
        ]
        if pairs:
            old, new = torch.tensor(pairs, device=self._device).T
            for cache in self._caches:
                copy_pages(cache, old, new)

    def _kept_pages(self, transition: Transition) -> list[int]:
        return transition.sequence.pages[: -(-self._rule.calendar.kept // self._page_size)]

    def _evict(self, transitions: Sequence[Transition]) -> None:
        """Evict from sequences of the same shape."""
        sealed, length = self._shape(transitions[0])
        keep, device, page_size = self._rule.calendar.kept, self._device, self._page_size
        num_pages = -(-length // page_size)
        tables = [
            [*kept, *one.old_pages[len(kept) : num_pages]] for one in transitions for kept in [self._kept_pages(one)]
        ]
        states = [one.sequence.state_pages[:num_pages] for one in transitions]
        page_table, state_table = (torch.tensor(x, dtype=torch.int32, device=device) for x in (tables, states))
        computed = torch.tensor([one.sequence.num_computed for one in transitions], device=device)
        prompt = torch.tensor([one.sequence.num_prompt_tokens for one in transitions], device=device)
        shift = computed - length
        index = torch.arange(length, device=device)
        places, columns = index % page_size, index // page_size
        rows, pages = state_table.long()[:, columns], page_table.long()[:, columns]
        fixed = (torch.full((len(transitions),), n, dtype=torch.int32, device=device) for n in (keep, length, sealed))
        numbers = (*fixed, shift.int(), page_table, state_table)
        names = self._statistics
        for owner, (position, *more) in enumerate(self._states):
            statistics = more[: len(names)]
            stored = position[rows, places].transpose(1, 2)
            slots = Slots(
                position=torch.where(index < sealed, stored, index + shift[:, None, None]).float(),
                num_computed=computed[:, None, None].float(),
                num_prompt=prompt[:, None, None].float(),
                statistics={
                    name: pool[rows, places].transpose(1, 2) for name, pool in zip(names, statistics, strict=True)
                },
                read_keys=lambda owner=owner: self._keys(owner, pages, places),  # type: ignore[misc]
            )
            score = self._rule.score(slots).contiguous()
            self._keep(owner, score, numbers, Places(transitions, pages, rows, places))
        self._num_evictions += len(transitions)
        self._num_evicted += len(transitions) * (length - keep)

    def _keep(self, owner: int, score: Tensor, numbers: Sequence[Tensor], places: Places) -> None:
        """Keep the tokens of the largest ``score`` ``[S, kv_heads, L]`` in an owner; ``numbers`` as ``evict`` takes
        them."""
        position, *more = self._states[owner]
        evict(self._caches[owner], score, numbers, position, more[: len(self._statistics)])

    def _keys(self, owner: int, pages: Tensor, places: Tensor) -> Tensor:
        """Rotated keys ``[S, kv_heads, L, d]`` float32."""
        return read_keys(self._caches[owner], pages, places, self._scales[owner][0]).transpose(1, 2)
