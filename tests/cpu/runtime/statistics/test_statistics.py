"""What an engine reports of what it served: histograms, gauges of the step, sequences by finish reason."""

import itertools
import json
import random

import pytest

from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.statistics.histogram import Histogram, decades
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_histogram_counts_what_a_linear_search_counts():
    rng, histogram = random.Random(0), Histogram(decades(-2, 0))
    values = [rng.choice([*histogram.bounds, rng.uniform(0, 8), 10 ** rng.uniform(-4, 2)]) for _ in range(500)]
    for value in values:
        histogram.observe(value)
    assert histogram.bounds == (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    edges = [float("-inf"), *histogram.bounds, float("inf")]
    expected = [sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)]
    assert histogram.counts == expected and sum(expected) == histogram.count == 500
    assert histogram.sum == pytest.approx(sum(values))
    twice = Histogram((1.0,))
    twice.observe(3.0, 2)
    assert twice.to_json() == {"bounds": [1.0], "counts": [0, 2], "sum": 6.0, "count": 2}


def make_engine(**options):
    return LLMEngine(session=FakeSession(), num_pages=60, **options)


def test_what_was_served_is_counted_once():
    engine = make_engine(max_num_tokens=8)
    greedy = {"temperature": 0.0, "ignore_eos": True}
    engine.add_request("a", [5] * 9, SamplingParams(max_tokens=4, **greedy))
    engine.add_request("b", [6] * 3, SamplingParams(max_tokens=5, n=2, seed=1, ignore_eos=True))
    engine.add_request("given up", [7] * 30, SamplingParams(max_tokens=50, **greedy))
    engine.add_request("late", [8], SamplingParams(max_tokens=50, deadline_s=1e-9, **greedy))
    for _ in range(4):
        engine.step()
    engine.abort("given up")
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    json.dumps(stats, allow_nan=False)
    assert stats["num_finished"] == {"stop": 0, "length": 3, "abort": 2, "error": 0}
    histograms = stats["histograms"]
    counts = {name: histogram["count"] for name, histogram in histograms.items()}
    assert counts["e2e_s"] == counts["prompt_tokens"] == 4 and counts["generated_tokens"] == 5
    assert counts["queue_s"] in (2, 3) and counts["ttft_s"] in (2, 3), "the one given up may have begun"
    assert histograms["prompt_tokens"]["sum"] == 9 + 3 + 30 + 1
    assert histograms["generated_tokens"]["sum"] == stats["num_generated_tokens"]
    started = sum(1 for entry in ("a", "b", "b")) + (counts["ttft_s"] == 3)
    assert counts["inter_token_s"] == stats["num_generated_tokens"] - started
    assert all(sum(entry["counts"]) == entry["count"] for entry in histograms.values())
    assert all(len(entry["counts"]) == len(entry["bounds"]) + 1 for entry in histograms.values())


def test_gauges_tell_prompts_from_generation():
    engine = make_engine(max_num_tokens=6)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add_request("short", [5], params)
    engine.step()
    assert engine.stats()["num_context_tokens"] == 1
    engine.add_request("long", [6] * 14, params)
    seen = []
    for _ in range(4):
        engine.step()
        stats = engine.stats()
        seen.append((stats["num_context_tokens"], stats["num_prefilling"], stats["num_decoding"]))
    assert seen == [(5, 1, 1), (5, 1, 1), (4, 0, 2), (0, 0, 2)]
