"""What Triton's metrics port is told: only changes, counters that survive a restart of the engine, histograms."""

import json
import time
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.kv_policies import Full, parse, policies
from kvforge.runtime.statistics.counters import EngineStatistics
from kvforge.serving.stub.metric_tables import ABSENT, FAMILIES, HISTOGRAMS
from kvforge.serving.stub.metrics import EngineMetrics, Metric
from kvforge.serving.stub.stats_log import NAMES, stats_line
from tests.support.serving.fake_engine import FakeEngine

KINDS = ("input", "output")


class FakeMetric:
    def __init__(self, name: str, labels: dict[str, str], calls: list) -> None:
        self.key, self.value, self._calls = (name, *(labels[k] for k in sorted(labels))), 0.0, calls
        self.observed: list[float] = []

    def set(self, value: float) -> None:
        self.value = value
        self._calls.append(self.key)

    def increment(self, value: float) -> None:
        assert value > 0
        self.value += value
        self._calls.append(self.key)

    def observe(self, value: float) -> None:
        self.observed.append(value)


class FakeTriton:
    """triton_python_backend_utils, as far as metrics go."""

    def __init__(self) -> None:
        self.metrics: dict[tuple, FakeMetric] = {}
        self.calls: list[tuple] = []
        triton = self

        class MetricFamily:
            COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

            def __init__(self, name: str, description: str, kind: str) -> None:
                self._name, self._kind = name, kind

            def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:
                assert (self._kind == self.HISTOGRAM) == (buckets is not None)
                made = FakeMetric(self._name, labels, triton.calls)
                triton.metrics[made.key] = made
                return made

        self.MetricFamily = MetricFamily
        self.logged: list[str] = []
        self.Logger = SimpleNamespace(log_verbose=self.logged.append)

    def value(self, name: str, *labels: str) -> float:
        return self.metrics[(name, *labels)].value


def stats(**changes: Any) -> dict[str, Any]:
    histograms = EngineStatistics()
    for seconds in (0.0015, 0.004, 0.004, 1e9):
        histograms.ttft_s.observe(seconds)
    return {**FakeEngine(300, 0.0).stats(), "histograms": histograms.histograms(), **changes}


