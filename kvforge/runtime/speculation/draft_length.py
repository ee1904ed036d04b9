"""How many tokens to draft for each sequence of the next step."""

from kvforge.runtime.sequence import Sequence


class DraftLength:
    """Gives every sequence the same length."""

    def __init__(self, most: int) -> None:
        self._most = most

    def counts(self, sequences: list[Sequence]) -> list[int]:
        """Return drafts of each sequence at most; a step gives a token more than drafts that are right."""
        return [min(self._most, sequence.max_length - sequence.length - 1) for sequence in sequences]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence; idempotent."""
