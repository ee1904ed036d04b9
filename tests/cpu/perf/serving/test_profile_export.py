"""Latencies and rates from a profile export made by hand, with answers worked out by hand."""

import pytest

from kvforge.bench.traces import Goals, RequestTrace, percentiles
from kvforge.common.errors import KvforgeError
from perf.harness.tables import columns_table
from perf.serving.load.profile_export import read_traces, summarise
from perf.serving.load.sweep import COLUMNS, plot

MS = 1_000_000  # ns


def request(sent_ms: int, arrivals_ms: list[int], tokens: list[int]) -> dict:
    return {
        "timestamp": sent_ms * MS,
        "response_timestamps": [ms * MS for ms in arrivals_ms],
        "response_outputs": [{"text_output": "x", "num_output_tokens": n} for n in tokens],
    }


EXPERIMENT = {
    "experiment": {"mode": "concurrency", "value": 2},
    "requests": [
        request(0, [100, 110, 130, 160], [1, 2, 3, 6]),  # the last response carries three tokens
        request(20, [320, 330, 380], [2, 3, 6]),  # the first one carries two
        request(40, [], []),  # never answered
        request(50, [60, 70], [1, 2]),  # ended early
    ],
}


def test_tokens_per_response_are_the_differences_of_the_running_count() -> None:
    first, second, early = read_traces(EXPERIMENT)
    assert first.ttft == pytest.approx(0.100) and first.end_to_end == pytest.approx(0.160)
    assert first.inter_token == pytest.approx([0.010, 0.020, 0.010, 0.010, 0.010])
    assert first.tpot == pytest.approx(0.060 / 5)
    assert second.inter_token == pytest.approx([0.010, 0.050 / 3, 0.050 / 3, 0.050 / 3])
    assert second.tpot == pytest.approx(0.060 / 4)
    assert early.tokens == (1, 2)


def test_summary_of_a_level() -> None:
    numbers = summarise(
        read_traces(EXPERIMENT), num_sent=4, input_tokens=10, output_tokens=6, goals=Goals(ttft=0.2, tpot=0.02)
    )
    assert (numbers["num_requests"], numbers["num_incomplete"]) == (4, 2)
    assert numbers["seconds"] == pytest.approx(0.380)  # the first was sent at 0, the second ended at 380 ms
    assert numbers["ttft_s"] == pytest.approx({"p50": 0.2, "p90": 0.28, "p99": 0.298, "mean": 0.2})
    assert numbers["end_to_end_s"]["p50"] == pytest.approx(0.26)
    assert numbers["tpot_s"]["p50"] == pytest.approx(0.0135)
    assert numbers["output_tok_s"] == pytest.approx(12 / 0.38)
    assert numbers["combined_tok_s"] == pytest.approx(32 / 0.38)
    assert numbers["requests_per_s"] == pytest.approx(2 / 0.38)
    assert numbers["tokens_per_response"] == pytest.approx(12 / 7)
    assert numbers["goodput_requests_per_s"] == pytest.approx(1 / 0.38)  # only the first is in time
    assert numbers["good_fraction"] == pytest.approx(0.25)


def test_goals_bound_both_latencies_and_none_bounds_nothing() -> None:
    trace = RequestTrace(0.0, (0.1, 0.3), (1, 3))  # TTFT 100 ms, TPOT 100 ms
    assert Goals().are_met(trace) and Goals(0.1, 0.11).are_met(trace)
    assert not Goals(ttft=0.09).are_met(trace) and not Goals(tpot=0.09).are_met(trace)
    assert Goals(tpot=0.0).are_met(RequestTrace(0.0, (0.1,), (3,)))  # one response: no time per token to judge


def test_a_level_without_a_whole_answer_has_counts_only() -> None:
    assert summarise([], 3, 1, 1, Goals()) == {"num_requests": 3, "num_incomplete": 3}


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == {}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"text_output": "x"}, {"text_output": "y"}], "return_num_output_tokens"),
        ([{"num_output_tokens": 1}], "return_num_output_tokens"),
        ([{"num_output_tokens": 2}, {"num_output_tokens": 1}], "goes back"),
    ],
)
def test_exports_without_usable_counts_are_refused(outputs: list[dict], message: str) -> None:
    broken = {"timestamp": 0, "response_timestamps": [1, 2], "response_outputs": outputs}
    with pytest.raises(KvforgeError, match=message):
        read_traces({"requests": [broken]})


def test_table_and_figure_of_a_sweep(tmp_path) -> None:
    numbers = summarise(read_traces(EXPERIMENT), 4, 10, 6, Goals())
    rows = [
        {"engine": "a", "mode": "concurrency", "level": 2, **numbers},
        {"engine": "a", "mode": "request rate", "level": 0.5, "num_requests": 3, "num_incomplete": 3},
    ]
    header, rule, first, empty = columns_table(COLUMNS, rows).splitlines()
    columns = [line.count("|") for line in (header, rule, first, empty)]
    assert len(set(columns)) == 1
    assert "| a | concurrency 2 | 200.0 | 280.0 | 298.0 |" in first and empty.endswith("| 3 of 3 |")
    pytest.importorskip("matplotlib")
    plot(rows, tmp_path / "sweep.svg")
    assert (tmp_path / "sweep.svg").stat().st_size > 1000
