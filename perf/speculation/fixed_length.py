"""Drafts of one length in every step, whatever pays."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvforge.runtime.speculation.draft_length import DraftLength


class FixedLength(DraftLength):
    """As many drafts as there is room for, whether they pay or not."""

    def is_due(self, num_sequences: int) -> bool:
        """Return True."""
        return True

    def choose(
        self, num_sequences: int, available: Mapping[Any, int], chances: Mapping[Any, Any] = MappingProxyType({})
    ) -> dict[Any, int]:
        """Return ``available``."""
        return dict(available)
