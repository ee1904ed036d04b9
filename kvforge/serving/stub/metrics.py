"""The engine's numbers on Triton's metrics port (metric_tables.py says which)."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvforge.kv_policies import KVPolicy
from kvforge.serving.contract.failures import OUTCOMES
from kvforge.serving.stub.metric_tables import (
    ABSENT,
    COUNTERS,
    FAMILIES,
    GAUGES,
    HISTOGRAMS,
    INPUT_LENGTHS,
    LENGTH_BUCKETS,
    LENGTH_LABEL,
    LENGTHS,
    OUTPUT_LENGTHS,
    Reader,
    Stats,
    policy_counters,
)
from kvforge.serving.stub.stats_log import stats_line

COUNTERS_PERIOD_S = 1.0
"""Counters and histograms are many and read seldom; gauges follow the engine at once."""
READY_FAMILY, OPEN_FAMILY = "kvforge_engine_ready", "kvforge_open_requests"
ENDS_FAMILY = "kvforge_engine_ends_total"
OUTCOME_FAMILY = "kvforge_requests_total"


class Metric:
    """A gauge or counter of Triton that is told only of changes: telling it is an exchange with tritonserver.

    A counter follows a total; a total that shrank began anew, because the engine was started again.
    """

    def __init__(self, metric: Any, is_counter: bool) -> None:
        self._metric, self._is_counter = metric, is_counter
        self._shown = 0.0 if is_counter else None

    def show(self, value: float) -> None:
        value = float(value)
        if value == self._shown:
            return
        if self._is_counter:
            shown = self._shown or 0.0
            self._metric.increment(value - shown if value > shown else value)
        else:
            self._metric.set(value)
        self._shown = value


class EngineMetrics:
    """Fed by `update`, `count` and `set_open`, which never block; a thread of its own talks to tritonserver.

    Of KV policies only the engine's is counted. Numbers that have changed also go to tritonserver's log, which drops
    them unless it is verbose.
    """

    def __init__(self, pb: Any, model: str, version: str, policy: KVPolicy) -> None:
        self._pb = pb
        self._labels = {"model": model, "version": version}
        self._families: dict[str, Any] = {}
        self._gauges: list[tuple[Metric, Reader]] = []
        for name, (label, values) in FAMILIES.items():
            for value, read in values.items():
                self._gauges.append((self._metric(name, name.replace("_", " "), False, **{label: value}), read))
        self._gauges += [(self._metric(name, text, False), read) for name, (read, text) in GAUGES.items()]
        counters = COUNTERS | policy_counters(policy)
        self._counters = [(self._metric(name, text, True), read) for name, (read, text) in counters.items()]
        self._outcomes = {
            outcome: self._metric(OUTCOME_FAMILY, "Requests to tensorrt_llm that have ended", True, outcome=outcome)
            for outcome in OUTCOMES
        }
        self._absent = [
            self._metric(name, name.replace("_", " "), True, **{label: value})
            for name, (label, values) in ABSENT.items()
            for value in values
        ]
        self._lengths = {
            name: self._family(name, text, pb.MetricFamily.HISTOGRAM).Metric(
                labels={**self._labels, LENGTH_LABEL: value}, buckets=LENGTH_BUCKETS
            )
            for name, (value, text) in LENGTHS.items()
        }
        self._observed: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._ready = self._metric(READY_FAMILY, "1 while the engine process serves", False)
        self._open = self._metric(OPEN_FAMILY, "Requests that were accepted and have not ended", False)
        self._ends = self._metric(ENDS_FAMILY, "Times that the engine process ended, or stalled and was ended", True)
        self._num_ends = 0
        self._buckets: dict[str, dict[str, Metric]] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._num_open, self._is_ready = 0, False
        self._latest: Stats | None = None
        self._logged: Stats | None = None
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def update(self, stats: Stats) -> None:
        """Show `stats`, which are new, soon."""
        self._latest = {**stats, "timestamp_us": int(time.time() * 1e6)}
        self._changed.set()

    def count(self, outcome: str) -> None:
        """A request has ended so."""
        with self._lock:
            self._counts[outcome] += 1

    def answered(self, input_lengths: Iterable[int], output_lengths: Iterable[int]) -> None:
        """A request has had its answer: tokens of its prompts, of its sequences."""
        for name, lengths in ((INPUT_LENGTHS, input_lengths), (OUTPUT_LENGTHS, output_lengths)):
            for length in lengths:
                self._observed.put((name, length))

    def engine_ended(self) -> None:
        """The engine process has ended, or was ended because it stood still."""
        with self._lock:
            self._num_ends += 1

    def set_open(self, num_open: int, engine_state: str) -> None:
        """How many requests are open, and the state of the engine process."""
        is_ready = engine_state == "ready"
        if (num_open, is_ready) != (self._num_open, self._is_ready):
            self._num_open, self._is_ready = num_open, is_ready
            self._changed.set()

    def close(self) -> None:
        """Join the thread and drop the metrics; a stub that keeps them crashes at exit."""
        self._closed = True
        self._changed.set()
        self._thread.join(timeout=5.0)
        self._gauges.clear()
        self._counters.clear()
        self._outcomes.clear()
        self._absent.clear()
        self._lengths.clear()
        self._buckets.clear()
        self._families.clear()
        del self._ready, self._open, self._ends

    def _metric(self, family: str, help_text: str, is_counter: bool, **labels: str) -> Metric:
        kinds = self._pb.MetricFamily
        made = self._family(family, help_text, kinds.COUNTER if is_counter else kinds.GAUGE)
        return Metric(made.Metric(labels={**labels, **self._labels}), is_counter)

    def _family(self, name: str, help_text: str, kind: Any) -> Any:
        if name not in self._families:
            self._families[name] = self._pb.MetricFamily(name=name, description=help_text, kind=kind)
        return self._families[name]

    def _run(self) -> None:
        counted = 0.0
        while True:
            self._changed.wait(timeout=COUNTERS_PERIOD_S)
            self._changed.clear()
            if self._closed:
                return
            self._ready.show(self._is_ready)
            self._open.show(self._num_open)
            stats = self._latest
            if stats is not None:
                for gauge, read in self._gauges:
                    gauge.show(read(stats))
            if time.monotonic() - counted >= COUNTERS_PERIOD_S:
                counted = time.monotonic()
                self._show_counters(stats)

    def _show_counters(self, stats: Stats | None) -> None:
        for outcome, counter in self._outcomes.items():
            counter.show(self._counts[outcome])
        self._ends.show(self._num_ends)
        for _ in range(self._observed.qsize()):
            name, length = self._observed.get()
            self._lengths[name].observe(float(length))
        if stats is None:
            return
        if stats is not self._logged:
            self._logged = stats
            self._pb.Logger.log_verbose(stats_line(stats))
        for counter, read in self._counters:
            counter.show(read(stats))
        for key, histogram in stats["histograms"].items():
            if key in HISTOGRAMS:
                self._show_histogram(*HISTOGRAMS[key], histogram)

    def _show_histogram(self, family: str, help_text: str, histogram: dict[str, Any]) -> None:
        """As Prometheus' own histograms: `_bucket` counts what is at most `le`, `_sum` and `_count` all."""
        bounds = [*(f"{bound:g}" for bound in histogram["bounds"]), "+Inf"]
        if family not in self._buckets:
            buckets = {le: self._metric(f"{family}_bucket", f"{help_text}, at most le", True, le=le) for le in bounds}
            buckets["sum"] = self._metric(f"{family}_sum", f"{help_text}, sum", True)
            buckets["count"] = self._metric(f"{family}_count", f"{help_text}, number", True)
            self._buckets[family] = buckets
        metrics = self._buckets[family]
        metrics["sum"].show(histogram["sum"])
        metrics["count"].show(histogram["count"])
        total = 0
        for le, count in zip(bounds, histogram["counts"], strict=True):
            total += count
            metrics[le].show(total)
