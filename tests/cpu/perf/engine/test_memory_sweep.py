"""The memory sweep's arithmetic, its check of outputs and its table."""

import pytest

from perf.engine import memory_sweep
from perf.engine.memory_sweep import ENGINES, MERGED, ROWS, Load, changed_requests, markdown, num_pages
from perf.peers.systems import CUT, NO_CUT

LOAD = Load(4, 10, 2)


def test_the_bound_has_the_pages_of_one_cache_for_all_layers():
    assert num_pages(5, 3, 1, LOAD) == 5
    assert num_pages(2, 3, 4, LOAD) == 8
    assert num_pages(5, 3, 4, LOAD) == 12  # four requests cannot use more


def line(row, pool, digests="aa", rate=100.0):
    rest = {"tokens_sha256": list(digests), "preemptions": 2} if rate else {}
    return {"row": row, "pool_mib": pool, "combined_tok_s": rate, "sequences_that_fit": 1, **rest}


def test_requests_whose_tokens_depend_on_the_pool_are_counted():
    same = [line(NO_CUT, 10), line(NO_CUT, 20), line(MERGED, 10), line(CUT, 10, "bb"), line(CUT, 5, rate=None)]
    assert changed_requests(same) == {NO_CUT: 0, CUT: 0}
    changed = [*same, line(MERGED, 20, "ab"), line(CUT, 20, "cc")]  # the bound runs on the engine without a cut
    assert changed_requests(changed) == {NO_CUT: 1, CUT: 2}
    told = {"command": "c", "machine": "m"}
    assert "Every engine gave the same tokens" in markdown(same, told, LOAD)
    assert "not the same in all columns: no cut 1 of 4, cut 8 2 of 4." in markdown(changed, told, LOAD)


def test_the_table_has_a_row_per_variant_and_says_what_does_not_fit():
    lines = [line(CUT, 10), line(NO_CUT, 20), line(NO_CUT, 10, rate=None)]
    text = markdown(lines, {"command": "c", "machine": "m"}, LOAD)
    assert "| 20 MiB | 10 MiB |" in text
    assert f"| {NO_CUT} | 100 (1; 2) | does not fit |" in text
    assert f"| {CUT} |  | 100 (1; 2) |" in text


def test_rows_run_on_engines_that_can_be_built():
    assert set(ROWS.values()) <= set(ENGINES)
    with pytest.raises(SystemExit):
        memory_sweep.EXPERIMENT.parse(["--rows", "no such row"])