def wait(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def triton() -> FakeTriton:
    return FakeTriton()


def test_a_counter_follows_a_total_that_begins_anew() -> None:
    shown = SimpleNamespace(value=0.0)
    shown.increment = lambda by: setattr(shown, "value", shown.value + by)
    counter = Metric(shown, is_counter=True)
    for total in (0, 5, 5, 9, 2, 3):
        counter.show(total)
    assert shown.value == 12


def test_families_histograms_and_outcomes(triton: FakeTriton) -> None:
    metrics = EngineMetrics(triton, "tensorrt_llm", "1", Full())
    metrics.update(stats(num_waiting=3, num_prefilling=2))
    metrics.count("completed")
    metrics.count("completed")
    metrics.count("refused")
    metrics.answered([7], [3, 4])
    metrics.set_open(4, "ready")
    metrics.engine_ended()
    m = ("tensorrt_llm", "1")
    requests = "kvforge_requests_total"
    wait(lambda: triton.value(requests, m[0], "completed", m[1]) == 2)
    assert triton.value(requests, m[0], "refused", m[1]) == 1
    lengths = [triton.metrics[f"nv_llm_{kind}_token_len", m[0], f"total_{kind}_tokens", m[1]] for kind in KINDS]
    wait(lambda: [length.observed for length in lengths] == [[7.0], [3.0, 4.0]])
    assert triton.value("nv_trt_llm_request_metrics", m[0], "waiting", m[1]) == 3
    assert triton.value("nv_trt_llm_request_metrics", m[0], "context", m[1]) == 2
    assert triton.value("kvforge_engine_ready", *m) == 1 and triton.value("kvforge_engine_ends_total", *m) == 1
    assert triton.value("kvforge_open_requests", *m) == 4
    assert triton.value("kvforge_draft_acceptance", *m) == 0.5
    assert triton.value("kvforge_mean_accepted_length", *m) == 1.5
    for family, host in (("kvforge_kv_cache_bytes", 700), ("kvforge_kv_cache_used_bytes", 70)):
        assert triton.value(family, "host", *m) == host and (family, "device", *m) in triton.metrics
    assert triton.value("kvforge_draft_model_kv_cache_bytes", *m) == 0
    assert triton.value("kvforge_draft_model_pages", m[0], "used", m[1]) == 0
    metrics.update(
        stats(
            draft_model_num_used_pages=2, draft_model_kv_cache_bytes=4096, draft_model_num_steps=7, suffix_num_tokens=9
        )
    )
    wait(lambda: triton.value("kvforge_draft_model_steps_total", *m) == 7)
    assert triton.value("kvforge_draft_model_kv_cache_bytes", *m) == 4096
    assert triton.value("kvforge_suffix_tokens", *m) == 9
    assert triton.value("kvforge_draft_model_pages", m[0], "used", m[1]) == 2
    family = "kvforge_time_to_first_token_seconds"
    wait(lambda: (f"{family}_bucket", "+Inf", *m) in triton.metrics and triton.value(f"{family}_count", *m) == 4)
    buckets = {le: triton.value(f"{family}_bucket", le, *m) for le in ("0.001", "0.002", "0.005", "500", "+Inf")}
    assert buckets == {"0.001": 0, "0.002": 1, "0.005": 3, "500": 3, "+Inf": 4}
    totals = {"drafts": 2, "draft_tokens": 6, "accepted_draft_tokens": 3, "early_exits": 5, "prompt_early_exits": 2}
    assert {name: triton.value(f"kvforge_{name}_total", *m) for name in totals} == totals
    assert triton.value(f"{family}_sum", *m) == pytest.approx(1e9)
    metrics.close()


def test_only_the_engines_policy_is_counted(triton: FakeTriton) -> None:
    metrics = EngineMetrics(triton, "tensorrt_llm", "1", parse("snapkv:budget=128"))
    metrics.update(stats(num_evictions=3, num_evicted_tokens=70))
    m = ("tensorrt_llm", "1")
    wait(lambda: triton.value("kvforge_snapkv_evictions_total", *m) == 3)
    assert triton.value("kvforge_snapkv_evicted_tokens_total", *m) == 70
    words = {name.split("_")[1] for name, *_ in triton.metrics if name.startswith("kvforge_")}
    assert words & policies().keys() == {"snapkv"}
    metrics.close()


def test_what_has_not_changed_is_not_told_again(triton: FakeTriton) -> None:
    metrics = EngineMetrics(triton, "tensorrt_llm", "1", Full())
    waiting = ("nv_trt_llm_request_metrics", "tensorrt_llm", "waiting", "1")
    for number in (3, 3, 3, 4):
        metrics.update(stats(num_waiting=number))
        wait(lambda number=number: triton.metrics[waiting].value == number)
    metrics.close()
    assert triton.calls.count(waiting) == 2


def test_the_log_has_what_the_metrics_of_tensorrt_llm_have(triton: FakeTriton) -> None:
    families = {name: set(values) for name, (_, values) in {**FAMILIES, **ABSENT}.items() if name.startswith("nv_trt")}
    assert {name: set(values) for name, values in NAMES.items()} == families
    now = int(time.time() * 1e6)
    line = json.loads(stats_line(stats(num_waiting=3, num_running=2, timestamp_us=now)))
    assert len(line) == sum(map(len, families.values()))
    assert line["Active Request Count"] == 5 and line["Request count"] == 0
    told = datetime.strptime(line["Timestamp"], "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=timezone.utc)
    assert round(told.timestamp() * 1e6) == now

    metrics = EngineMetrics(triton, "tensorrt_llm", "1", Full())
    for number in (3, 4):
        metrics.update(stats(num_waiting=number))
        wait(lambda number=number: triton.logged and json.loads(triton.logged[-1])["Waiting Requests"] == number)
    metrics.close()
    assert len(triton.logged) == 2


def test_every_histogram_of_the_engine_has_a_family() -> None:
    assert set(HISTOGRAMS) == set(EngineStatistics().histograms())
