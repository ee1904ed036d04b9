"""What an engine has served since it was loaded: latencies, lengths and how sequences ended."""

from typing import Any, get_args

from kvforge.runtime.histogram import Histogram, decades
from kvforge.runtime.sequence import FinishReason, Request, RequestMetrics, Sequence

_SECONDS = decades(-3, 2)
_STEPS = decades(-4, 1)
_TOKENS = tuple(float(1 << power) for power in range(21))


class EngineStatistics:
    """Histograms of requests (``ttft_s``, ``queue_s``, ``e2e_s`` in seconds since the arrival, ``prompt_tokens``) and
    of sequences (``inter_token_s``, ``generated_tokens``), and how many sequences ended for which reason.

    Times are monotonic. Tokens that one step gives a sequence share the time since its last ones evenly.
    """

    def __init__(self) -> None:
        self.ttft_s, self.queue_s, self.e2e_s = Histogram(_SECONDS), Histogram(_SECONDS), Histogram(_SECONDS)
        self.inter_token_s = Histogram(_STEPS)
        self.prompt_tokens, self.generated_tokens = Histogram(_TOKENS), Histogram(_TOKENS)
        self.num_finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)

    def scheduled(self, metrics: RequestMetrics) -> None:
        """A request is in a step for the first time."""
        self.queue_s.observe((metrics.first_scheduled_monotonic_ns - metrics.arrival_monotonic_ns) / 1e9)

    def first_token(self, metrics: RequestMetrics) -> None:
        """A request has its first token."""
        self.ttft_s.observe((metrics.first_token_monotonic_ns - metrics.arrival_monotonic_ns) / 1e9)

    def tokens(self, now_ns: int, num_tokens: dict[tuple[int, int], int]) -> None:
        """Some sequences have more tokens: (their last token's time, new tokens) to how many sequences."""
        for (last_ns, count), times in num_tokens.items():
            self.inter_token_s.observe((now_ns - last_ns) / count / 1e9, count * times)

    def sequence_ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended."""
        self.num_finished[reason] += 1
        self.generated_tokens.observe(sequence.num_generated)

    def request_ended(self, request: Request, now_ns: int) -> None:
        """All sequences of a request have ended."""
        self.e2e_s.observe((now_ns - request.metrics.arrival_monotonic_ns) / 1e9)
        self.prompt_tokens.observe(request.sequences[0].num_prompt_tokens)

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Return every histogram by name, see ``Histogram.to_json``."""
        return {name: value.to_json() for name, value in vars(self).items() if isinstance(value, Histogram)}
