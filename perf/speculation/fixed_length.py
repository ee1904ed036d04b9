"""Drafts of one length in every step, whatever pays."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from kvforge.runtime.speculation.drafter import Drafter
from kvforge.runtime.speculation.drafting import Drafting


class FixedLength(DraftLength):
    """As many drafts as there is room for, whether they pay or not."""

    @property
    def pays_for_prompts(self) -> bool:
        """True."""
        return True

    def is_due(self, num_sequences: int) -> bool:
        """Return True."""
        return True

    def choose(
        self, num_sequences: int, available: Mapping[Any, int], chances: Mapping[Any, Any] = MappingProxyType({})
    ) -> dict[Any, int]:
        """Return ``available``."""
        return dict(available)


class FixedDrafting(Drafting):
    """Drafts of one length in every step."""

    def __init__(self, engine: LLMEngine, drafter: Drafter, length: int) -> None:
        super().__init__(SpeculativeConfig("early_exit", length), engine.manifest, engine.config)
        self.drafter = drafter
        self._lengths = FixedLength(length)
