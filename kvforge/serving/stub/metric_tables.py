"""Which numbers go to Triton's metrics port, under which names: TensorRT-LLM's families, and kvforge's own.

Times are in seconds, but TensorRT-LLM's `timestamp` in microseconds since 1970, as there: when the numbers changed.
"""

from collections.abc import Callable
from typing import Any

from kvforge.kv_policies import KVPolicy

Stats = dict[str, Any]
Reader = Callable[[Stats], float]


# TensorRT-LLM's gauges, then kvforge's with a label: family -> (label, {label value: number from LLMEngine.stats()})
FAMILIES: dict[str, tuple[str, dict[str, Reader]]] = {
    "nv_trt_llm_request_metrics": (
        "request_type",
        {
            "waiting": lambda s: s["num_waiting"],
            "context": lambda s: s["num_prefilling"],
            "scheduled": lambda s: s["num_running"],
            "max": lambda s: s["max_num_seqs"],
            "active": lambda s: s["num_waiting"] + s["num_running"],
        },
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        {
            "fraction": lambda s: s["num_used_pages"] / s["num_pages"],
            "tokens_per": lambda s: s["page_size"],
            "used": lambda s: s["num_used_pages"],
            "free": lambda s: s["num_free_pages"],
            "max": lambda s: s["num_pages"],
            "reused": lambda s: s["num_reused_tokens"] // s["page_size"],
        },
    ),
    "nv_trt_llm_runtime_memory_metrics": (
        "memory_type",
        {"pinned": lambda s: 0, "gpu": lambda s: 0, "cpu": lambda s: s["kv_device_bytes"] + s["kv_host_bytes"]},
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        {
            "micro_batch_id": lambda s: 0,
            "generation_requests": lambda s: s["num_decoding"],
            "total_context_tokens": lambda s: s["num_context_tokens"],
            "paused_requests": lambda s: s["num_paused"],
        },
    ),
    "nv_trt_llm_general_metrics": (
        "general_type",
        {"iteration_counter": lambda s: s["num_iterations"], "timestamp": lambda s: s["timestamp_us"]},
    ),
    "kvforge_kv_cache_bytes": (
        "memory",
        {"device": lambda s: s["kv_device_bytes"], "host": lambda s: s["kv_host_bytes"]},
    ),
    "kvforge_kv_cache_used_bytes": (
        "memory",
        {"device": lambda s: s["kv_device_used_bytes"], "host": lambda s: s["kv_host_used_bytes"]},
    ),
    "kvforge_draft_model_pages": (  # a server without a draft model has none
        "pages",
        {
            "used": lambda s: s.get("draft_model_num_used_pages", 0),
            "max": lambda s: s.get("draft_model_num_pages", 0),
        },
    ),
    "kvforge_states": (  # a model whose layers keep no state has none
        "states",
        {
            "used": lambda s: s.get("num_used_state_rows", 0),
            "max": lambda s: s.get("num_state_rows", 0),
            "snapshots": lambda s: s.get("num_held_snapshots", 0),
            "max_snapshots": lambda s: s.get("num_snapshots", 0),
        },
    ),
}

# TensorRT-LLM's counters that stay 0, because prefill and decode run in one engine: family -> (label, label values)
ABSENT = {
    "nv_trt_llm_disaggregated_serving_metrics": (
        "disaggregated_serving_type",
        ("kv_cache_transfer_ms", "request_count"),
    )
}

# TensorRT-LLM's histograms of answered requests: family -> (label value, help)
INPUT_LENGTHS, OUTPUT_LENGTHS = "nv_llm_input_token_len", "nv_llm_output_token_len"
LENGTHS = {
    INPUT_LENGTHS: ("total_input_tokens", "Tokens of a prompt"),
    OUTPUT_LENGTHS: ("total_output_tokens", "Tokens of an answer, without the one that ended it"),
}
LENGTH_LABEL = "response_metric_type"
LENGTH_BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]

