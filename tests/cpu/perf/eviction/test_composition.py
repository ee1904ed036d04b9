"""Rows of the table of parts alone and together."""

from perf.eviction.composition import EXPERIMENT, ROWS, Parts


def test_each_part_stands_alone_and_all_together() -> None:
    assert [parts.label for parts in ROWS] == [
        "none",
        "SwiftKV, 2-way AcrossKV",
        "fp8 cache",
        "eviction",
        "SwiftKV, 2-way AcrossKV + fp8 cache + eviction",
    ]
    assert [parts.kv_dtype for parts in ROWS] == ["bfloat16", "bfloat16", "fp8", "bfloat16", "fp8"]


def test_the_table_has_a_difference_for_all_but_the_first() -> None:
    accuracy = {"num_prompts": 10, "accuracy": 0.5, "low": 0.25, "high": 0.75}
    paired = {"difference": -0.1, "low": -0.3, "high": 0.05, "gained": 1, "lost": 2, "p_value": 1.0}
    row = {
        "bytes_per_token": 4096,
        "sequence_bytes": 3 << 20,
        "planned": 2,
        "sequences": 3,
        "prefill_s": 1.0,
        "decode_tok_s": 50.0,
        "output_tok_s": 40.0,
        "accuracy": accuracy,
        "versus_none": paired,
    }
    report = {
        "command": "a command",
        "machine": "a machine",
        "rule": "snapkv:budget=512",
        "load": {"requests": 24, "input_tokens": 2048, "output_tokens": 128, "pool_mib": 96},
        "rows": {Parts().label: row, Parts(evicts=True).label: row},
    }
    lines = [line for line in EXPERIMENT.show(report).splitlines() if line.startswith("| ")][1:]
    assert lines == [
        "| none | 4096 | 3.00 | 3 (planned 2) | 1.0 | 50 | 40 | 50.0 (25.0 to 75.0) |  |",
        "| eviction | 4096 | 3.00 | 3 (planned 2) | 1.0 | 50 | 40 | 50.0 (25.0 to 75.0) | "
        "-10.0 (-30.0 to +5.0), +1 −2, p 1 |",
    ]
