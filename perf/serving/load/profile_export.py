"""Latencies and throughput from a profile export of perf_analyzer. Pure functions: plain data in, numbers out.

Tokens that are ready together come in one response, so responses are not tokens. Every response of `ensemble` and
`tensorrt_llm` says how many tokens its sequence has so far (`num_output_tokens`, asked for by
`return_num_output_tokens`), which tells the tokens of each response.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvforge.bench.traces import Goals, RequestTrace, percentiles
from kvforge.common.errors import KvforgeError


def read_traces(experiment: Mapping[str, Any]) -> list[RequestTrace]:
    """The answered requests of one entry of the export's ``experiments``; those without a response are left out.

    Raises KvforgeError when a response does not say how many tokens there are.
    """
    traces = []
    for request in experiment["requests"]:
        arrivals = [stamp / 1e9 for stamp in request["response_timestamps"]]
        if not arrivals:
            continue
        outputs = request.get("response_outputs", [])
        if len(outputs) != len(arrivals) or any("num_output_tokens" not in output for output in outputs):
            raise KvforgeError("the export has no num_output_tokens: send return_num_output_tokens with every request.")
        tokens = tuple(int(output["num_output_tokens"]) for output in outputs)
        if list(tokens) != sorted(tokens) or tokens[0] < 0:
            raise KvforgeError(f"num_output_tokens goes back in a response: {tokens}.")
        traces.append(RequestTrace(request["timestamp"] / 1e9, tuple(arrivals), tokens))
    return traces


def summarise(
    traces: Sequence[RequestTrace], num_sent: int, input_tokens: int, output_tokens: int, goals: Goals
) -> dict[str, Any]:
    """Numbers of one load level. ``input_tokens`` and ``output_tokens`` are what each request has and must get; a
    request that got fewer, or no answer, is incomplete, and counts for no latency.

    Latencies are in seconds; rates are over the time from the first request sent to the last response.
    """
    whole = [trace for trace in traces if trace.tokens[-1] == output_tokens]
    if not whole:
        return {"num_requests": num_sent, "num_incomplete": num_sent}
    seconds = max(trace.arrivals[-1] for trace in whole) - min(trace.sent for trace in whole)
    good = sum(goals.are_met(trace) for trace in whole)
    num_responses = sum(len(trace.arrivals) for trace in whole)
    return {
        "num_requests": num_sent,
        "num_incomplete": num_sent - len(whole),
        "seconds": seconds,
        "ttft_s": percentiles([trace.ttft for trace in whole]),
        "inter_token_s": percentiles([gap for trace in whole for gap in trace.inter_token]),
        "tpot_s": percentiles([trace.tpot for trace in whole if trace.tpot is not None]),
        "end_to_end_s": percentiles([trace.end_to_end for trace in whole]),
        "requests_per_s": len(whole) / seconds,
        "output_tok_s": len(whole) * output_tokens / seconds,
        "combined_tok_s": len(whole) * (input_tokens + output_tokens) / seconds,
        "tokens_per_response": len(whole) * output_tokens / num_responses,
        "goodput_requests_per_s": good / seconds,
        "good_fraction": good / num_sent,
    }
