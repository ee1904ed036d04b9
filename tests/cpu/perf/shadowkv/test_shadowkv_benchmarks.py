"""ShadowKV's benchmarks: synthetic decode steps and their bytes, and what the reports say of rows."""

import pytest
import torch

from kvforge.compiler import BuildOptions
from kvforge.kv_policies.shadowkv import ShadowKV
from model_defs import load_config
from perf.harness.files import merge_rows
from perf.quality import shadowkv
from perf.quality.scores import against_full
from perf.quality.shadowkv import CROSS, Cell, cell_of
from perf.shadowkv import speed
from perf.shadowkv.decode import Load, SyntheticDecode, kept, shared_value_pools, traffic
from tests.support.sessions.eager import random_session

POLICY = "shadowkv:rank=24,sparse_budget=64,num_outlier_chunks=4"
SMALL = {
    **speed.MODEL,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def session():
    limits = {"max_num_seqs": 4, "max_num_tokens": 64, "max_seq_len": 1024, "page_size": 16}
    return random_session(load_config(SMALL), BuildOptions(dtype="float32", kv_policy=POLICY, **limits))


HIT_RATE = 0.08
"""Each of 2 x 192 places is emptied by chance, with a standard deviation of 0.03 at a half; the draws are fixed."""


def test_a_synthetic_step_runs_at_the_hit_rate_asked_for(session):
    torch.manual_seed(0)
    decode = SyntheticDecode(session, Load(400, 3))
    for wanted in (0.0, 0.5, 1.0):
        times, measured = decode.seconds(2, wanted, lambda: None)
        assert len(times) == 2 and measured == pytest.approx(wanted, abs=HIT_RATE)
    places = decode.places()
    assert places.shape == (4, 3, 2, 8) and (places >= 4).all()  # the first four chunks are the outliers
    tokens = decode.step()
    assert tokens.shape == (3,) and torch.equal(tokens, decode.step())


def test_owners_can_share_their_values(session):
    decode = SyntheticDecode(session, Load(400, 2), share_values=True)
    assert len({pool[-1].data_ptr() for pool in decode.pools}) == 1
    assert decode.step().shape == (2,)
    own = session.allocate_pools(5, 6, 2)
    for shared, pool in zip(shared_value_pools(session.manifest, 5, 6, 2), own, strict=True):
        assert [(tensor.shape, tensor.dtype) for tensor in shared] == [(tensor.shape, tensor.dtype) for tensor in pool]


def test_a_short_context_is_attended_in_full(session):
    load = Load(100, 2)
    decode = SyntheticDecode(session, load)
    assert decode.policy is None and decode.seconds(1, 0.0, lambda: None)[1] == 1.0
    assert traffic(session.manifest, load, 0.0).device == 4 * 2 * 101 * 2 * 2 * 16 * 4
    assert kept(session.manifest, load)[1] == 0


def test_bytes_of_a_step_by_hand(session):
    """Per layer and sequence: landmarks and marks of 46 chunks, SV, compact K,V, and of misses U, V."""
    load = Load(400, 3)
    compact = 64 + 32 + 32 + 1
    always = 46 * 2 * (16 * 4 + 1) + 24 * 2 * 16 * 4 + compact * 2 * 2 * 16 * 4
    missed_u, missed_v = 64 * 2 * 24 * 4, 64 * 2 * 16 * 4
    for hit_rate in (0.0, 0.25, 1.0):
        read = traffic(session.manifest, load, hit_rate)
        assert read.device == pytest.approx(12 * (always + (1 - hit_rate) * missed_u))
        assert read.host == pytest.approx(12 * (1 - hit_rate) * missed_v)


def test_speed_report(tmp_path):
    rows = [
        {
            "policy": policy,
            "context": context,
            "batch": batch,
            "hit_rate": rate,
            "step_s": context * 1e-6,
            "floor_s": context * 1e-7,
            "cache_bytes": context << 10,
            "host_cache_bytes": 0 if policy == "full" else context << 9,
        }
        for policy, rates in speed.HIT_RATES.items()
        for rate in rates
        for context in (2048, 4096)
        for batch in (1, 4)
    ]
    keys = speed.EXPERIMENT.merged
    assert len(rows) == 12 and merge_rows(rows, [{**rows[0], "step_s": 7}], keys)[0]["step_s"] == 7
    assert len(merge_rows(rows, rows, keys)) == 12
    text = speed.table({"rows": rows})
    assert len(text.splitlines()) == 14 and "| 4 | 4096 | ShadowKV, 60% hits | 4.10 | 0.41 | 4 + 2 host |" in text
    speed.plot({"rows": rows}, tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").stat().st_size > 1000


KEYS = ("sparse_budget", "rank")


def result(model, budget, rank, right):
    answers = [True] * right + [False] * (100 - right)
    return {"model": model, "sparse_budget": budget, "rank": rank, "correct": {"a": answers}, "texts": {"a": answers}}


def test_quality_report(tmp_path):
    results = [result(model, None, None, 90) for model in ("one", "two")]
    results += [
        result("one", 64, 8, 90),
        result("two", 64, 8, 80),
        result("one", 64, 16, 89),
        result("two", 64, 16, 90),
    ]
    rows = against_full(results, KEYS, with_texts=True)
    assert [row.get("share_of_full") for row in rows[2:]] == pytest.approx([1.0, 8 / 9, 89 / 90, 1.0])
    assert rows[3]["versus_full"]["lost"] == 10 and rows[3]["texts_changed"] == 10
    assert shadowkv.enough(rows) is None
    results += [result("one", 128, 8, 90), result("two", 128, 8, 95), result("one", 256, 8, 90)]
    rows = against_full(results, KEYS, with_texts=True)
    report = {"command": "c", "prompt_tokens": 2000, "seed": 1, "num_outlier_chunks": 8, "chunk_size": 8, "rows": rows}
    report["enough"] = shadowkv.enough(rows)
    text = shadowkv.EXPERIMENT.show(report)
    shadowkv.plot(report, tmp_path / "quality.png")
    assert "a budget of 128 tokens at rank 8." in text and "| two | 64 | 8 | 80.0 (71.1 to 86.7) | 88.9% |" in text
    assert (tmp_path / "quality.png").stat().st_size > 1000


def test_cells():
    assert cell_of("256:64") == Cell(256, 64)
    assert len(CROSS) == 7 and all(ShadowKV(cell.rank, sparse_budget=cell.budget) for cell in CROSS)
