"""Cuts caches down by scores that were written with the tokens, again and again as a text grows, to as few pages as the
tokens that stay fill."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvforge.kv_policies.eviction.budget_lanes import LaneState, Located, ScoredLanes, SharedBudgets
from kvforge.kv_policies.eviction.state import Places
from kvforge.kv_policies.state import EngineMemory
from kvforge.kv_policies.transition import CachedSequence, Transition


@dataclass(frozen=True)
class _Division:
    """What a sequence is about to keep at ``computed`` tokens: pages of each lane, by these scores."""

    sequence: CachedSequence
    computed: int
    pages_of_lane: list[int]
    scored: list[ScoredLanes]

    def is_of(self, sequence: CachedSequence) -> bool:
        """Whether it is a sequence's next one."""
        return self.sequence is sequence and self.computed == sequence.num_computed

    @property
    def num_shared(self) -> int:
        """The pages that all lanes fill together."""
        return -(-sum(self.pages_of_lane) // len(self.pages_of_lane))


class ScoreLanes(LaneState):
    """See ``MeasuringState``. Lanes have whole pages: the tokens of a page that is not full stay behind them, as they
    are. After the first eviction a head's tokens are those of its lane, then those behind the shared pages. Of heads
    with shorter lanes the places between are empty: their position is -1.

    Of the policy's pools the first is ``position``, the second ``score``, and the last three are ``shared_pages``,
    ``lane_pages`` and ``lane_table``.
    """

    def __init__(self, rule: SharedBudgets, memory: EngineMemory) -> None:
        super().__init__(rule, memory)
        self._divisions: dict[int, _Division] = {}
        """By the slot of a sequence."""

    def measure(self, sequence: CachedSequence) -> Sequence[int]:
        """See ``MeasuringState``."""
        num_pages, num_full = len(sequence.pages), self._num_full(sequence, len(sequence.pages))
        return [*range(self._division(sequence).num_shared), *range(num_full, num_pages)]

    @torch.inference_mode()
    def _division(self, sequence: CachedSequence) -> _Division:
        known = self._divisions.get(sequence.slot)
        if known is not None and known.is_of(sequence):
            return known
        places = self._before(sequence, sequence.pages)
        owners = range(len(self._caches))
        scored = [self._scored(owner, places, self._located(owner, places)) for owner in owners]
        pages = super()._pages_of_lanes(scored, places) if places.length else [0]
        found = _Division(sequence, sequence.num_computed, pages, scored)
        self._divisions[sequence.slot] = found
        return found

    def _num_full(self, sequence: CachedSequence, num_pages: int) -> int:
        """Of a sequence's pages before a transition, those that are full."""
        return num_pages - (sequence.num_prompt_tokens % self._page_size > 0)

    def _num_shared(self, sequence: CachedSequence) -> int:
        """The pages of the lanes that the eviction before left, 0 before the first."""
        is_first = self._rule.calendar.previous(sequence.num_prompt_tokens, sequence.num_computed) is None
        return 0 if is_first else int(self._states[0][-3][sequence.slot, 0])

    def _before(self, sequence: CachedSequence, pages: Sequence[int], keep: int = 0) -> Places:
        """Return where the tokens of full ``pages`` are, of which ``keep`` will be left."""
        num_full, size = self._num_full(sequence, len(pages)), self._page_size
        table, states = (
            torch.tensor([list(numbers[:num_full])], dtype=torch.int32, device=self._device)
            for numbers in (pages, sequence.state_pages)
        )
        computed, prompt = (
            torch.tensor([n], device=self._device) for n in (sequence.num_computed, sequence.num_prompt_tokens)
        )
        sealed, transition = self._num_shared(sequence) * size, Transition(sequence, tuple(pages))
        return Places([transition], size, keep * size, sealed, num_full * size, table, states, computed, prompt)

    # -- a transition -------------------------------------------------------------------------------------------

    def _shape(self, transition: Transition) -> tuple[int, int]:
        sequence = transition.sequence
        return self._num_shared(sequence), self._num_full(sequence, len(transition.old_pages))

    def _kept_pages(self, transition: Transition) -> list[int]:
        return transition.sequence.pages[: self._division(transition.sequence).num_shared]

    def _copy_pages(self, transitions: Sequence[Transition]) -> None:
        """Not one: tokens that stay go from the old pages to those that are kept, and fill them."""

    def _places(self, transitions: Sequence[Transition]) -> Places:
        (transition,) = transitions
        return self._before(transition.sequence, transition.old_pages, keep=len(self._kept_pages(transition)))

    def _kept_table(self, places: Places) -> Tensor:
        return torch.tensor(self._kept_pages(places.transitions[0]), dtype=torch.long, device=self._device)

    def _evict(self, transitions: Sequence[Transition]) -> None:
        (transition,) = transitions
        slot, division = transition.sequence.slot, self._division(transition.sequence)
        if division.scored[0].best.shape[1]:
            super()._evict(transitions)
        for *_, shared_pages, lane_pages, _ in self._states:
            shared_pages[slot] = division.num_shared
            if not division.num_shared:
                lane_pages[slot] = 0
        del self._divisions[slot]

    def _count(self, places: Places) -> None:
        self._num_evictions += 1
        self._num_evicted += places.length - places.keep

    def _pages_of_lanes(self, scored: Sequence[ScoredLanes], places: Places) -> list[int]:
        return self._division(places.transitions[0].sequence).pages_of_lane

    # -- tokens -------------------------------------------------------------------------------------------------

    def _located(self, owner: int, places: Places) -> Located:
        located = super()._located(owner, places)
        sequence = places.transitions[0].sequence
        first = sequence.num_computed - sequence.num_prompt_tokens % self._page_size - places.length
        position = (places.index + first).expand_as(located.head)
        located = replace(located, state={"position": position})
        if places.sealed:
            located = self._behind_lane(owner, places, located)
            page = located.page
            score = torch.empty(page.shape, device=self._device)
            for one, state in enumerate(self._states):
                here, own = self._is_of(one, page)
                score[here] = state[1][own[here], located.place[here], located.head[here]]
        else:
            rows = self._states[owner][1][places.pages[0], places.place]
            score = rows.T.contiguous()
        return replace(located, state={**located.state, "score": score})

    def _behind_lane(self, owner: int, places: Places, later: Located) -> Located:
        """Return the tokens of each head's lane, and those of ``later`` that are behind the shared pages."""
        *_, lane_pages, lane_table = self._states[owner]
        slot, size, num_heads = places.transitions[0].sequence.slot, self._page_size, len(later.page)
        counts, longest = lane_pages[slot].long(), max(int(state[-2][slot].max()) for state in self._states)
        columns = lane_table[slot, :, :longest].long()
        is_there = torch.arange(longest, device=self._device) < counts[:, None]
        columns = torch.where(is_there, columns, self._first_page(owner) * size * num_heads)
        page, head = columns // (size * num_heads), columns % num_heads
        place = torch.arange(size, device=self._device).expand(*page.shape, size).flatten(1)
        page, head, is_there = (x.repeat_interleave(size, 1) for x in (page, head, is_there))
        position = torch.where(is_there, self._positions(page, place, head, places), -1)
        tail = slice(places.sealed, None)
        return Located(
            torch.cat((page, later.page[:, tail]), 1),
            torch.cat((place, later.place[:, tail]), 1),
            torch.cat((head, later.head[:, tail]), 1),
            {"position": torch.cat((position, later.state["position"][:, tail]), 1)},
        )

    def _positions(self, page: Tensor, place: Tensor, head: Tensor, places: Places) -> Tensor:
        """Return the positions of tokens in shared pages, whichever owner's these are; of others any number."""
        of_page = torch.zeros(len(self._states[0][1]), dtype=torch.long, device=self._device)
        of_page[places.page_table[0].long()] = places.state_table[0].long()
        found = torch.empty_like(page)
        for owner, state in enumerate(self._states):
            here, own = self._is_of(owner, page)
            found[here] = state[0][of_page[own[here]], place[here], head[here]].long()
        return found

    def _is_of(self, owner: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return which pages of the pool of all are an owner's, and all as sequences number them."""
        own = pages - self._first_page(owner)
        return (own >= 0) & (own < len(self._states[owner][1])), own

    def _scored(self, owner: int, places: Places, located: Located) -> ScoredLanes:
        """As its division has it, where that is made: copies of pages have equal scores."""
        sequence, position = places.transitions[0].sequence, located.state["position"][None]
        known = self._divisions.get(sequence.slot)
        if known is not None and known.is_of(sequence):
            return known.scored[owner]
        slots = replace(
            self._slots(owner, places), position=position.float(), statistics={"score": located.state["score"][None]}
        )
        return ScoredLanes.of(slots, self._rule.score(slots).masked_fill(position < 0, -torch.inf))
