"""Rules that note something of a prompt's last tokens, in a pool with a row for each sequence."""

from abc import abstractmethod
from dataclasses import dataclass

from kvforge.kv_policies.eviction.observation import NOTE_INPUTS
from kvforge.kv_policies.eviction.policy import NOT_OBSERVED, Eviction
from kvforge.kv_policies.policy import Need
from kvforge.kv_policies.state import StateInput


@dataclass(frozen=True)
class NotesTokens(Eviction):
    """Notes the last ``num_noted`` tokens of prompts that evict. They go past the cut, and no prefix has them."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.ATTENTION_SCORES, Need.PLAIN_WRITES}

    @property
    def state_inputs(self) -> tuple[StateInput, ...]:
        return (*super().state_inputs, *NOTE_INPUTS)

    @property
    def slot_columns(self) -> tuple[str, ...]:
        return (*super().slot_columns, "note_from")

    @property
    @abstractmethod
    def num_noted(self) -> int:
        """How many of a prompt's last tokens are noted."""

    def note_from(self, num_prompt_tokens: int) -> int:
        """Return the position of the first of them."""
        is_cut = self.calendar.first(num_prompt_tokens) is not None
        return max(num_prompt_tokens - self.num_noted, 0) if is_cut else NOT_OBSERVED

    def max_reusable(self, num_prompt_tokens: int) -> int | None:
        first = min(self.observe_from(num_prompt_tokens, 0), self.note_from(num_prompt_tokens))
        return None if first == NOT_OBSERVED else first

    def num_observers(self, num_prompt_tokens: int, start: int, end: int) -> int:
        noted = min(end, num_prompt_tokens) - max(start, self.note_from(num_prompt_tokens))
        return max(super().num_observers(num_prompt_tokens, start, end), noted)

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        return (*super().slot_values(num_prompt_tokens, num_computed), self.note_from(num_prompt_tokens))