# kvforge's gauges: family -> (number from LLMEngine.stats(), help)
GAUGES: dict[str, tuple[Reader, str]] = {
    "kvforge_draft_acceptance": (
        lambda s: s["num_accepted_draft_tokens"] / max(s["num_draft_tokens"], 1),
        "Accepted draft tokens per draft token since the engine was loaded",
    ),
    "kvforge_mean_accepted_length": (
        lambda s: s["num_accepted_draft_tokens"] / max(s["num_drafts"], 1),
        "Accepted draft tokens per draft since the engine was loaded",
    ),
    "kvforge_draft_model_kv_cache_bytes": (
        lambda s: s.get("draft_model_kv_cache_bytes", 0),
        "Bytes of the draft model's KV cache, 0 without one",
    ),
    "kvforge_suffix_tokens": (
        lambda s: s.get("suffix_num_tokens", 0),
        "Tokens of outputs that suffix decoding keeps, 0 without it",
    ),
}


def _optional(key: str) -> Reader:
    """What only some engines count; 0 where they do not, and before they say."""
    return lambda s: s.get(key, 0)


# kvforge's counters: family -> (number from LLMEngine.stats(), help)
COUNTERS: dict[str, tuple[Reader, str]] = {
    "kvforge_generated_tokens_total": (lambda s: s["num_generated_tokens"], "Generated tokens"),
    "kvforge_reused_prompt_tokens_total": (lambda s: s["num_reused_tokens"], "Prompt tokens found in the prefix cache"),
    **{
        f"kvforge_prefix_{family}_total": (_optional(key), text)
        for family, key, text in (
            ("read_tokens", "num_stored_reused_tokens", "Prompt tokens found in --prefix-dir, reused ones among them"),
            ("read_bytes", "prefix_read_bytes", "Bytes of pages read from --prefix-dir"),
            ("written_bytes", "prefix_written_bytes", "Bytes of pages written to --prefix-dir"),
            ("read_seconds", "prefix_read_s", "Seconds in which pages were read from --prefix-dir"),
            ("write_seconds", "prefix_write_s", "Seconds in which pages were written to --prefix-dir"),
        )
    },
    "kvforge_preemptions_total": (lambda s: s["num_preemptions"], "Sequences that gave up their pages and began again"),
    "kvforge_drafts_total": (lambda s: s["num_drafts"], "Drafts that were verified, of one token or several"),
    "kvforge_draft_tokens_total": (lambda s: s["num_draft_tokens"], "Draft tokens that were verified"),
    "kvforge_accepted_draft_tokens_total": (
        lambda s: s["num_accepted_draft_tokens"],
        "Draft tokens that became tokens of a text",
    ),
    "kvforge_draft_model_steps_total": (lambda s: s.get("draft_model_num_steps", 0), "Steps of the draft model"),
    "kvforge_early_exits_total": (lambda s: s["num_early_exits"], "Tokens that skipped the upper layers"),
    "kvforge_prompt_early_exits_total": (
        lambda s: s["num_prompt_early_exits"],
        "Prompts whose last token skipped the upper layers",
    ),
    "kvforge_failed_steps_total": (lambda s: s["num_failed_steps"], "Steps that ended in an error"),
}


def policy_counters(policy: KVPolicy) -> dict[str, tuple[Reader, str]]:
    """What a KV policy counts, as COUNTERS; 0 before the engine says."""
    return {
        f"kvforge_{policy.name}_{name}_total": (_optional(f"num_{name}"), text)
        for name, text in policy.keeping.counters.items()
    }


# kvforge's histograms: key in stats()["histograms"] -> (family, help)
HISTOGRAMS: dict[str, tuple[str, str]] = {
    "ttft_s": ("kvforge_time_to_first_token_seconds", "From a request's arrival to its first token"),
    "inter_token_s": ("kvforge_inter_token_seconds", "Between two tokens of a sequence"),
    "e2e_s": ("kvforge_request_seconds", "From a request's arrival to its end"),
    "queue_s": ("kvforge_queue_seconds", "From a request's arrival to its first step"),
    "prompt_tokens": ("kvforge_prompt_tokens", "Tokens of a request's prompt"),
    "generated_tokens": ("kvforge_generated_tokens", "Generated tokens of a sequence"),
}
