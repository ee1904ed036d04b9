"""Times of one run by phase: steps with prompt tokens (prefill) apart from steps without (decode)."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class PhaseTimes:
    """Seconds, and the decode tokens that were computed meanwhile.

    A decode token is an output token after its request's first; its context is the keys it attends, its own included.
    ``mixed_*`` count those computed in steps that also had prompt tokens, ``decode_*`` those in the other steps.
    ``ttft_s`` is the first request's.
    """

    ttft_s: float = 0.0
    total_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_steps: int = 0
    decode_steps: int = 0
    mixed_rows: int = 0
    mixed_context: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    first_tokens: list[int] = field(default_factory=list)
    """The first output token of every request, in order: the same weights mostly agree in them."""

    def __post_init__(self) -> None:
        self._start = self._before = time.perf_counter()

    def add_step(self, seconds: float, has_prompt: bool, contexts: Iterable[int]) -> None:
        """Count one step, whose decode tokens had these contexts."""
        listed = list(contexts)
        if has_prompt:
            self.prefill_s += seconds
            self.prefill_steps += 1
            self.mixed_rows += len(listed)
            self.mixed_context += sum(listed)
        else:
            self.decode_s += seconds
            self.decode_steps += 1
            self.decode_rows += len(listed)
            self.decode_context += sum(listed)

    def lap(self, has_prompt: bool, contexts: Iterable[int] = (), is_first: bool = False) -> None:
        """Count the step from the last lap, or from when this was made, to now; ``is_first``: the first request has its
        first token. The run's time is that to the last lap."""
        now = time.perf_counter()
        self.add_step(now - self._before, has_prompt, contexts)
        if is_first and not self.ttft_s:
            self.ttft_s = now - self._start
        self._before, self.total_s = now, now - self._start
