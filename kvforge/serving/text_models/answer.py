"""A request's answer in a text model: rows of tokens come in, responses of text go out."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.failures import CANCELLED, Failure
from kvforge.serving.contract.text_rows import SEQUENCE_END, TextRow


@dataclass(frozen=True)
class Piece:
    """One response: the new text of a sequence, or all of it so far, and further outputs."""

    text: bytes
    arrays: dict[str, np.ndarray]
    final: bool


@dataclass
class Answer:
    """One request that the engine works on; the link's thread adds, one sender thread takes.

    With a `stream_interval` of 1 every row is a response of its own. With others the rows of a sequence that wait side
    by side, and have no further outputs, are one. With `accumulates` each response has the whole text so far. `lock` is
    held in calls on `sender`: Triton crashes on a question about a request that is over.
    """

    key: int
    sender: Any
    tokenizer: Tokenizer
    stream_interval: int = 1
    accumulates: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    """The client has its last response."""
    complete: threading.Event = field(default_factory=threading.Event)
    """The last row or a failure has come, or the answer has ended without."""
    last_asked: float = 0.0
    scheduled: bool = False
    """For the sender pool."""
    _rows: "deque[TextRow]" = field(default_factory=deque)
    _failure: Failure | None = None
    _detokenizers: dict[int, Detokenizer] = field(default_factory=dict)
    _texts: dict[int, bytes] = field(default_factory=dict)

    def add(self, row: TextRow) -> None:
        self._rows.append(row)
        if row.ends_request:
            self.complete.set()

    def fail(self, failure: Failure) -> None:
        """End with an error behind the rows that are there, unless the last row is among them."""
        if self._failure is None and not self.complete.is_set():
            self._failure = failure
            self.complete.set()

    @property
    def waits(self) -> bool:
        """Whether there are rows to be sent: none to a client that has gone."""
        return bool(self._rows) and (self._failure is None or self._failure.outcome != CANCELLED.outcome)

    def take_failure(self) -> Failure | None:
        """Why the answer ends, once all rows were taken that its client gets."""
        failure = self._failure  # first: rows may come, and the failure behind them, once none was seen to wait
        return None if self.waits else failure

    def pieces(self) -> Iterator[Piece]:
        """What can be sent now. Raises RequestError where tokens cannot be shown as text."""
        while self.waits:
            row = self._rows.popleft()
            text = self._text(row)
            while self.stream_interval != 1 and not row.arrays and not row.flags and self._rows and self._follows(row):
                row = self._rows.popleft()
                text += self._text(row)
            if self.accumulates:
                text = self._texts[row.sequence] = self._texts.get(row.sequence, b"") + text
            yield Piece(text, row.arrays, row.ends_request)

    def _follows(self, row: TextRow) -> bool:
        following = self._rows[0]
        return following.sequence == row.sequence and not following.arrays

    def _text(self, row: TextRow) -> bytes:
        detokenizer = self._detokenizers.get(row.sequence)
        if detokenizer is None:
            detokenizer = self._detokenizers[row.sequence] = Detokenizer(self.tokenizer, row.context)
        text = "".join(map(detokenizer.push, row.tokens))
        if row.flags & SEQUENCE_END:
            text += detokenizer.flush()
        return text.encode()
