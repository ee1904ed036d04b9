"""What forms of an answer of one choice have in common."""

from kvforge.gateway.answers.answer_reader import AnswerReader
from kvforge.gateway.parsed_request import ParsedRequest


class OneChoice:
    """Reads an answer, of which `_pending` is to be sent, and `_held` bytes wait for its end."""

    def __init__(self, asked: ParsedRequest) -> None:
        self._reader = AnswerReader(asked)
        self._streamed = asked.stream
        self._pending = bytearray()
        self._held = 0
        self._finish_reason: str | None = None

    @property
    def num_bytes(self) -> int:
        return len(self._pending) if self._streamed else self._held

    def missing(self) -> bool:
        return self._finish_reason is None

    def event(self, index: int) -> bytes:
        pending, self._pending = self._pending, bytearray()
        return bytes(pending)
