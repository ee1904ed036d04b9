"""The memory sweep's arithmetic, its check of outputs and its table."""

import pytest

from kvforge.errors import KvforgeError
from perf import memory_sweep
from perf.memory_sweep import ENGINES, MERGED, ROWS, Load, check_outputs, markdown, num_pages
from perf.peers.systems import CUT, NO_CUT

LOAD = Load(4, 10, 2)


def test_the_bound_has_the_pages_of_one_cache_for_all_layers():
    assert num_pages(5, 3, 1, LOAD) == 5
    assert num_pages(2, 3, 4, LOAD) == 8
    assert num_pages(5, 3, 4, LOAD) == 12  # four requests cannot use more


def line(row, pool, digest="a", rate=100.0):
    rest = {"tokens_sha256": digest, "preemptions": 2} if rate else {}
    return {"row": row, "pool_mib": pool, "combined_tok_s": rate, "sequences_that_fit": 1, **rest}


def test_outputs_that_depend_on_the_pool_are_an_error():
    check_outputs([line(NO_CUT, 10), line(NO_CUT, 20), line(MERGED, 10), line(CUT, 10, "b"), line(CUT, 5, rate=None)])
    with pytest.raises(KvforgeError, match="cut 8: the tokens depend"):
        check_outputs([line(CUT, 10, "a"), line(CUT, 20, "b")])
    with pytest.raises(KvforgeError, match="no cut: the tokens depend"):
        check_outputs([line(NO_CUT, 10, "a"), line(MERGED, 10, "b")])  # the bound runs on the same engine


def test_the_table_has_a_row_per_variant_and_says_what_does_not_fit():
    lines = [line(CUT, 10), line(NO_CUT, 20), line(NO_CUT, 10, rate=None)]
    text = markdown(lines, {"command": "c", "machine": "m"}, LOAD)
    assert "| 20 MiB | 10 MiB |" in text
    assert f"| {NO_CUT} | 100 (1; 2) | does not fit |" in text
    assert f"| {CUT} |  | 100 (1; 2) |" in text


def test_rows_run_on_engines_that_can_be_built():
    assert set(ROWS.values()) <= set(ENGINES)
    with pytest.raises(SystemExit):
        memory_sweep.parse_arguments(["--rows", "no such row"])
