"""How much is let in: sequences beyond those that run and wait are refused, and everything while shutting down."""

import threading

from kvforge.common.refusals import QUEUE_FULL, SERVER_ENDS, Refusal
from kvforge.serving.contract.failures import UnavailableError


class Admission:
    """Counts the sequences that are open. `max_queue_size` may wait beyond the `max_num_seqs` that run.

    A request of several prompts or sequences is let in or refused as a whole; a single one is always let in, so
    that what the engine can serve at all is served.
    """

    def __init__(self, max_queue_size: int) -> None:
        self.max_queue_size = max_queue_size
        self.max_num_seqs = 1
        """What the engine runs at once; set when it has said so."""
        self.num_open = 0
        self.closed = False
        """The server is shutting down: only those get in whom a text model let in before."""
        self._lock = threading.Lock()

    def enter(self, num_sequences: int, was_let_in: bool = False) -> None:
        """Count these sequences in. Raises UnavailableError."""
        with self._lock:
            if self.closed and not was_let_in:
                raise UnavailableError(SERVER_ENDS)
            if self.num_open and self.num_open + num_sequences > self.max_num_seqs + self.max_queue_size:
                said = (
                    f"Exceeds maximum queue size, the queue is full: {self.num_open} sequences are running or waiting, "
                    f"and {self.max_num_seqs} may run and {self.max_queue_size} wait. Maximum queue size of "
                    f"{self.max_queue_size} has been reached"
                )
                raise UnavailableError(Refusal(said, "send the request again later", code=QUEUE_FULL))
            self.num_open += num_sequences

    def close(self) -> None:
        """Let nobody new in any more. Who was let in before is in `num_open` when this returns."""
        with self._lock:
            self.closed = True

    def leave(self, num_sequences: int) -> None:
        with self._lock:
            self.num_open -= num_sequences
