"""What an engine has served since it was loaded: latencies, lengths and how sequences ended."""

import time
from collections import Counter
from typing import Any, get_args

from kvforge.runtime.histogram import Histogram, decades
from kvforge.runtime.outputs import SequenceOutput
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

    def generated(self, news: dict[Sequence, SequenceOutput]) -> int:
        """Sequences have new tokens: note the time in their metrics. Returns the number of tokens."""
        wall, now = time.time_ns(), time.monotonic_ns()
        gaps: Counter[tuple[int, int]] = Counter()
        num_tokens = 0
        for sequence, output in news.items():
            count, metrics = len(output.new_token_ids), sequence.metrics
            if count == 0:
                continue
            num_tokens += count
            metrics.last_token_time_ns, metrics.last_token_monotonic_ns = wall, now
            if metrics.first_token_time_ns == 0:
                metrics.first_token_time_ns, metrics.first_token_monotonic_ns = wall, now
                self.ttft_s.observe((now - metrics.arrival_monotonic_ns) / 1e9)
            if sequence.last_token_ns:
                gaps[sequence.last_token_ns, count] += 1
            elif count > 1:
                gaps[now, count - 1] += 1
            sequence.last_token_ns = now
        for (last, count), times in gaps.items():
            self.inter_token_s.observe((now - last) / count / 1e9, count * times)
        return num_tokens

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
