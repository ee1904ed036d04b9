"""The table of prompts longer than their cache."""

from perf.eviction.long_prompt import EXPERIMENT


def test_times_are_compared_with_the_full_cache() -> None:
    rows = [
        {"policy": policy, "pool_tokens": tokens, "ttft_s": seconds}
        for policy, tokens, seconds in (("full", 16064, 12.0), ("h2o:budget=1024,block=256", 1024, 8.0))
    ]
    text = EXPERIMENT.show({"command": "c", "machine": "m", "turns": 2, "tokens": 16000, "rows": rows})
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `full` | 16064 | 12.00 | 1.00 |",
        "| `h2o:budget=1024,block=256` | 1024 | 8.00 | 1.50 |",
    ]
