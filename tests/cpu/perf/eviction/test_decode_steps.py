"""Rows of the table of decode steps, and the bytes that their floors are made of."""

from kvforge.kv_policies import parse
from perf.eviction.decode_steps import EXPERIMENT, POLICIES, step_bytes
from tests.support.models.small_models import small_session


def test_every_policy_reads_no_more_than_the_full_cache() -> None:
    full, *others = (
        step_bytes(
            small_session({"kv_policy": policy.format(64), "page_size": 16}, cut=3, num_layers=3).manifest, 4096, 8
        )
        for policy in POLICIES
    )
    assert len(others) == 3 and all(0 < read < full / 4 for read in others)
    assert parse(POLICIES[1].format(1024)).parameters["budget"] == 1024


def test_the_table_compares_with_the_full_cache_of_the_same_cell() -> None:
    rows = [
        {"context": context, "batch": 1, "policy": policy, "prefill_s": 2.0, "step_s": step, "floor_s": 0.004}
        for context, policy, step in ((2048, "full", 0.008), (2048, "quest", 0.005), (8192, "full", 0.02))
    ]
    lines = [
        line
        for line in EXPERIMENT.show({"command": "c", "machine": "m", "turns": 3, "rows": rows}).splitlines()
        if line.startswith("| ")
    ]
    assert lines[1:] == [
        "| 2048 | 1 | `full` | 2.00 | 8.00 | 4.00 | 50% | 1.00 |",
        "| 2048 | 1 | `quest` | 2.00 | 5.00 | 4.00 | 80% | 1.60 |",
        "| 8192 | 1 | `full` | 2.00 | 20.00 | 4.00 | 20% | 1.00 |",
    ]
