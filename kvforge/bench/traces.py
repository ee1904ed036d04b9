"""What a user sees of one answer: times of its tokens. Pure functions: plain data in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class RequestTrace:
    """One answered request: seconds on one clock, and the tokens that had come by each response (cumulative)."""

    sent: float
    arrivals: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def ttft(self) -> float:
        """Time to the first response, which carries the first token."""
        return self.arrivals[0] - self.sent

    @property
    def end_to_end(self) -> float:
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first response; None where nothing came after it."""
        later = self.tokens[-1] - self.tokens[0]
        return (self.arrivals[-1] - self.arrivals[0]) / later if later else None

    @property
    def inter_token(self) -> list[float]:
        """One latency per token after the first response: k tokens that came together share their gap evenly."""
        gaps = []
        for i in range(1, len(self.arrivals)):
            new = self.tokens[i] - self.tokens[i - 1]
            gaps += [(self.arrivals[i] - self.arrivals[i - 1]) / new] * new if new else []
        return gaps


@dataclass(frozen=True)
class Goals:
    """What a request must keep to count as good, in seconds; None asks for nothing."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def are_met(self, trace: RequestTrace) -> bool:
        pairs = ((self.ttft, trace.ttft), (self.tpot, trace.tpot), (self.e2el, trace.end_to_end))
        return all(goal is None or found is None or found <= goal for goal, found in pairs)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """{"p50": ..., "p90": ..., "p99": ..., "mean": ...} by linear interpolation; nothing for no values."""
    if not len(values):
        return {}
    found = {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}
    return {**found, "mean": float(np.mean(values))}
