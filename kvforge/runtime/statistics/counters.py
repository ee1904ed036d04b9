"""What an engine has done since it was loaded: steps, tokens, latencies, lengths and how sequences ended."""

import time
from collections import Counter
from typing import Any, get_args

from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.requests.sequence import FinishReason, Request, Sequence
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.statistics.histogram import Histogram, decades

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
        self.num_iterations = self.num_failed_steps = 0
        self.num_context_tokens = 0
        """Tokens of prompts in the last step."""
        self.num_generated_tokens = self.num_draft_tokens = self.num_accepted_draft_tokens = 0
        self.num_drafts = 0
        """Drafts that were verified, of one token or several."""

    def planned(self, plan: Schedule) -> None:
        """A step begins: note which requests are in one for the first time."""
        self.num_iterations += 1
        self.num_context_tokens = 0
        first = [sequence for sequence in plan.decodes if not sequence.prompt_done]
        for sequence, count in (*((sequence, 1) for sequence in first), *plan.prefills, *plan.predictions):
            self.num_context_tokens += max(min(sequence.num_prompt_tokens - sequence.num_computed, count), 0)
            metrics = sequence.metrics
            if metrics.first_scheduled_time_ns == 0:
                metrics.first_scheduled_time_ns = time.time_ns()
                metrics.first_scheduled_monotonic_ns = time.monotonic_ns()
                self.queue_s.observe((metrics.first_scheduled_monotonic_ns - metrics.arrival_monotonic_ns) / 1e9)

    def drafted(self, drafts: dict[Sequence, tuple[int, ...]]) -> None:
        """A step has computed drafts."""
        self.num_drafts += len(drafts)
        for sequence, proposed in drafts.items():
            sequence.metrics.num_draft_tokens += len(proposed)
            self.num_draft_tokens += len(proposed)

    def accepted(self, sequences: list[Sequence]) -> None:
        """One more draft of each of these became a token."""
        for sequence in sequences:
            sequence.metrics.num_accepted_draft_tokens += 1
        self.num_accepted_draft_tokens += len(sequences)

    def generated(self, outputs: dict[Sequence, SequenceOutput]) -> None:
        """Sequences have new tokens: note the time in their metrics."""
        wall, now = time.time_ns(), time.monotonic_ns()
        single: list[int] = []
        several: list[tuple[int, int]] = []
        total = 0
        for sequence, output in outputs.items():
            count, metrics, last = len(output.new_token_ids), sequence.metrics, sequence.last_token_ns
            if count == 0:
                continue
            total += count
            if count == 1 and last:
                single.append(last)
            elif last or count > 1:
                several.append((last, count) if last else (now, count - 1))
            if last == 0 and metrics.first_token_time_ns == 0:
                metrics.first_token_time_ns, metrics.first_token_monotonic_ns = wall, now
                self.ttft_s.observe((now - metrics.arrival_monotonic_ns) / 1e9)
            metrics.last_token_time_ns = wall
            metrics.last_token_monotonic_ns = sequence.last_token_ns = now
        self.num_generated_tokens += total
        for last, times in Counter(single).items():  # few: most had their last token in the step before
            self.inter_token_s.observe((now - last) / 1e9, times)
        for last, count in several:
            self.inter_token_s.observe((now - last) / count / 1e9, count)

    def sequence_ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended."""
        self.num_finished[reason] += 1
        self.generated_tokens.observe(sequence.num_generated)

    def request_ended(self, request: Request, now_ns: int) -> None:
        """All sequences of a request have ended."""
        self.e2e_s.observe((now_ns - request.metrics.arrival_monotonic_ns) / 1e9)
        self.prompt_tokens.observe(request.sequences[0].num_prompt_tokens)

    def counters(self) -> dict[str, Any]:
        """Return every number by name, and ``num_finished``, which counts sequences by finish reason."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {**numbers, "num_finished": dict(self.num_finished)}

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Return every histogram by name, see ``Histogram.to_json``."""
        return {name: value.to_json() for name, value in vars(self).items() if isinstance(value, Histogram)}
