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
    """What a sequence is about to keep: pages of each lane, by these scores of these tokens."""

    pages_of_lane: list[int]
    scored: list[ScoredLanes]
    located: list[Located]

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

    @torch.inference_mode()
    def measure(self, sequence: CachedSequence) -> Sequence[int]:
        """See ``MeasuringState``."""
        num_pages, num_full = len(sequence.pages), self._num_full(sequence, len(sequence.pages))
        places = self._before(sequence, sequence.pages)
        located = [self._located(owner, places) for owner in range(len(self._caches))]
        scored = self._scored(located, places)
        pages = super()._pages_of_lanes(scored, places) if places.length else [0]
        self._divisions[sequence.slot] = found = _Division(pages, scored, located)
        return [*range(found.num_shared), *range(num_full, num_pages)]

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
        return transition.sequence.pages[: self._divisions[transition.sequence.slot].num_shared]

    def _copy_pages(self, transitions: Sequence[Transition]) -> None:
        """Not one: tokens that stay go from the old pages to those that are kept, and fill them."""

    def _places(self, transitions: Sequence[Transition]) -> Places:
        (transition,) = transitions
        return self._before(transition.sequence, transition.old_pages, keep=len(self._kept_pages(transition)))

    def _kept_table(self, places: Places) -> Tensor:
        return torch.tensor(self._kept_pages(places.transitions[0]), dtype=torch.long, device=self._device)

    def _evict(self, transitions: Sequence[Transition]) -> None:
        (transition,) = transitions
        slot = transition.sequence.slot
        division = self._divisions[slot]
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
        return self._divisions[places.transitions[0].sequence.slot].pages_of_lane

    def _lanes(self, owners: Sequence[int], places: Places) -> tuple[list[ScoredLanes], list[Located]]:
        division = self._divisions[places.transitions[0].sequence.slot]
        return division.scored, division.located

    # -- tokens -------------------------------------------------------------------------------------------------

    def _located(self, owner: int, places: Places) -> Located:
        located = super()._located(owner, places)
        sequence = places.transitions[0].sequence
        first = sequence.num_computed - sequence.num_prompt_tokens % self._page_size - places.length
        located = replace(located, state={"position": (places.index + first).expand_as(located.row)})
        if not places.sealed:  # whole pages
            score = self._states[owner][1].index_select(0, places.page_table[0]).flatten(0, 1).T
        else:
            located = self._behind_lane(owner, places, located)
            score = torch.empty(located.row.shape, device=self._device)
            for one, state in enumerate(self._states):
                here, page, place, head = self._of_owner(one, located.row)
                score[here] = state[1][page, place, head]
        return replace(located, state={**located.state, "score": score})

    def _behind_lane(self, owner: int, places: Places, later: Located) -> Located:
        """Return the tokens of each head's lane, and those of ``later`` that are behind the shared pages."""
        *_, lane_pages, lane_table = self._states[owner]
        slot, size, num_heads = places.transitions[0].sequence.slot, self._page_size, len(later.row)
        counts, longest = lane_pages[slot].long(), max(int(state[-2][slot].max()) for state in self._states)
        columns = lane_table[slot, :, :longest].long()
        is_there = torch.arange(longest, device=self._device) < counts[:, None]
        columns = torch.where(is_there, columns, self._first_page(owner) * size * num_heads)
        row = (columns[..., None] + torch.arange(size, device=self._device) * num_heads).flatten(1)
        position = torch.where(is_there.repeat_interleave(size, 1), self._positions(row, places), -1)
        state = torch.cat((position, later.state["position"][:, places.sealed :]), 1)
        return Located(torch.cat((row, later.row[:, places.sealed :]), 1), {"position": state})

    def _positions(self, row: Tensor, places: Places) -> Tensor:
        """Return the positions of tokens in shared pages, whichever owner's these are; of others any number."""
        of_page = torch.zeros(len(self._states[0][1]), dtype=torch.long, device=self._device)
        of_page[places.page_table[0].long()] = places.state_table[0].long()
        found = torch.empty_like(row)
        for owner, state in enumerate(self._states):
            here, page, place, head = self._of_owner(owner, row)
            found[here] = state[0][of_page[page], place, head].long()
        return found

    def _of_owner(self, owner: int, row: Tensor) -> tuple[Tensor, ...]:
        """Return which rows of the pool of all are an owner's, and of these the page as sequences number them, the
        place and the head."""
        _, size, num_heads = self._states[owner][1].shape
        page = row // (size * num_heads) - self._first_page(owner)
        here = (page >= 0) & (page < len(self._states[owner][1]))
        return here, page[here], row[here] // num_heads % size, row[here] % num_heads

    def _scored(self, located: Sequence[Located], places: Places) -> list[ScoredLanes]:
        """Return the lanes of all owners, scored together."""
        position, score = (torch.stack([one.state[name] for one in located]) for name in ("position", "score"))
        slots = replace(self._slots(0, places), position=position.float(), statistics={"score": score})
        scores = self._rule.score(slots).masked_fill(position < 0, -torch.inf)
        every = ScoredLanes.of(slots, scores.flatten(0, 1)[None])
        lanes = zip(*(x.unflatten(0, position.shape[:2]) for x in (every.best, every.order)), strict=True)
        return [ScoredLanes(slots, best, order) for best, order in lanes]
