"""The engine's numbers as a line of JSON, in the words of TensorRT-LLM's backend."""

import json
import time

from kvforge.serving.stub.metric_tables import ABSENT, FAMILIES, Stats

# family -> {label value: its name in the line}
NAMES: dict[str, dict[str, str]] = {
    "nv_trt_llm_request_metrics": {
        "waiting": "Waiting Requests",
        "context": "Context Requests",
        "scheduled": "Scheduled Requests",
        "max": "Max Request Count",
        "active": "Active Request Count",
    },
    "nv_trt_llm_kv_cache_block_metrics": {
        "fraction": "Fraction used KV cache blocks",
        "tokens_per": "Tokens per KV cache block",
        "used": "Used KV cache blocks",
        "free": "Free KV cache blocks",
        "max": "Max KV cache blocks",
        "reused": "Reused KV cache blocks",
    },
    "nv_trt_llm_runtime_memory_metrics": {
        "pinned": "Runtime Pinned Memory Usage",
        "gpu": "Runtime GPU Memory Usage",
        "cpu": "Runtime CPU Memory Usage",
    },
    "nv_trt_llm_inflight_batcher_metrics": {
        "micro_batch_id": "MicroBatch ID",
        "generation_requests": "Generation Requests",
        "total_context_tokens": "Total Context Tokens",
        "paused_requests": "Paused Requests",
    },
    "nv_trt_llm_general_metrics": {"iteration_counter": "Iteration Counter", "timestamp": "Timestamp"},
    "nv_trt_llm_disaggregated_serving_metrics": {
        "kv_cache_transfer_ms": "KV cache transfer time",
        "request_count": "Request count",
    },
}


def stats_line(stats: Stats) -> str:
    """All numbers of TensorRT-LLM's gauges and counters; the time is UTC."""
    line: dict[str, float | str] = {}
    for family, names in NAMES.items():
        if family in ABSENT:
            line |= dict.fromkeys(names.values(), 0)
        else:
            readers = FAMILIES[family][1]
            line |= {name: readers[value](stats) for value, name in names.items()}
    micros = int(line["Timestamp"])
    seconds = time.strftime("%m-%d-%Y %H:%M:%S", time.gmtime(micros // 10**6))
    return json.dumps(line | {"Timestamp": f"{seconds}.{micros % 10**6:06d}"})
